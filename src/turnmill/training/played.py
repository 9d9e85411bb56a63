"""What an ended sample consists of: the calls that it consumed, and what the metrics need of them."""

from collections.abc import Sequence

from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore, Stored
from turnmill.records import Call, SampleRecord, Version, call_key
from turnmill.training.samples import stored_record, trained_ids
from turnmill.training.tally import Rollout

# Records read at once.
_PAGE = 500


async def get_all(records: RecordStore, keys: Sequence[str]) -> list[Stored | None]:
    """One entry a key, in order, read in pages."""
    found: list[Stored | None] = []
    for start in range(0, len(keys), _PAGE):
        found += await records.get(keys[start : start + _PAGE])
    return found


async def load_calls(records: RecordStore, samples: Sequence[SampleRecord]) -> list[list[Call]]:
    """The calls that each sample consumed, in its order; raises `RecordCorrupt` for a missing or unreadable one."""
    keys = [
        call_key(sample.run_id, sample.purpose, sample.sample_id, call_id)
        for sample in samples
        for call_id in sample.calls
    ]
    found = iter(await get_all(records, keys))
    key = iter(keys)
    return [[stored_record(next(found), next(key), Call) for _ in sample.calls] for sample in samples]


def oldest_version(calls: Sequence[Call]) -> int | None:
    """The n of the oldest version that sampled a token that is trained; None where nothing is."""
    trained = trained_ids(calls)
    return min((Version.parse(call.version).n for call in calls if call.call_id in trained), default=None)


def rollout_of(sample: SampleRecord, reward: float, calls: Sequence[Call], num_steps: int) -> Rollout:
    """What the metrics need, of a sample that ended after `num_steps` optimizer steps.

    `calls` come in order of first use, so a parent's length is known before its child's.
    """
    lengths: dict[str | None, int] = {None: 0}
    for call in calls:
        if call.parent not in lengths:
            raise RecordCorrupt(f"{call.key}: parent: expected one of {list(lengths)}, found {call.parent!r}")
        lengths[call.call_id] = lengths[call.parent] + len(call.token_ids)
    oldest = oldest_version(calls)
    return Rollout(
        reward=reward,
        metrics=sample.metrics,
        num_sampled=sum(call.num_sampled for call in calls),
        length=max(lengths.values()),
        staleness=0 if oldest is None else max(0, num_steps - oldest),
        is_truncated=sample.is_truncated,
    )
