"""The worker role: leases rollouts from the proxy, plays them, reports how they ended.

    proxy --lease--> slots --run--> runner --report--> proxy
                       '--heartbeat--> proxy --lost--> cancel

task            consumes             waits for                 unblocked by              produces
lease           free slots           a free slot, a rollout    an ended rollout, proxy   one task a rollout
heartbeat       leases in flight     a third of a lease        the clock                 cancelled rollouts
rollout <id>    one LeasedRollout    its environment, model    runner, deadline          one report, a free slot

Only one lease request is on its way at a time, and it asks for all slots that are free: what frees up during it goes
into the next one, so many ended rollouts cost one request and a single one never waits. A worker that stops reports
nothing: its leases run out, and another worker plays these samples again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

from turnmill.config import Config
from turnmill.conversation.client import LeasedRollout, RolloutApi
from turnmill.conversation.http import HttpClient, Sign
from turnmill.environment.base import Environment
from turnmill.errors import InvalidInput, LeaseLost, RoleFailed, RolloutGivenBack
from turnmill.records import InvalidReason, RolloutResult
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.boxed import BoxedRunner
from turnmill.rollout.runner import InProcessRunner, Runner
from turnmill.telemetry import log_at

logger = logging.getLogger(__name__)

# Longest wait of one lease request, seconds.
_WAIT_S = 10.0
# Pause after a lease request that brought nothing, seconds: a proxy that answers at once must not be flooded.
_EMPTY_PAUSE_S = 0.02


async def run_worker(
    *,
    proxy_url: str,
    worker_token: str,
    name: str,
    config: Config,
    environment: Environment | Settings,
    stop: asyncio.Event,
    sign: Sign | None = None,
) -> None:
    """Play rollouts until `stop` is set: here with an `Environment`, in boxes that are made by `Settings`.

    `sign` is for a proxy that only answers requests that are signed. Raises `InvalidInput` when the proxy refuses the
    worker token, or the environment does not load; `BackendUnavailable` when the proxy stays away for a minute.
    """
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(HttpClient(sign))
        runner: Runner
        if isinstance(environment, Settings):
            boxed = BoxedRunner(
                environment,
                session,
                num_slots=config.max_concurrent_rollouts,
                max_attempts=config.max_attempts,
                training_timeout_s=config.training_timeout,
            )
            runner = await stack.enter_async_context(boxed)
        else:
            runner = InProcessRunner(
                environment,
                session,
                call_timeout_s=config.call_timeout_s,
                training_timeout_s=config.training_timeout,
            )
        api = RolloutApi(session, proxy_url, worker_token)
        await Worker(api, runner, name=name, config=config).run(stop)


class Worker:
    """Keeps up to `max_concurrent_rollouts` rollouts in flight."""

    def __init__(self, api: RolloutApi, runner: Runner, *, name: str, config: Config) -> None:
        self._api = api
        self._runner = runner
        self._name = name
        self._num_slots = config.max_concurrent_rollouts
        self._heartbeat_s = config.worker_lease_s / 3
        # Rollouts in flight by lease token.
        self._rollouts: dict[str, asyncio.Task[None]] = {}
        # Those of them whose report is on its way: its answer says what became of the lease.
        self._reporting: set[str] = set()
        self._slot_free = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop` is set. Raises the first error of a background task."""
        try:
            async with asyncio.TaskGroup() as group:
                background = [
                    group.create_task(_endless("lease", partial(self._lease, group)), name="lease"),
                    group.create_task(_endless("heartbeat", self._heartbeat), name="heartbeat"),
                ]
                await stop.wait()
                for task in [*background, *self._rollouts.values()]:
                    task.cancel()
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        logger.info("worker stopped")

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        while True:
            while not (num_free := self._num_slots - len(self._rollouts)):
                self._slot_free.clear()
                await self._slot_free.wait()
            rollouts = await self._api.lease(worker=self._name, max_rollouts=num_free, wait_s=_WAIT_S)
            for leased in rollouts:
                task = group.create_task(self._play(leased), name=f"rollout {leased.request.sample_id}")
                self._rollouts[leased.lease_token] = task
                task.add_done_callback(partial(self._free, leased.lease_token))
            if not rollouts:
                await asyncio.sleep(_EMPTY_PAUSE_S)

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if not self._rollouts:
                continue
            lost = await self._api.heartbeat(
                worker=self._name, lease_tokens=list(self._rollouts), timeout_s=max(1.0, self._heartbeat_s)
            )
            for token in lost:
                # One that ended in the meantime is no longer there.
                if token not in self._reporting and (task := self._rollouts.get(token)):
                    logger.warning("a lease is lost, %s is cancelled", task.get_name())
                    task.cancel()

    async def _play(self, leased: LeasedRollout) -> None:
        log_at(f"{leased.request.sample_id}/{leased.attempt}")
        try:
            result = await self._runner.run(leased)
            self._reporting.add(leased.lease_token)
            await self._report(leased, result)
            logger.debug("rollout reported: %s", result.reason or result.reward)
        except (LeaseLost, RolloutGivenBack) as error:
            # The latter's lease runs out, as nobody renews it any more.
            logger.warning("rollout is not reported: %s", error)

    def _free(self, lease_token: str, _: asyncio.Task[None]) -> None:
        del self._rollouts[lease_token]
        self._reporting.discard(lease_token)
        self._slot_free.set()

    async def _report(self, leased: LeasedRollout, result: RolloutResult) -> None:
        """A result that the proxy refuses (a metric, say) is the environment's fault, so it ends as ENV_ERROR."""
        try:
            await self._api.report(leased, result)
        except InvalidInput as error:
            logger.error("report refused: %s", error)
            await self._api.report(leased, RolloutResult(reason=InvalidReason.ENV_ERROR, detail=str(error)))


async def _endless(name: str, job: Callable[[], Awaitable[None]]) -> None:
    """A background task that returns would leave a worker that does nothing: an error."""
    await job()
    raise RoleFailed(f"worker: {name} ended early")


def _first(errors: BaseExceptionGroup[Exception]) -> Exception:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, Exception)
    return error
