import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from turnmill.errors import RecordCorrupt
from turnmill.ports import Stored
from turnmill.records import Call, Purpose, SampleRecord, Sampling, encode
from turnmill.training.samples import check_mask, rows_of, stored_record

Calls = Callable[..., Call]
Samples = Callable[..., SampleRecord]


@pytest.fixture
def talk(call_of: Calls, sample_of: Samples) -> tuple[SampleRecord, list[Call]]:
    """Two turns of one conversation."""
    first = call_of("t_0", 0, prompt=[2, 300, 6, 4], sampled=[310, 6])
    second = call_of("t_0", 1, first, prompt=[3, 20, 6], sampled=[311], temperature=0.5)
    return sample_of("t_0", [first, second]), [first, second]


def test_a_linear_conversation_is_one_row(talk: tuple[SampleRecord, list[Call]]) -> None:
    (row,) = rows_of(*talk)
    assert row.token_ids == [2, 300, 6, 4, 310, 6, 3, 20, 6, 311]
    assert row.loss_mask == [0, 0, 0, 0, 1, 1, 0, 0, 0, 1]
    assert row.logprobs == [0, 0, 0, 0, -0.5, -0.6, 0, 0, 0, -0.5]
    assert row.temperatures == [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5]
    assert [(span.call_id, span.start, span.end) for span in row.spans] == [("t_0_0", 0, 6), ("t_0_1", 6, 10)]
    assert row.span_at(6).call_id == "t_0_1"
    assert row.num_trained == 3


def test_tokens_that_branches_share_are_trained_in_the_first_row_only(call_of: Calls, sample_of: Samples) -> None:
    root = call_of("t_0", 0, prompt=[2, 4], sampled=[310])
    left = call_of("t_0", 1, root, prompt=[3], sampled=[311])
    right = call_of("t_0", 2, root, prompt=[5], sampled=[312, 6])
    other = call_of("t_0", 3, prompt=[2, 9], sampled=[313])
    rows = rows_of(sample_of("t_0", [root, left, right, other]), [root, left, right, other])
    assert [row.token_ids for row in rows] == [[2, 4, 310, 3, 311], [2, 4, 310, 5, 312, 6], [2, 9, 313]]
    assert [row.loss_mask for row in rows] == [[0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1]]
    assert rows[1].logprobs == [0, 0, 0, 0, -0.5, -0.6]
    sampled = sum(call.num_sampled for call in (root, left, right, other))
    assert sum(row.num_trained for row in rows) == sampled


def test_tokens_from_a_truncated_support_are_context(call_of: Calls, sample_of: Samples) -> None:
    call = call_of("t_0", 0)
    greedy = structs.replace(call, sampling=Sampling(temperature=0.0), loss_mask=[0] * len(call.token_ids)).sealed()
    assert rows_of(sample_of("t_0", [greedy]), [greedy]) == []
    after = call_of("t_0", 1, greedy)
    (row,) = rows_of(sample_of("t_0", [greedy, after]), [greedy, after])
    assert row.loss_mask == [0] * 6 + [0, 0, 0, 0, 1, 1] and row.logprobs[:6] == [0.0] * 6
    with pytest.raises(RecordCorrupt, match="loss_mask"):
        check_mask(structs.replace(greedy, loss_mask=call.loss_mask))


def test_a_sample_without_calls_has_no_rows(sample_of: Samples) -> None:
    assert rows_of(sample_of("t_0"), []) == []


ALTERED_CALLS: list[tuple[str, dict[str, Any]]] = [
    ("digest", {"loss_mask": [0, 0, 0, 1, 1, 1]}),
    ("digest", {"loss_mask": [0, 0, 0, 0, 0, 1]}),
    ("digest", {"token_ids": [2, 300, 6, 4, 311, 6]}),
    ("digest", {"logprobs": [-0.5, -0.61]}),
    ("digest", {"version": "1.1"}),
    ("digest", {"parent": "t_0_7"}),
    ("digest", {"parent_digest": "0" * 32}),
    ("run_id", {"run_id": "run-2"}),
    ("purpose", {"purpose": Purpose.EVAL}),
    ("sample_id", {"sample_id": "t_1"}),
    ("calls", {"call_id": "t_0_9"}),
]


@pytest.mark.parametrize(("field", "change"), [*ALTERED_CALLS, ("digest", {"digest": "0" * 32})])
def test_one_altered_field_of_a_call_is_evidence(
    talk: tuple[SampleRecord, list[Call]], field: str, change: dict[str, Any]
) -> None:
    sample, (first, second) = talk
    with pytest.raises(RecordCorrupt, match=rf"run-.*: {field}: expected .* found"):
        rows_of(sample, [structs.replace(first, **change), second])


