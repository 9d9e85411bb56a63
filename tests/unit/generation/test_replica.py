"""What a replica records and answers."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.generation.bench import (
    FEEDBACK,
    OPENING,
    CountingEngine,
    Plain,
    ask,
    assert_exact,
    receive,
    recorded,
    request_for,
    sampled,
    serving,
)
from turnmill.generation.renderer import Renderer
from turnmill.ports import Message, RunPorts, Write
from turnmill.records import FinishReason, Purpose, Sampling, call_key, encode


@pytest.mark.parametrize("num_slots", [1, 8])
async def test_six_turns_are_exact_whether_caches_are_held_or_evicted(
    num_slots: int, ports: RunPorts, any_model: Path, plain_logprobs: Plain
) -> None:
    engine = CountingEngine(any_model, num_slots=num_slots)
    renderer = Renderer(any_model)
    paths: dict[str, list[int]] = {"a": [], "b": []}
    async with serving(ports, engine, any_model):
        for turn in range(6):
            for sample_id, path in paths.items():
                call_id, parent = f"{sample_id}_{turn}", f"{sample_id}_{turn - 1}" if turn else None
                messages = FEEDBACK if turn else OPENING
                await ask(ports, request_for(call_id, messages, parent=parent))
                call = await recorded(ports, call_id)
                ended = bool(path) and path[-1] in renderer.end_ids
                new_ids = renderer.continuation(messages, ended=ended) if turn else renderer.opening(messages)
                path += [*new_ids, *sampled(call)]
                assert call.token_ids == [*new_ids, *sampled(call)]
                assert call.loss_mask == [0] * len(new_ids) + [1] * call.num_sampled
                assert_exact(plain_logprobs, any_model, path, call)
    had_to_read = [call for call in engine.submitted if call.context_ids is not None]
    assert len(had_to_read) == (10 if num_slots == 1 else 0)


@pytest.fixture
def speller(tmp_path: Path, tokenizer: Any) -> Path:
    """A model that always spells "crane" letter by letter: its logits depend on the last token alone."""
    letters = [f"<0x{ord(letter):02X}>" for letter in "crane"]
    chain = tokenizer.convert_tokens_to_ids(["<|assistant|>", *letters, "<|end|>"])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, 15] = 1.0
        for place, (token, following) in enumerate(pairwise(chain)):
            model.model.embed_tokens.weight[token] = torch.eye(16)[place]
            model.lm_head.weight[following] = torch.eye(16)[place] * 20
    folder = tmp_path / "speller"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


async def test_what_was_sampled_is_never_tokenized_again(
    ports: RunPorts, speller: Path, tokenizer: Any, plain_logprobs: Plain
) -> None:
    letters = tokenizer.convert_tokens_to_ids([f"<0x{ord(letter):02X}>" for letter in "crane"])
    assert len(tokenizer.encode("crane", add_special_tokens=False)) == 1
    renderer = Renderer(speller)
    path: list[int] = []
    async with serving(ports, CountingEngine(speller), speller):
        for turn in range(6):
            messages = FEEDBACK if turn else OPENING
            await ask(ports, request_for(f"a_{turn}", messages, parent=f"a_{turn - 1}" if turn else None))
            call = await recorded(ports, f"a_{turn}")
            assert call.reply == {"role": "assistant", "content": "crane"}
            assert sampled(call) == [*letters, tokenizer.eos_token_id]
            path += call.token_ids
            assert_exact(plain_logprobs, speller, path, call)
    expected = renderer.opening(OPENING)
    for turn in range(6):
        expected += [*letters, tokenizer.eos_token_id]
        expected += renderer.continuation(FEEDBACK, ended=True) if turn < 5 else []
    assert path == expected


async def test_a_reply_that_was_cut_is_closed_with_an_untrained_end_token(ports: RunPorts, speller: Path) -> None:
    renderer = Renderer(speller)
    async with serving(ports, CountingEngine(speller), speller):
        response = await ask(ports, request_for("a_0", sampling=Sampling(max_new_tokens=2)))
        assert response.finish_reason == "length"
        await ask(ports, request_for("a_1", FEEDBACK, parent="a_0"))
    first, second = await recorded(ports, "a_0"), await recorded(ports, "a_1")
    assert (first.finish_reason, first.reply["content"]) == (FinishReason.LENGTH, "cr")
    assert second.token_ids[0] in renderer.end_ids and second.loss_mask[0] == 0
    assert second.parent_digest == first.digest


async def test_the_answer_on_the_wire_brings_the_record(ports: RunPorts, shipped: Path) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        response = await ask(ports, request_for("a_0"))
    call = await recorded(ports, "a_0")
    assert response.call == call and call.digest == call.expected_digest()
    assert (response.version, response.sample_id, response.step_id) == ("v0", "a", "a_0")
    assert response.finish_reason == "stop" and response.error is None
    assert call.version == "0.0"


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(top_k=3), Sampling(top_p=0.9)])
async def test_tokens_from_a_restricted_draw_are_never_trained(
    sampling: Sampling, ports: RunPorts, shipped: Path, plain_logprobs: Plain
) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        await ask(ports, request_for("a_0", sampling=structs.replace(sampling, max_new_tokens=8)))
    call = await recorded(ports, "a_0")
    assert set(call.loss_mask) == {0}
    assert_exact(plain_logprobs, shipped, call.token_ids, call)


async def test_a_stop_string_ends_the_call_and_cuts_the_text_and_no_token(ports: RunPorts, speller: Path) -> None:
    async with serving(ports, CountingEngine(speller), speller):
        sampling = Sampling(max_new_tokens=5, stop=("an",))
        response = await ask(ports, request_for("a_0", sampling=sampling))
    call = await recorded(ports, "a_0")
    assert call.reply["content"] == "cr" and call.num_sampled == len("cran")
    assert response.finish_reason == "stop"


async def test_calls_are_seeded_by_run_seed_purpose_and_call(ports: RunPorts, random_llama: Path) -> None:
    async with serving(ports, CountingEngine(random_llama), random_llama, seed=7):
        for call_id, purpose in (("a_0", Purpose.TRAIN), ("a_0", Purpose.EVAL), ("b_0", Purpose.TRAIN)):
            request = request_for(call_id, purpose=purpose)
            await ports.generate_request[0].send(
                [Message(body=encode(request), group=f"{purpose}{call_id}", dedup_id=f"{purpose}{call_id}")]
            )
        responses = await receive(ports, 3)
    contents = {tuple(response.call.token_ids) for response in responses if response.call}
    assert len(contents) == 3


async def test_a_call_ends_where_the_conversation_is_full(ports: RunPorts, speller: Path) -> None:
    num_prompt = len(Renderer(speller).opening(OPENING))
    async with serving(ports, CountingEngine(speller), speller):
        response = await ask(ports, request_for("a_0", max_length=num_prompt + 3))
    assert response.finish_reason == "length"
    assert len((await recorded(ports, "a_0")).token_ids) == num_prompt + 3


async def test_a_replica_that_remembers_a_parent_goes_on_like_one_that_reads_it(
    ports: RunPorts, random_llama: Path
) -> None:
    """First one replica for all turns, then, with the records away, a new one for each. Every second reply is cut."""
    turns = [request_for("a_0", sampling=Sampling(max_new_tokens=2))]
    for number in range(1, 5):
        sampling = Sampling(max_new_tokens=2 + 30 * (number % 2))
        turns.append(request_for(f"a_{number}", FEEDBACK, parent=f"a_{number - 1}", sampling=sampling))
    async with serving(ports, CountingEngine(random_llama), random_llama):
        remembering = [await ask(ports, turn) for turn in turns]
    reading = []
    for turn in turns:
        key = call_key("run", Purpose.TRAIN, "a", turn.step_id)
        await ports.records.write([Write(key=key, value=None, expected=None)])
    for turn in turns:
        async with serving(ports, CountingEngine(random_llama), random_llama):
            reading.append(await ask(ports, structs.replace(turn, epoch=1)))
    for known, read in zip(remembering, reading, strict=True):
        assert known.call is not None and read.call is not None
        assert known.finish_reason == read.finish_reason
        for name in ("token_ids", "loss_mask", "reply", "messages", "parent", "finish_reason", "version"):
            assert getattr(known.call, name) == getattr(read.call, name), name
        assert known.call.logprobs == pytest.approx(read.call.logprobs, abs=1e-5)
    for calls in (remembering, reading):
        for before, after in pairwise(calls):
            assert before.call is not None and after.call is not None
            assert after.call.parent_digest == before.call.digest
