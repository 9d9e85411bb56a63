"""Conversations that begin alike: their common tokens are computed once."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnmill.generation.engine import EngineResult
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.generation.transformers_engine.openings import Openings
from turnmill.records import Version

Make = Callable[..., TransformersEngine]
Submit = Callable[..., str]
RunOut = Callable[[TransformersEngine], dict[str, EngineResult]]
Plain = Callable[..., list[float]]

PROMPT = list(range(20, 50))


def count_tokens(engine: TransformersEngine) -> list[int]:
    """Tokens of each pass from now on."""
    counts: list[int] = []
    compute = engine._model.logits

    def counting(groups: Any) -> Any:
        counts.append(sum(int(group.num_b.sum()) for group in groups))
        return compute(groups)

    engine._model.logits = counting  # type: ignore[method-assign]
    return counts


def assert_exact(plain: Plain, folder: Path, prompt: list[int], result: EngineResult) -> None:
    assert result.error is None
    path = prompt + result.token_ids
    expected = plain(folder, path, len(result.token_ids), 1.0)
    assert max(abs(a - b) for a, b in zip(expected, result.logprobs, strict=True)) < 1e-5


def test_a_prompt_that_calls_share_is_computed_once_and_sampled_from_for_each(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(any_model, num_slots=8)
    counts = count_tokens(engine)
    for number in range(6):
        submit(engine, f"{number}", PROMPT, max_new_tokens=4)
    results = run_out(engine)
    # All of it once, its last token for each of the others, three more tokens for each.
    assert sum(counts) == len(PROMPT) + 5 + 6 * 3
    assert len({tuple(result.token_ids) for result in results.values()}) > 1
    for result in results.values():
        assert_exact(plain_logprobs, any_model, PROMPT, result)


def test_later_calls_take_the_prompt_from_conversations_that_went_on(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(any_model, num_slots=2)
    submit(engine, "a", PROMPT, max_new_tokens=3)
    run_out(engine)
    engine.keep("a", "a")
    submit(engine, "a1", [7, 8, 9], prefix_key="a", max_new_tokens=3)
    counts = count_tokens(engine)
    submit(engine, "b", PROMPT, max_new_tokens=1)
    results = run_out(engine)
    # The new tokens of `a1` and the last one that it sampled before, the last one of the prompt, and two that run on.
    assert sum(counts) == 4 + 1 + 2
    assert_exact(plain_logprobs, any_model, PROMPT, results["b"])
    # The slot of `a`, and with it the prompt, goes to another conversation; `b` has it still.
    submit(engine, "other", list(range(60, 75)), max_new_tokens=1)
    submit(engine, "c", PROMPT, max_new_tokens=1)
    assert_exact(plain_logprobs, any_model, PROMPT, run_out(engine)["c"])


def test_a_slot_that_begins_again_with_its_own_prompt_computes_one_token(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut, plain_logprobs: Plain
) -> None:
    engine = make_engine(any_model, num_slots=1)
    submit(engine, "a", PROMPT, max_new_tokens=1)
    run_out(engine)
    counts = count_tokens(engine)
    submit(engine, "b", PROMPT, max_new_tokens=1)
    assert_exact(plain_logprobs, any_model, PROMPT, run_out(engine)["b"])
    assert counts == [1]


def test_new_weights_share_nothing_with_old_ones(
    any_model: Path, make_engine: Make, submit: Submit, run_out: RunOut
) -> None:
    engine = make_engine(any_model, num_slots=2)
    submit(engine, "a", PROMPT, max_new_tokens=1)
    run_out(engine)
    engine.load(any_model, Version(incarnation=1, n=1))
    counts = count_tokens(engine)
    submit(engine, "b", PROMPT, max_new_tokens=1)
    run_out(engine)
    assert counts == [len(PROMPT)]


def test_random_beginnings_in_few_slots_stay_exact(
    any_model: Path, make_engine: Make, submit: Submit, plain_logprobs: Plain
) -> None:
    rng = random.Random(3)
    engine = make_engine(any_model, num_slots=4)
    prompts = [[rng.randrange(5, 500) for _ in range(length)] for length in (9, 9, 14, 40, 4)]
    running: dict[str, list[int]] = {}
    number = 0
    while number < 60 or running:
        while number < 60 and engine.num_free and rng.random() < 0.7:
            prompt = rng.choice(prompts)
            running[submit(engine, f"{number}", prompt, max_new_tokens=rng.randint(1, 5))] = prompt
            number += 1
        for result in engine.step():
            assert_exact(plain_logprobs, any_model, running.pop(result.call_id), result)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_short_beginnings_are_not_shared(num_tokens: int) -> None:
    openings = Openings()
    tokens = np.arange(num_tokens)
    assert not openings.begin(0, tokens) and not openings.begin(1, tokens)
    assert not openings.waits(1)


def test_who_waits_for_a_source_that_is_gone_becomes_one() -> None:
    openings, tokens = Openings(), np.arange(20)
    for slot in range(3):
        openings.begin(slot, tokens)
    to_prefill, length_s = dict.fromkeys(range(3), tokens), np.zeros(3, dtype=np.int64)
    assert openings.ready(to_prefill, length_s) == []
    openings.drop(0)
    assert openings.ready(to_prefill, length_s) == []
    assert not openings.waits(1) and openings.waits(2)
    length_s[1] = 19
    assert openings.ready(to_prefill, length_s) == [(1, [2])]
