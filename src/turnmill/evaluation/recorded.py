"""Rollouts of evaluations as the records have them: which there are, and whose weights sampled them."""

from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore
from turnmill.records import Call, Purpose, SampleRecord, SampleState, call_key, decode, sample_prefix

_PAGE = 500


class RecordedRollouts:
    """Implements `History` for one run."""

    def __init__(self, records: RecordStore, run_id: str) -> None:
        self._records = records
        self._run_id = run_id

    async def earlier(self, group_prefix: str, version: str) -> list[SampleRecord]:
        """See `History.earlier`."""
        found = [
            sample
            for sample in await self._samples()
            if sample.group_id.startswith(group_prefix)
            and sample.state is SampleState.REPORTED
            and await self.is_whole(sample, version)
        ]
        return sorted(found, key=lambda sample: (sample.created_at, sample.sample_id))

    async def open_ones(self) -> list[str]:
        """Samples that a process had asked for which is gone: nobody waits for them."""
        return [sample.sample_id for sample in await self._samples() if sample.state.is_open]

    async def is_whole(self, sample: SampleRecord, version: str) -> bool:
        """See `History.is_whole`; raises `RecordCorrupt` for a call that is not recorded."""
        keys = [call_key(sample.run_id, sample.purpose, sample.sample_id, call_id) for call_id in sample.calls]
        for start in range(0, len(keys), _PAGE):
            page = keys[start : start + _PAGE]
            for key, stored in zip(page, await self._records.get(page), strict=True):
                if stored is None:
                    raise RecordCorrupt(f"{key} is not recorded, and sample {sample.key} consumed it")
                if decode(stored.value, Call).version != version:
                    return False
        return True

    async def _samples(self) -> list[SampleRecord]:
        prefix = sample_prefix(self._run_id, Purpose.EVAL)
        found: list[SampleRecord] = []
        page = await self._records.scan(prefix, limit=_PAGE)
        while page:
            found += [decode(stored.value, SampleRecord) for stored in page]
            page = await self._records.scan(prefix, after=page[-1].key, limit=_PAGE)
        return found
