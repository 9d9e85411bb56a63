"""The `TrainingStatus` record of a run: what its trainer says of itself, and how it fences the one before it."""

import time
from pathlib import Path

from turnmill.errors import Conflict
from turnmill.ports import RecordStore, Write
from turnmill.records import TrainingStatus, Version, decode, encode, training_key
from turnmill.training.history import write_all


class Status:
    """Written by compare-and-set: as soon as a second trainer of the run has opened it, the first one's writes fail."""

    def __init__(self, records: RecordStore, run_id: str, max_steps: int, incarnation: int, stored: int) -> None:
        self._records = records
        self._run_id = run_id
        self._max_steps = max_steps
        self.incarnation = incarnation
        # Version of the record.
        self._stored = stored
        # As written last.
        self.step = 0

    @classmethod
    async def open(cls, records: RecordStore, run_id: str, max_steps: int) -> "Status":
        """Become the next incarnation; raises `Conflict` if another process does so at the same moment."""
        (found,) = await records.get([training_key(run_id)])
        before = decode(found.value, TrainingStatus) if found else None
        incarnation = before.incarnation + 1 if before else 1
        status = cls(records, run_id, max_steps, incarnation, found.version if found else 0)
        await status.write("running", before.step if before else 0)
        return status

    async def write(
        self,
        state: str,
        step: int,
        *,
        error: str | None = None,
        checkpoint: Path | None = None,
        version: Version | None = None,
    ) -> None:
        """Raises `Conflict` if the run has another trainer by now."""
        record = TrainingStatus(
            run_id=self._run_id,
            state=state,
            step=step,
            max_steps=self._max_steps,
            incarnation=self.incarnation,
            updated_at=time.time(),
            error=error,
            checkpoint=str(checkpoint) if checkpoint else None,
            version=version,
        )
        await write_all(
            self._records, [Write(key=training_key(self._run_id), value=encode(record), expected=self._stored)]
        )
        self._stored += 1
        self.step = step

    async def check(self) -> None:
        """Raise `Conflict` if the run has another trainer by now."""
        (found,) = await self._records.get([training_key(self._run_id)])
        if found is None or found.version != self._stored:
            raise Conflict(f"{training_key(self._run_id)} was written by another process: the run has another trainer")
