"""From uploads to runs: at most one run a cause, whatever is told twice, late, or cut short by a kill.

    Upload -> Cause (compare-and-set: the first one wins) -> Run(QUEUED)

The cause is written before its run and names it. Whoever finds a cause without its run (somebody was killed in between)
makes that run; whoever finds both is told which run it was.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from turnmill import __version__
from turnmill.errors import Conflict, NotFound
from turnmill.ports import RecordStore, Write
from turnmill.records import Cause, DeadTrigger, Run, Upload, decode, digest_of, encode, run_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What became of an upload."""

    upload: Upload
    # None where it was ignored.
    run_id: str | None
    # Whether it was told for the first time.
    is_new: bool


class Intake:
    """Makes the runs of uploads; `plan` says what the run of one is, under the given id.

    `plan` may be asked again after a kill and find its own traces. With `Conflict` or `NotFound` it says that the
    content is gone, and then there is no run; with anything else that it should be asked again later.
    """

    def __init__(
        self,
        runs: RecordStore,
        *,
        new_run_id: Callable[[], str],
        plan: Callable[[Upload, str], Awaitable[Run]],
    ) -> None:
        self._runs = runs
        self._new_run_id = new_run_id
        self._plan = plan

    async def take(self, upload: Upload) -> Taken:
        """The run of this upload, made if there is none yet."""
        wanted = Cause(
            cause=upload.cause,
            bucket=upload.bucket,
            created_at=time.time(),
            run_id=None if upload.ignored else self._new_run_id(),
            ignored=upload.ignored,
        )
        cause = await self._claim(wanted)
        is_new = cause == wanted
        if cause.run_id is None:
            if is_new:
                logger.warning("ignored upload %s: %s", upload.key, cause.ignored)
            return Taken(upload=upload, run_id=None, is_new=is_new)
        return await self._made(upload, cause)

    async def _made(self, upload: Upload, cause: Cause) -> Taken:
        """The run that the cause names, made where it is not there."""
        while (run_id := cause.run_id) is not None:
            (stored,) = await self._runs.get([run_key(run_id)])
            if stored is not None and decode(stored.value, Run).cause == upload.cause:
                return Taken(upload=upload, run_id=run_id, is_new=False)
            if stored is not None:
                # Ids are random, and another cause was given the same one first.
                cause = await self._renamed(cause)
                continue
            try:
                run = await self._plan(upload, run_id)
            except (Conflict, NotFound) as error:
                await self._give_up(upload, cause, error)
                return Taken(upload=upload, run_id=None, is_new=True)
            (is_made,) = await self._runs.write([Write(key=run.key, value=encode(run), expected=0)])
            if is_made:
                logger.info("upload %s: run %s is %s", upload.key, run.run_id, run.status)
                return Taken(upload=upload, run_id=run_id, is_new=True)
        return Taken(upload=upload, run_id=None, is_new=False)

    async def _give_up(self, upload: Upload, cause: Cause, error: Exception) -> None:
        """Its content is not there any more, and will not come back under this version."""
        logger.warning("ignored upload %s: %s", upload.key, error)
        letter = DeadTrigger(
            name=digest_of(upload.cause.encode()),
            upload=upload,
            error=str(error),
            dead_at=time.time(),
            code_version=__version__,
        )
        await self._runs.write([Write(key=letter.key, value=encode(letter), expected=0)])
        given_up = replace(cause, run_id=None, ignored=str(error))
        await self._runs.write([Write(key=cause.key, value=encode(given_up), expected=None)])

    async def _renamed(self, cause: Cause) -> Cause:
        """The cause with another run id, unless somebody was first to give it one."""
        (stored,) = await self._runs.get([cause.key])
        if stored is not None and decode(stored.value, Cause) == cause:
            wanted = replace(cause, run_id=self._new_run_id())
            await self._runs.write([Write(key=cause.key, value=encode(wanted), expected=stored.version)])
        return await self._claim(cause)

    async def _claim(self, wanted: Cause) -> Cause:
        """What is recorded about the cause: `wanted`, unless somebody was first."""
        (is_first,) = await self._runs.write([Write(key=wanted.key, value=encode(wanted), expected=0)])
        if is_first:
            return wanted
        (stored,) = await self._runs.get([wanted.key])
        if stored is None:
            raise AssertionError(f"the cause {wanted.cause} was there and is gone: causes are never removed")
        return decode(stored.value, Cause)
