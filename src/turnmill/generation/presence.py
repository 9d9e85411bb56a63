"""What a replica says of itself: its status record, written at each change and as a sign of life in between.

    begin: LOADING -> serve: SERVING -> [await_swap -> begin_swap -> serve]* -> drain: DRAINING -> end: STOPPED
                  \\-> refuse: STOPPED, with the error

Proxies and the trainer go by it: a replica that says nothing is gone for them.
"""

import asyncio
import logging
import os
import time
from dataclasses import replace
from typing import Any

from turnmill.config import Config
from turnmill.ports import RecordStore, Write
from turnmill.records import (
    GONE_AFTER_S,
    HEARTBEAT_S,
    ReplicaState,
    ReplicaStatus,
    Version,
    decode,
    encode,
    replica_key,
)

logger = logging.getLogger(__name__)
# A replica that has waited for its running calls for longer says so when it loads.
_LONG_WAIT_S = 5.0
# Of the versions proved last, at least, it is told that they were.
_NUM_FINGERPRINTS = 8


class Presence:
    """The status of one replica process."""

    def __init__(self, records: RecordStore, run_id: str, name: str, version: Version, config: Config) -> None:
        self._records = records
        self._key = replica_key(run_id, name)
        self._config = config
        self._status = ReplicaStatus(
            run_id=run_id,
            replica=name,
            version=version,
            fingerprints={},
            updated_at=time.time(),
            pid=os.getpid(),
            state=ReplicaState.LOADING,
        )
        # Writes come in the order of what they say.
        self._writing = asyncio.Lock()
        # On the monotonic clock, as the next one.
        self._written_at = time.monotonic()
        # Since when it waits for running calls; None: it does not.
        self._waits_since: float | None = None

    @property
    def num_refusals(self) -> int:
        """Processes of this name in a row, this one included, whose memory was not what was published."""
        return self._status.num_refusals

    async def begin(self) -> None:
        """Say that the process is there, in the place of the one before it, whose proofs still count."""
        (stored,) = await self._records.get([self._key])
        if stored is not None:
            before = decode(stored.value, ReplicaStatus)
            self._status = replace(
                self._status,
                fingerprints=before.fingerprints,
                num_refusals=before.num_refusals,
                error=before.error if before.num_refusals else None,
            )
        await self._change()

    async def serve(self, version: Version, fingerprint: str) -> None:
        """The memory was proved to hold `version`."""
        before = self._status
        fingerprints = {key: value for key, value in before.fingerprints.items() if key != str(version)}
        fingerprints[str(version)] = fingerprint
        if len(fingerprints) > _NUM_FINGERPRINTS:
            for old in list(fingerprints)[: -max(_NUM_FINGERPRINTS, self._config.max_staleness + 2)]:
                del fingerprints[old]
        await self._change(
            state=ReplicaState.SERVING,
            version=version,
            fingerprints=fingerprints,
            next_version=None,
            error=None,
            num_refusals=0,
            **({} if before.joined_at else {"joined_at": time.time()}),
        )

    async def await_swap(self, version: Version) -> None:
        """Calls run that have to end before `version` can be loaded."""
        if self._waits_since is None:
            self._waits_since = time.monotonic()
        await self._tell_next(version)

    async def begin_swap(self, version: Version) -> None:
        """Nothing runs any more, and `version` is loaded now."""
        if self._waits_since is not None:
            waited_s, self._waits_since = time.monotonic() - self._waits_since, None
            level = logging.WARNING if waited_s > _LONG_WAIT_S else logging.DEBUG
            text = "%s waited %.1f s for its running calls before it loaded version %s"
            logger.log(level, text, self._status.replica, waited_s, version)
        await self._tell_next(version)

    async def _tell_next(self, version: Version) -> None:
        if self._status.next_version != version:
            await self._write(next_version=version)

    async def refuse(self, error: str) -> None:
        """The memory is not what was published."""
        await self._change(state=ReplicaState.STOPPED, error=error, num_refusals=self._status.num_refusals + 1)

    async def drain(self) -> None:
        await self._change(state=ReplicaState.DRAINING)

    async def end(self, error: str | None = None) -> None:
        await self._change(state=ReplicaState.STOPPED, error=error)

    async def beat(self) -> None:
        """Until cancelled: give signs of life."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._write()

    async def _change(self, **changes: Any) -> None:
        await self._write(changed_at=time.time(), **changes)

    async def _write(self, **changes: Any) -> None:
        async with self._writing:
            # By a clock that nobody sets, and that stands still while the machine sleeps and all replicas are away.
            now, clock_s = time.time(), time.monotonic()
            was_away = clock_s - self._written_at > GONE_AFTER_S - HEARTBEAT_S
            if was_away and self._status.joined_at:
                # The process was stopped: the others have taken it for gone and its calls for theirs. It begins anew.
                changes = {"joined_at": now, **changes}
            self._written_at = clock_s
            self._status = replace(self._status, updated_at=now, **changes)
            await self._records.write([Write(key=self._key, value=encode(self._status), expected=None)])
