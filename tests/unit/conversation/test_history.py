"""Reading calls and samples: what was altered or put under a foreign key is refused."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from turnmill.backends.embedded import open_run
from turnmill.conversation.history import checked_call, checked_sample, path_of, read_calls, write_calls
from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore, Stored
from turnmill.records import (
    Call,
    FinishReason,
    Purpose,
    RolloutRequest,
    SampleRecord,
    SampleState,
    Sampling,
    encode,
)


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[RecordStore]:
    ports = open_run(tmp_path, "r", num_replicas=1)
    yield ports.records
    ports.close()


def call(c: int, *, parent: Call | None = None, sample_id: str = "s") -> Call:
    return Call(
        run_id="r",
        purpose=Purpose.TRAIN,
        sample_id=sample_id,
        call_id=f"{sample_id}_{c}",
        attempt=1,
        parent=parent.call_id if parent else None,
        parent_digest=parent.digest if parent else "",
        choice=0,
        request_digest="d",
        sampling=Sampling(),
        messages=[{"role": "user", "content": "a"}],
        reply={"role": "assistant", "content": "b"},
        token_ids=[1, 2, 3],
        loss_mask=[0, 1, 1],
        logprobs=[-0.1, -0.2],
        version="0.0",
        finish_reason=FinishReason.STOP,
        created_at=0.0,
    ).sealed()


def sample() -> SampleRecord:
    request = RolloutRequest(sample_id="s", timestamp="", max_length=9, rewards={"range": [0.0, 1.0]}, data={})
    made = SampleRecord(
        run_id="r",
        purpose=Purpose.TRAIN,
        sample_id="s",
        task_id="t",
        group_id="g",
        state=SampleState.REPORTED,
        created_at=0.0,
        request=request,
        deadline=0.0,
        attempt=1,
        reward=0.5,
        calls=("s_0",),
    )
    return replace(made, report_digest=made.expected_report_digest())


async def test_calls_are_read_in_their_order_and_only_of_the_sample(records: RecordStore) -> None:
    calls = [call(c) for c in (11, 2, 0)]
    assert await write_calls(records, [*calls, call(0, sample_id="s/0")]) == [True] * 4
    read = await read_calls(records, "r", Purpose.TRAIN, "s")
    assert [item.call_id for item in read] == ["s_0", "s_2", "s_11"]
    assert await write_calls(records, [structs.replace(call(0), version="9.9").sealed()]) == [False]
    assert await read_calls(records, "r", Purpose.TRAIN, "s") == read


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [1, 1, 1]},
        {"token_ids": [1, 2, 4]},
        {"logprobs": [-0.1, -0.3]},
        {"version": "1.1"},
        {"reply": {"role": "assistant", "content": "c"}},
        {"parent_digest": "x"},
        {"digest": ""},
    ],
)
def test_an_altered_call_is_refused(change: dict[str, Any]) -> None:
    good = call(0)
    assert checked_call(Stored(key=good.key, value=encode(good), version=1)) == good
    with pytest.raises(RecordCorrupt, match="s_0"):
        checked_call(Stored(key=good.key, value=encode(structs.replace(good, **change)), version=1))


def test_a_call_under_another_key_or_with_missing_tokens_is_refused() -> None:
    good = call(0)
    with pytest.raises(RecordCorrupt, match="holds the call"):
        checked_call(Stored(key=call(1).key, value=encode(good), version=1))
    with pytest.raises(RecordCorrupt, match="3 tokens, 2 mask bits"):
        short = structs.replace(good, loss_mask=[0, 1]).sealed()
        checked_call(Stored(key=good.key, value=encode(short), version=1))
    with pytest.raises(RecordCorrupt, match="is no Call"):
        checked_call(Stored(key=good.key, value=b"{}", version=1))


def test_an_altered_sample_is_refused() -> None:
    good = sample()
    assert checked_sample(Stored(key=good.key, value=encode(good), version=1)) == good
    for changed in (replace(good, reward=1.0), replace(good, calls=()), replace(good, attempt=2)):
        with pytest.raises(RecordCorrupt, match="altered"):
            checked_sample(Stored(key=good.key, value=encode(changed), version=1))
    with pytest.raises(RecordCorrupt, match="holds the sample"):
        checked_sample(Stored(key="samples/r/train/other", value=encode(good), version=1))


def test_a_path_goes_from_the_start_to_the_call() -> None:
    first = call(0)
    second = call(1, parent=first)
    third = call(2, parent=second)
    calls = {item.call_id: item for item in (first, second, third, call(3, parent=first))}
    assert path_of(third, calls) == [first, second, third]


def test_a_path_with_a_missing_changed_or_circular_link_is_refused() -> None:
    first = call(0)
    second = call(1, parent=first)
    with pytest.raises(RecordCorrupt, match="not recorded"):
        path_of(second, {})
    other = structs.replace(first, version="1.1").sealed()
    with pytest.raises(RecordCorrupt, match="another content"):
        path_of(second, {"s_0": other})
    own = structs.replace(first, parent="s_0", parent_digest=first.digest)
    with pytest.raises(RecordCorrupt, match="its own ancestor"):
        path_of(structs.replace(own, digest=first.digest), {"s_0": structs.replace(own, digest=first.digest)})
