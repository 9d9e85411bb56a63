"""The control role of a deployment: what is uploaded becomes runs, and runs that wait get their turn.

    bucket -> Intake -> Run(QUEUED) -> a slot -> `control.begin` or `resume` -> Run(final)

Tasks:
    uploads: consumes the bucket's uploads; waits for events; unblocked by one or by `stop`; produces queued runs.
    queued: consumes the word of runs that another process queued; waits for a second; unblocked by the clock or `stop`.
    runs: consumes queued runs, and those that an earlier control process left; waits for a run or for a slot;
        unblocked by either or by `stop`; produces one task a run.
Nothing is remembered here: what was going on when the process was killed is found in the records by the next one.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from turnmill.alerts import Dispatcher
from turnmill.backends.embedded import FolderBucket, only_one, open_bucket
from turnmill.budget import within_ceilings
from turnmill.config import Resolved, to_dict
from turnmill.config.deployment import load_limits
from turnmill.errors import BackendUnavailable, Cancelled, ConfigError, Conflict, TurnmillError
from turnmill.intake.trigger import Intake
from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.stages import FIRST_STAGE
from turnmill.ports import Write
from turnmill.records import QUEUED_PREFIX, Alert, Run, RunKind, RunStatus, Upload
from turnmill.telemetry import also_logged, log_as_run
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import as_seen, list_runs
from turnmill.wiring.running.cancelling import heed
from turnmill.wiring.running.control import begin, new_run_id, resolve, with_absolute_model
from turnmill.wiring.running.early import EarlyChecks
from turnmill.wiring.running.resume import resume
from turnmill.wiring.variables import log_format
from turnmill.wiring.watching.alarms import open_alarms, raise_alarm, run_failed, upload_ignored
from turnmill.wiring.watching.checks import checks_of_deployment
from turnmill.wiring.watching.monitor import Monitor, monitored

logger = logging.getLogger(__name__)

# How often it is looked for runs that another process queued.
_HEAR_S = 1.0
# How often it is looked for runs without a word: of one that was lost with its process, a kill between run and word.
_LOOK_S = 30.0
# How long a run waits that could not be begun because something is busy.
_AGAIN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The configuration that holds for all uploads; a sidecar is laid over it."""

    file: Path | None
    environ: Mapping[str, str]
    flags: Mapping[str, object]

    def resolve(self, sidecar: Path | None) -> Resolved:
        """Raises `ConfigError`."""
        return resolve(file=self.file, environ=self.environ, flags=self.flags, sidecar=sidecar, kind=RunKind.TRAIN)


@dataclass(frozen=True, kw_only=True)
class News:
    """What happened, for people: an upload that was ignored, or a run that changed its status."""

    text: str
    run: Run | None = None
    # Whether the run's turn has come: from now on there is progress to look at.
    is_begun: bool = False


