"""The slot engine against plain forward passes of the same model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from turnmill.errors import GenerationFailed, InvalidInput
from turnmill.generation.engine import EngineResult
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import FinishReason, Sampling

Make = Callable[..., TransformersEngine]
RunOut = Callable[[TransformersEngine], dict[str, EngineResult]]
Plain = Callable[..., list[float]]
Submit = Callable[..., str]

TOLERANCE = 1e-5


def assert_exact(plain: Plain, folder: Path, path: list[int], result: EngineResult, temperature: float = 1.0) -> None:
    expected = plain(folder, path, len(result.token_ids), temperature)
    assert result.error is None
    assert result.token_ids == path[-len(result.token_ids) :]
    assert max(abs(a - b) for a, b in zip(expected, result.logprobs, strict=True)) < TOLERANCE


def test_logprobs_equal_a_plain_forward_over_six_turns_while_calls_join_and_leave(
    any_model: Path, make_engine: Make, submit: Submit, plain_logprobs: Plain
) -> None:
    """More conversations than slots, random lengths, random arrival: caches are continued, evicted and prefilled."""
    engine = make_engine(any_model, num_slots=4)
    rng = random.Random(5)
    paths: dict[int, list[int]] = {conversation: [] for conversation in range(9)}
    turns = dict.fromkeys(paths, 0)
    running: dict[str, int] = {}
    num_held = num_prefilled = 0
    while any(turn < 6 for turn in turns.values()):
        waiting = [c for c, turn in turns.items() if turn < 6 and c not in running.values()]
        rng.shuffle(waiting)
        for conversation in waiting[: rng.randint(0, engine.num_free)]:
            turn = turns[conversation]
            key = f"{conversation}/{turn - 1}" if turn else None
            held = engine.held_length(key) if key else None
            assert held in (None, len(paths[conversation]))
            num_held += held is not None
            num_prefilled += bool(turn) and held is None
            # A text that was cut off may go on with nothing in between.
            new_ids = [rng.randrange(5, 500) for _ in range(rng.randint(0 if turn else 1, 12))]
            call_id = submit(
                engine,
                f"{conversation}/{turn}",
                new_ids,
                prefix_key=key,
                context_ids=None if held else list(paths[conversation]),
                sampling=Sampling(temperature=0.7 if conversation % 2 else 1.0),
                max_new_tokens=rng.randint(1, 7),
            )
            paths[conversation] += new_ids
            running[call_id] = conversation
        for result in engine.step():
            conversation = running.pop(result.call_id)
            paths[conversation] += result.token_ids
            turns[conversation] += 1
            temperature = 0.7 if conversation % 2 else 1.0
            assert_exact(plain_logprobs, any_model, paths[conversation], result, temperature)
            engine.keep(result.call_id, result.call_id)
    assert num_held > 5 and num_prefilled > 5


def test_a_call_samples_the_same_tokens_whatever_else_is_in_the_batch(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    alone = make_engine(any_model)
    submit(alone, "x", [7, 8, 9], max_new_tokens=20)
    expected = run_out(alone)["x"].token_ids
    crowded = make_engine(any_model)
    for i in range(3):
        submit(crowded, f"before-{i}", [20 + i] * (i + 1), max_new_tokens=5 + 3 * i)
    crowded.step()
    submit(crowded, "x", [7, 8, 9], max_new_tokens=20)
    submit(crowded, "beside", [30] * 40, max_new_tokens=2)
    assert run_out(crowded)["x"].token_ids == expected
    assert len(set(expected)) > 3


def test_two_calls_with_the_same_prompt_sample_different_tokens(
    random_llama: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(random_llama)
    for call_id in ("a", "b", "c"):
        submit(engine, call_id, [7, 8, 9], max_new_tokens=20)
    assert len({tuple(result.token_ids) for result in run_out(engine).values()}) == 3


def test_sampled_tokens_follow_the_model_s_distribution(
    random_llama: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(random_llama, num_slots=100)
    counts: dict[int, int] = {}
    num = 3000
    for start in range(0, num, 100):
        for i in range(start, start + 100):
            submit(engine, f"draw-{i}", [7, 8, 9], max_new_tokens=1)
        for result in run_out(engine).values():
            counts[result.token_ids[0]] = counts.get(result.token_ids[0], 0) + 1
    top = sorted(counts, key=lambda token: -counts[token])[:10]
    for token in top:
        expected = num * float(torch.tensor(plain_logprobs(random_llama, [7, 8, 9, token], 1)[0]).exp())
        assert abs(counts[token] - expected) < 5 * expected**0.5


def test_greedy_calls_take_the_likeliest_token_and_give_its_logprob_at_temperature_one(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(any_model)
    submit(engine, "greedy", [7, 8, 9], sampling=Sampling(temperature=0), max_new_tokens=6)
    submit(engine, "free", [7, 8, 9], max_new_tokens=6)
    greedy = run_out(engine)["greedy"]
    path = [7, 8, 9]
    for token in greedy.token_ids:
        scores = [plain_logprobs(any_model, [*path, other], 1)[0] for other in {*greedy.token_ids, 5, 6, 7, 100}]
        path.append(token)
        assert plain_logprobs(any_model, path, 1)[0] >= max(scores) - TOLERANCE
    assert_exact(plain_logprobs, any_model, path, greedy)


@pytest.mark.parametrize("sampling", [Sampling(top_k=3), Sampling(top_p=0.5), Sampling(top_k=5, top_p=0.7)])
def test_top_k_and_top_p_restrict_the_draw_while_the_logprob_stays_over_the_full_vocabulary(
    sampling: Sampling, random_llama: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(random_llama, num_slots=200)
    for i in range(200):
        submit(engine, f"draw-{i}", [7, 8, 9], sampling=sampling, max_new_tokens=1)
    drawn = {result.token_ids[0]: result for result in run_out(engine).values()}
    ranked = sorted(
        ((plain_logprobs(random_llama, [7, 8, 9, token], 1)[0], token) for token in range(engine.vocab_size)),
        reverse=True,
    )
    allowed, total = set(), 0.0
    for logprob, token in ranked[: sampling.top_k or None]:
        allowed.add(token)
        total += float(torch.tensor(logprob).exp())
        if sampling.top_p < 1 and not sampling.top_k and total >= sampling.top_p:
            break
    assert set(drawn) <= allowed and len(drawn) > 1
    for token, result in drawn.items():
        assert_exact(plain_logprobs, random_llama, [7, 8, 9, token], result)


def test_an_end_token_ends_the_call_and_is_part_of_it(
    random_llama: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(random_llama)
    submit(engine, "x", [7, 8], max_new_tokens=20)
    full = run_out(engine)["x"].token_ids
    end = full[5]
    submit(engine, "x2", [7, 8], seed_parts=("0", "train", "x"), max_new_tokens=20, end_ids=frozenset({end, 10**9}))
    stopped = run_out(engine)["x2"]
    assert stopped.token_ids == full[: full.index(end) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_call_of_one_token_and_an_end_token_is_answered_by_the_step_that_it_joins(
    random_llama: Path, make_engine: Make, submit: Submit
) -> None:
    engine = make_engine(random_llama)
    submit(engine, "long", [7, 8], max_new_tokens=20)
    assert engine.step() == []
    submit(engine, "short", [7, 8], max_new_tokens=2)
    assert [result.call_id for result in engine.step()] == ["short"]
    assert engine.num_running == 1


def test_a_call_may_be_longer_than_the_first_buffers(
    random_qwen3: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(random_qwen3, num_slots=3, max_length=512)
    rng = random.Random(1)
    short = [rng.randrange(5, 500) for _ in range(5)]
    long = [rng.randrange(5, 500) for _ in range(300)]
    submit(engine, "short", short, max_new_tokens=100)
    engine.step()
    submit(engine, "long", long, max_new_tokens=80)
    results = run_out(engine)
    for name, prompt in (("short", short), ("long", long)):
        path = prompt + results[name].token_ids
        assert_exact(plain_logprobs, random_qwen3, path, results[name])


def test_a_prompt_longer_than_one_pass_is_prefilled_in_chunks(
    tmp_path: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    torch.manual_seed(3)
    MistralForCausalLM(
        MistralConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=4096,
            sliding_window=None,
            initializer_range=0.2,
        )
    ).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, num_slots=5, max_length=4096)
    rng = random.Random(2)
    # All together they are more than one pass takes, too.
    lengths = {"a": 2500, "b": 30, "c": 1024, "d": 1000, "e": 1025}
    prompts = {name: [rng.randrange(64) for _ in range(num)] for name, num in lengths.items()}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, max_new_tokens=3)
    results = run_out(engine)
    for name, prompt in prompts.items():
        assert_exact(plain_logprobs, tmp_path, prompt + results[name].token_ids, results[name])


def test_the_longest_unused_cache_is_evicted_first(
    random_llama: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(random_llama, num_slots=2)
    for call_id in ("a", "b"):
        submit(engine, call_id, [7, 8])
        run_out(engine)
    submit(engine, "a2", [9], prefix_key="a")
    run_out(engine)
    submit(engine, "c", [7, 8])
    assert engine.held_length("b") is None
    assert engine.held_length("a2") == 2 + 4 + 1 + 4


def test_a_cache_that_was_never_kept_is_never_continued(random_llama: Path, make_engine: Make, submit: Submit) -> None:
    engine = make_engine(random_llama)
    submit(engine, "a", [7, 8], max_new_tokens=1)
    assert [result.call_id for result in engine.step()] == ["a"]
    assert engine.held_length("a") is None
    with pytest.raises(GenerationFailed) as failed:
        submit(engine, "a2", [9], prefix_key="a")
    assert failed.value.code == "missing_context"
    engine.keep("a", "digest of a")
    assert engine.held_length("digest of a") == 3


def test_keeping_a_call_whose_slot_was_taken_again_does_nothing(
    random_llama: Path, make_engine: Make, submit: Submit
) -> None:
    engine = make_engine(random_llama, num_slots=1)
    submit(engine, "a", [7, 8], max_new_tokens=1)
    engine.step()
    submit(engine, "b", [7, 8], max_new_tokens=1)
    engine.step()
    engine.keep("a", "a")
    engine.keep("b", "b")
    assert engine.held_length("a") is None
    assert engine.held_length("b") == 3


@pytest.mark.parametrize(
    ("new_ids", "changes", "code"),
    [
        ([], {}, "invalid_request"),
        ([1], {"max_new_tokens": 0}, "invalid_request"),
        ([10**6], {}, "invalid_request"),
        ([-1], {}, "invalid_request"),
        ([1] * 255, {"max_new_tokens": 2}, "context_length_exceeded"),
    ],
)
def test_a_call_that_can_not_run_is_refused_and_costs_no_slot(
    new_ids: list[int], changes: dict[str, Any], code: str, random_llama: Path, make_engine: Make, submit: Submit
) -> None:
    engine = make_engine(random_llama)
    with pytest.raises(GenerationFailed) as failed:
        submit(engine, "x", new_ids, **changes)
    assert failed.value.code == code
    assert (engine.num_free, engine.num_running) == (8, 0)


def test_more_calls_than_slots_are_refused(random_llama: Path, make_engine: Make, submit: Submit) -> None:
    engine = make_engine(random_llama, num_slots=1)
    submit(engine, "a", [7])
    with pytest.raises(GenerationFailed) as failed:
        submit(engine, "b", [7])
    assert failed.value.code == "no_free_slot"


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path, make_engine: Make) -> None:
    MambaForCausalLM(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1)).save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match="can't be served"):
        make_engine(tmp_path)


def test_a_sliding_window_limits_the_length_to_where_it_changes_nothing(tmp_path: Path, make_engine: Make) -> None:
    MistralForCausalLM(
        MistralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            sliding_window=40,
        )
    ).save_pretrained(tmp_path)
    assert make_engine(tmp_path).max_length == 40


def test_a_model_without_rotary_positions_is_served_too(
    tmp_path: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    """Learned positions, other names for heads and dimensions in the configuration."""
    torch.manual_seed(4)
    GPTNeoForCausalLM(
        GPTNeoConfig(
            vocab_size=64,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global"], 2]],
            max_position_embeddings=128,
            initializer_range=0.3,
        )
    ).save_pretrained(tmp_path)
    engine = make_engine(tmp_path)
    assert engine.max_length == 128
    submit(engine, "a", [1, 2, 3])
    submit(engine, "b", [5] * 9)
    first = run_out(engine)
    submit(engine, "a2", [4, 5], prefix_key="a")
    second = run_out(engine)
    path = [1, 2, 3, *first["a"].token_ids, 4, 5, *second["a2"].token_ids]
    assert_exact(plain_logprobs, tmp_path, path, second["a2"])