@pytest.mark.parametrize("change", [change for _, change in ALTERED_CALLS])
def test_a_new_digest_does_not_hide_the_change_from_structure_and_from_the_next_call(
    talk: tuple[SampleRecord, list[Call]], change: dict[str, Any]
) -> None:
    sample, (first, second) = talk
    with pytest.raises(RecordCorrupt, match=r"expected .* found"):
        rows_of(sample, [structs.replace(first, **change).sealed(), second])


@pytest.mark.parametrize(
    "change",
    [
        {"reward": 0.0},
        {"reward": None},
        {"metrics": {"turns": 6.0}},
        {"sample_id": "t_1"},
        {"run_id": "run-2"},
        {"purpose": Purpose.BASELINE},
        {"attempt": 2},
        {"calls": ("t_0_0",)},
        {"calls": ("t_0_1", "t_0_0")},
        {"report_digest": None},
        {"report_digest": "0" * 32},
    ],
)
def test_one_altered_field_of_a_sample_is_evidence(
    talk: tuple[SampleRecord, list[Call]], change: dict[str, Any]
) -> None:
    sample, calls = talk
    with pytest.raises(RecordCorrupt, match=r"expected .* found"):
        rows_of(replace(sample, **change), calls)


def test_a_reward_under_another_samples_id_is_found_even_with_the_request_moved_along(
    talk: tuple[SampleRecord, list[Call]],
) -> None:
    sample, calls = talk
    moved = replace(sample, sample_id="t_1", request=replace(sample.request, sample_id="t_1"))
    with pytest.raises(RecordCorrupt, match="report_digest"):
        rows_of(moved, calls)


@pytest.mark.parametrize("kept", [[0], [1], [], [1, 0], [0, 0, 1]])
def test_calls_are_exactly_those_that_the_report_names(talk: tuple[SampleRecord, list[Call]], kept: list[int]) -> None:
    sample, calls = talk
    with pytest.raises(RecordCorrupt, match="calls"):
        rows_of(sample, [calls[i] for i in kept])


def test_a_parent_that_was_not_consumed_is_evidence(call_of: Calls, sample_of: Samples) -> None:
    first = call_of("t_0", 0)
    second = call_of("t_0", 1, first)
    with pytest.raises(RecordCorrupt, match=r"parent: expected .one of the calls"):
        rows_of(sample_of("t_0", [second]), [second])


def test_a_child_continues_the_content_of_its_parent_not_only_its_id(call_of: Calls, sample_of: Samples) -> None:
    first = call_of("t_0", 0)
    second = call_of("t_0", 1, first)
    other = call_of("t_0", 0, sampled=[320, 6])
    with pytest.raises(RecordCorrupt, match="parent_digest"):
        rows_of(sample_of("t_0", [other, second]), [other, second])


@pytest.mark.parametrize("mask", [[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 1], [0, 0, 0, 0, 1], []])
def test_the_mask_is_one_exactly_on_what_was_sampled(call_of: Calls, mask: list[int]) -> None:
    call = call_of("t_0", 0)
    check_mask(call)
    with pytest.raises(RecordCorrupt, match="loss_mask"):
        check_mask(structs.replace(call, loss_mask=mask))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_a_logprob_is_a_number_that_can_be_one(call_of: Calls, value: float) -> None:
    with pytest.raises(RecordCorrupt, match="logprobs"):
        check_mask(call_of("t_0", 0, logprobs=[value, -0.5]))


def test_more_logprobs_than_tokens_is_evidence(call_of: Calls) -> None:
    with pytest.raises(RecordCorrupt, match="length of logprobs"):
        check_mask(call_of("t_0", 0, logprobs=[-1.0] * 9))


def test_the_first_token_of_a_conversation_is_never_trained(call_of: Calls) -> None:
    with pytest.raises(RecordCorrupt, match="a prompt before"):
        check_mask(call_of("t_0", 0, prompt=[]))


def test_a_record_is_read_under_its_own_key_only(talk: tuple[SampleRecord, list[Call]]) -> None:
    sample, _ = talk
    stored = Stored(key=sample.key, value=encode(sample), version=1)
    assert stored_record(stored, sample.key, SampleRecord) == sample
    other = sample.key + "x"
    with pytest.raises(RecordCorrupt, match="key: expected"):
        stored_record(structs.replace(stored, key=other), other, SampleRecord)
    with pytest.raises(RecordCorrupt, match="missing"):
        stored_record(None, sample.key, SampleRecord)
    with pytest.raises(RecordCorrupt, match="can't be read"):
        stored_record(structs.replace(stored, value=b'{"run_id": 3}'), sample.key, SampleRecord)
