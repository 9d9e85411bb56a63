"""What recorded batches make of the samples of a run."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from turnmill.backends.embedded import open_run
from turnmill.errors import Conflict, RecordCorrupt
from turnmill.ports import RecordStore, Write
from turnmill.records import (
    Batch,
    BatchState,
    DropReason,
    Purpose,
    SampleRecord,
    SampleState,
    Version,
    decode,
    encode,
)
from turnmill.training.history import live_batches, scan_all, settle, supersede, write_all

RUN = "run-1"
MakeSample = Callable[..., SampleRecord]


@pytest.fixture
async def records(tmp_path: Path) -> AsyncIterator[RecordStore]:
    ports = open_run(tmp_path, RUN, num_replicas=0)
    yield ports.records
    ports.close()


async def put(records: RecordStore, *items: Batch | SampleRecord) -> None:
    await records.write([Write(key=item.key, value=encode(item), expected=None) for item in items])


def applied(step: int, *sample_ids: str, incarnation: int = 1) -> Batch:
    return Batch(
        run_id=RUN,
        step=step,
        incarnation=incarnation,
        groups=(sample_ids,),
        state=BatchState.APPLIED,
        version=Version(incarnation=incarnation, n=step),
        digest=f"digest of {step}",
    )


async def states(records: RecordStore, purpose: Purpose = Purpose.TRAIN) -> dict[str, str]:
    found = [decode(s.value, SampleRecord) for s in await scan_all(records, f"samples/{RUN}/{purpose}/")]
    return {s.sample_id: s.state + (f":{s.drop_reason}" if s.drop_reason else "") for s in found}


async def test_every_sample_gets_the_state_that_its_batch_gives_it(records: RecordStore, sample_of: MakeSample) -> None:
    def sample(name: str, state: SampleState, step: int | None = None) -> SampleRecord:
        return replace(sample_of(name), state=state, step=step)

    live = [applied(1, "a_0", "a_1", "a_2"), replace(applied(2, "b_0", "b_1"), state=BatchState.RECORDED)]
    await put(
        records,
        sample("a_0", SampleState.TRAINED, 1),
        sample("a_1", SampleState.BATCHED, 1),
        sample("a_2", SampleState.REPORTED),
        sample("b_0", SampleState.REPORTED),
        sample("b_1", SampleState.BATCHED, 2),
        sample("c_0", SampleState.REQUESTED),
        sample("c_1", SampleState.LEASED),
        sample("c_2", SampleState.REPORTED),
        sample("c_3", SampleState.BATCHED, 3),
        sample("c_4", SampleState.TRAINED, 3),
        replace(sample("c_5", SampleState.DROPPED), drop_reason=DropReason.NO_SIGNAL),
        sample("c_6", SampleState.INVALID),
    )
    changed = await settle(records, RUN, Purpose.TRAIN, live)
    assert changed == {SampleState.TRAINED: 2, SampleState.BATCHED: 1, SampleState.DROPPED: 5}
    assert await states(records) == {
        **dict.fromkeys(("a_0", "a_1", "a_2"), "trained"),
        **dict.fromkeys(("b_0", "b_1"), "batched"),
        **dict.fromkeys(("c_0", "c_1", "c_2", "c_3", "c_4"), "dropped:superseded"),
        "c_5": "dropped:no_signal",
        "c_6": "invalid",
    }
    assert not await settle(records, RUN, Purpose.TRAIN, live)


async def test_what_an_evaluation_had_played_stays_and_what_it_waited_for_is_dropped(
    records: RecordStore, sample_of: MakeSample
) -> None:
    for name, state in (("e_0", SampleState.REPORTED), ("e_1", SampleState.LEASED), ("e_2", SampleState.INVALID)):
        await put(records, replace(sample_of(name), purpose=Purpose.EVAL, state=state))
    await settle(records, RUN, Purpose.EVAL, [])
    found = await states(records, Purpose.EVAL)
    assert found == {"e_0": "reported", "e_1": "dropped:superseded", "e_2": "invalid"}


async def test_more_samples_than_a_page_are_settled(records: RecordStore, sample_of: MakeSample) -> None:
    await put(records, *(replace(sample_of(f"t_{g}"), state=SampleState.LEASED) for g in range(2100)))
    assert await settle(records, RUN, Purpose.TRAIN, []) == {SampleState.DROPPED: 2100}


async def test_a_sample_that_can_not_be_in_its_batch_is_evidence(records: RecordStore, sample_of: MakeSample) -> None:
    await put(records, replace(sample_of("a_0"), state=SampleState.INVALID))
    with pytest.raises(RecordCorrupt, match=r"a_0: state: expected .*TRAINED.* of batches/run-1/00000001\.1, found"):
        await settle(records, RUN, Purpose.TRAIN, [applied(1, "a_0")])


async def test_giving_up_steps_leaves_a_gapless_beginning_wherever_it_is_interrupted(records: RecordStore) -> None:
    await put(records, *(applied(step, f"t_{step}") for step in (1, 2, 3, 4)))

    class Dying:
        """Dies at the second write."""

        num_writes = 0

        async def write(self, writes: list[Write]) -> list[bool]:
            self.num_writes += 1
            if self.num_writes == 2:
                raise RuntimeError("killed")
            return await records.write(writes)

        def __getattr__(self, name: str) -> object:
            return getattr(records, name)

    with pytest.raises(RuntimeError, match="killed"):
        await supersede(Dying(), RUN, 1)  # type: ignore[arg-type]
    assert [item.batch.step for item in await live_batches(records, RUN)] == [1, 2, 3]
    assert [batch.step for batch in await supersede(records, RUN, 1)] == [2, 3]
    assert [item.batch.step for item in await live_batches(records, RUN)] == [1]
    assert await supersede(records, RUN, 1) == []


async def test_only_the_last_batch_may_wait_to_be_applied(records: RecordStore) -> None:
    await put(records, replace(applied(1, "a_0"), state=BatchState.RECORDED), applied(2, "b_0"))
    with pytest.raises(RecordCorrupt, match=r"00000001\.1 was never applied, but step 2 has a batch"):
        await live_batches(records, RUN)


async def test_a_write_that_somebody_forestalled_names_its_record(records: RecordStore) -> None:
    await put(records, applied(1, "a_0"))
    with pytest.raises(Conflict, match=r"batches/run-1/00000001\.1 changed since it was read at version 7"):
        await write_all(records, [Write(key=applied(1).key, value=b"{}", expected=7)])