class Deployment:
    """Runs what is uploaded; `tell` is called for whatever people want to know.

    Raises `ConfigError` if the configuration is wrong without any sidecar.
    """

    def __init__(
        self,
        root: Path,
        layers: Layers,
        *,
        max_parallel_runs: int,
        tell: Callable[[News], None],
        look_s: float = _LOOK_S,
    ) -> None:
        self._root = root
        self._layers = layers
        self._max_parallel_runs = max_parallel_runs
        self._tell = tell
        self._look_s = look_s
        self._bucket: FolderBucket = open_bucket(root)
        self._changed = asyncio.Event()
        self._active: dict[str, asyncio.Task[None]] = {}
        self._early = EarlyChecks(root, self._changed.set)
        self._alarms: Dispatcher | None = None
        # Causes of the uploads that could not be taken so far.
        self._put_off: set[str] = set()
        # That of uploads whose own can't be used; the file may be changed while the deployment is up.
        self._base = within_ceilings(layers.resolve(None), load_limits(root)[0])

    @property
    def folder(self) -> Path:
        """Into which tasks are uploaded."""
        return self._bucket.folder

    async def up(
        self,
        stop: asyncio.Event,
        ready: Callable[[], None],
        *,
        beside: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        """Serve until `stop`: runs that are active then wait for the next `up`, which goes on with them.

        `beside` is entered once the root is this process's own, and left when nothing is served any more.
        Raises `ConfigError` if `turnmill.toml` is wrong, and `Conflict` if the root is served.
        """
        async with AsyncExitStack() as stack:
            lock = self._root / "locks" / "control.lock"
            stack.enter_context(only_one(lock, f"{self._root} is served by another `turnmill up`"))
            self._alarms = await stack.enter_async_context(open_alarms(self._root))
            await stack.enter_async_context(self._monitored(self._alarms))
            await stack.enter_async_context(beside())
            ready()
            tasks = {
                asyncio.create_task(self._take_uploads(stop), name="uploads"),
                asyncio.create_task(self._run_waiting(stop), name="runs"),
                asyncio.create_task(self._hear_of_queued(stop), name="queued"),
            }
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                # Both end by themselves when stopped; one that failed takes the other one with it.
                stop.set()
                await asyncio.gather(*tasks, return_exceptions=True)

    @asynccontextmanager
    async def _monitored(self, alarms: Dispatcher) -> AsyncIterator[None]:
        """With somebody who looks for what goes wrong in no run of its own."""
        records = backend_of(self._root).open_records()
        monitor = Monitor(None, checks_of_deployment(self._root, records), alarms)
        try:
            await monitor.recall(since=0.0)
            async with monitored(monitor, "monitor"):
                yield
        finally:
            records.close()

    # ------------------------------------------------------------ uploads

    async def _take_uploads(self, stop: asyncio.Event) -> None:
        runs = backend_of(self._root).open_records()
        intake = Intake(runs, new_run_id=new_run_id, plan=self._plan)
        try:
            async for uploads in self._bucket.watch(stop):
                for upload in uploads:
                    await self._take(intake, upload)
                    if stop.is_set():
                        break
        finally:
            runs.close()

    async def _take(self, intake: Intake, upload: Upload) -> None:
        try:
            taken = await intake.take(upload)
        except BackendUnavailable as error:
            self._bucket.forget(upload)
            if upload.cause not in self._put_off:
                self._put_off.add(upload.cause)
                logger.error("upload %s can't be taken now: %s", upload.key, error)
                self._tell(News(text=f"upload {upload.key} can't be taken now, and is tried again: {error}"))
            return
        self._put_off.discard(upload.cause)
        if taken.is_new and taken.run_id is None:
            alert = upload_ignored(self._root, upload)
            self._tell(News(text=alert.summary))
            await self._alarm(alert)
        self._changed.set()

    async def _plan(self, upload: Upload, run_id: str) -> Run:
        """The run of an upload: its content is copied first, so that nothing changes under the run."""
        data = self._root.absolute() / "runs" / run_id / "data" / upload.key.rpartition("/")[2]
        held_out = data.with_name(f"{data.stem}.eval.jsonl")
        await asyncio.to_thread(self._bucket.fetch, upload, data)
        has_held_out = await asyncio.to_thread(self._bucket.fetch_held_out, upload, held_out)
        failed, refused, resolved = self._resolved(self._bucket.sidecar_of(upload))
        run = Run(
            run_id=run_id,
            cause=upload.cause,
            upload=upload.key,
            upload_version=upload.version,
            status=RunStatus.FAILED if failed else RunStatus.QUEUED,
            created_at=time.time(),
            ended_at=time.time() if failed else None,
            error=failed,
            refused=refused,
            config=to_dict(with_absolute_model(resolved.config)),
            sources=resolved.sources,
            data_path=str(data),
            eval_path=str(held_out) if has_held_out else None,
        )
        self._tell(News(text=f"upload {upload.key}: run {run_id} {run.status}", run=run))
        if failed:
            await self._alarm(await asyncio.to_thread(run_failed, self._root, run))
        return run

    def _resolved(self, sidecar: Path | None) -> tuple[str | None, str | None, Resolved]:
        """(what is wrong with the deployment's own parameters, with those of the upload, the parameters to record)."""
        try:
            return None, None, self._within_ceilings(sidecar)
        except ConfigError as error:
            try:
                return None, str(error), self._within_ceilings(None)
            except ConfigError as of_all:
                # No fault of the upload, which stays where it is: `turnmill retry` does it again.
                return str(of_all), None, self._base

    def _within_ceilings(self, sidecar: Path | None) -> Resolved:
        """Raises `ConfigError`, also for parameters beyond what the deployment allows."""
        return within_ceilings(self._layers.resolve(sidecar), load_limits(self._root)[0])

    # ------------------------------------------------------------ runs

    async def _run_waiting(self, stop: asyncio.Event) -> None:
        stopped = asyncio.create_task(stop.wait(), name="runs stop")
        try:
            while not stop.is_set():
                self._changed.clear()
                try:
                    waiting = await self._waiting()
                except BackendUnavailable as error:
                    logger.warning("runs that wait can't be looked for now: %s", error)
                    await _pause(stop, _HEAR_S)
                    self._changed.set()
                    continue
                for run in waiting:
                    if run.run_id in self._active:
                        continue
                    # One that is bad starts nothing: its uploader need not wait for a slot to hear of it.
                    is_bad = run.refused is not None or self._early.is_bad(run.run_id)
                    has_slot = len(self._active) < self._max_parallel_runs or is_bad
                    if not has_slot:
                        self._early.look(run)
                    else:
                        self._active[run.run_id] = asyncio.create_task(self._run(run, stop), name=f"run {run.run_id}")
                changed = asyncio.create_task(self._changed.wait(), name="runs changed")
                await asyncio.wait({stopped, changed}, timeout=self._look_s, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
        finally:
            stopped.cancel()
            await self._early.close()
            await asyncio.gather(*self._active.values())

    async def _hear_of_queued(self, stop: asyncio.Event) -> None:
        """Runs that another process queued: a retry, for instance."""
        runs = backend_of(self._root).open_records()
        try:
            while not stop.is_set():
                try:
                    queued = await runs.scan(QUEUED_PREFIX)
                    if queued:
                        await runs.write([Write(key=item.key, value=None, expected=item.version) for item in queued])
                        self._changed.set()
                except BackendUnavailable as error:
                    logger.warning("runs that others queued can't be looked for now: %s", error)
                await _pause(stop, _HEAR_S)
        finally:
            runs.close()

    async def _waiting(self) -> list[Run]:
        """Runs made of uploads that wait for their turn, or whose control process is gone, oldest first."""
        states = (RunStatus.QUEUED, RunStatus.INTERRUPTED)
        return [run for run in await list_runs(self._root) if run.upload is not None and run.status in states]

    async def _run(self, run: Run, stop: asyncio.Event) -> None:
        """One run from its turn to its end, or to `stop`. Whatever ends it, the deployment goes on."""
        log_as_run(run.run_id)
        text = f"run {run.run_id} {'goes on' if run.stages else 'begins'}: {run.upload}"
        self._tell(News(text=text, run=run, is_begun=True))
        try:
            try:
                log = self._root / "runs" / run.run_id / "logs" / "control.log"
                with also_logged(log, "control", run.run_id, form=log_format()):
                    ended, failure = await self._walk(run, stop)
            except BackendUnavailable:
                raise
            except Cancelled:
                # Stopped before anything was changed: the next `up` goes on with it.
                logger.info("run %s waits for the next start", run.run_id, extra={"at": run.run_id})
            except TurnmillError as error:
                await self._give_up(run.run_id, error)
            except Exception as error:
                # The supervision boundary of a run: a defect in one must not end the others.
                logger.exception("run %s hit a defect", run.run_id, extra={"at": run.run_id})
                await self._give_up(run.run_id, error)
            else:
                self._tell(News(text=_how_it_ended(ended, failure), run=ended))
                if ended.status is RunStatus.FAILED:
                    await self._alarm(await asyncio.to_thread(run_failed, self._root, ended, failure))
        except BackendUnavailable as error:
            await self._put_back(run.run_id, error, stop)
        finally:
            self._active.pop(run.run_id, None)
            self._changed.set()

    async def _walk(self, run: Run, stop: asyncio.Event) -> tuple[Run, TurnmillError | None]:
        if (cancelled := await heed(self._root, run.run_id)) is not None:
            return cancelled, None
        later = RunStatus.QUEUED
        # Nothing of it was started before its data was found valid.
        if not any(stage.name == FIRST_STAGE and stage.state == "done" for stage in run.stages):
            return await begin(self._root, run.run_id, cancel=stop, when_cancelled=later, alarms=self._alarms)
        return await resume(
            self._root,
            run.run_id,
            from_step=None,
            cancel=stop,
            created=lambda _: None,
            when_cancelled=later,
            alarms=self._alarms,
        )

    async def _give_up(self, run_id: str, error: Exception) -> None:
        """The run can't be begun or gone on with: it has failed, unless somebody else has it."""
        text = str(error) or type(error).__name__
        if isinstance(error, Conflict):
            self._tell(News(text=f"run {run_id} is left to another process: {text}"))
        else:
            run = await self._change(run_id, RunStatus.FAILED, text)
            if run.status is RunStatus.FAILED:
                self._tell(News(text=f"run {run_id} failed: {text}", run=run))
                await self._alarm(await asyncio.to_thread(run_failed, self._root, run, error))

    async def _alarm(self, alert: Alert) -> None:
        if self._alarms is not None:
            await raise_alarm(self._alarms, alert)

    async def _put_back(self, run_id: str, error: BackendUnavailable, stop: asyncio.Event) -> None:
        """The run waits for its turn again, once its record can be written."""
        while not stop.is_set():
            logger.warning("run %s can't go on now: %s", run_id, error, extra={"at": run_id})
            await _pause(stop, _AGAIN_S)
            try:
                await self._change(run_id, RunStatus.QUEUED, None)
            except BackendUnavailable as again:
                error = again
            else:
                return

    async def _change(self, run_id: str, status: RunStatus, error: str | None) -> Run:
        """Give the run another status, unless it has a final one or was taken up by another process meanwhile.

        The run as it is then.
        """
        runs = backend_of(self._root).open_records()
        try:
            record = await RunRecord.open(runs, run_id)
            is_others = as_seen(record.run).status is RunStatus.ACTIVE and record.run.pid != os.getpid()
            if not record.run.status.is_final and not is_others:
                ended_at = time.time() if status.is_final else None
                try:
                    await record.save(replace(record.run, status=status, ended_at=ended_at, error=error))
                except Conflict:
                    # Taken up in this very moment: it is theirs.
                    return (await RunRecord.open(runs, run_id)).run
            return record.run
        finally:
            runs.close()


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until `stop`."""
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


def _how_it_ended(run: Run, failure: TurnmillError | None) -> str:
    if not run.status.is_final:
        return f"run {run.run_id} goes on when `turnmill up` is started again"
    why = f": {failure}" if failure else ""
    return f"run {run.run_id} {run.status}{why}"
