"""What a Lambda function of a run begins with, kept for as long as its instance is warm.

    environment -> AwsSettings -> ports -> Run, Config -> Opened -> what a function makes of it -> an invocation's work

| variable | what the run's stack sets it to |
|---|---|
| TURNMILL_DEPLOYMENT | the deployment's name |
| TURNMILL_RUN | the run's id |

An instance serves one invocation at a time and is frozen in between. Its event loop lasts from one to the next, and so
do the connections and locks that belong to it; a task that is left on it stands still with the instance. The run's
record is read again after `RENEW_S`: a run that goes on has another worker token, and may have other parameters.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from turnmill.backends.aws.backend import AwsBackend
from turnmill.backends.aws.settings import AwsSettings
from turnmill.config import Config, from_dict
from turnmill.errors import InvalidInput, NotFound
from turnmill.ports import Notifier, RunPorts
from turnmill.records import Run, Version, WeightVersion, decode, run_key
from turnmill.telemetry import configure_logging, log_at

T = TypeVar("T")
R = TypeVar("R")
DEPLOYMENT, RUN = "TURNMILL_DEPLOYMENT", "TURNMILL_RUN"
# Seconds for which a warm instance believes what it has read about its run.
RENEW_S = 15.0
Event = dict[str, Any]


class Context(Protocol):
    """What is used of the context of an invocation."""

    @property
    def aws_request_id(self) -> str: ...

    @property
    def invoked_function_arn(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Opened:
    """What the functions work with."""

    run: Run
    config: Config
    ports: RunPorts
    # Where people are told of what they should know.
    notifier: Notifier


class Instance(Generic[T]):
    """A warm instance of one function, and what `make` makes of the run: again, when the run's record has changed."""

    def __init__(self, function: str, make: Callable[[Opened], T], *, renew_s: float = RENEW_S) -> None:
        """`function` is its name in the logs. Raises `InvalidInput` for a variable that is missing or wrong."""
        self._make = make
        self._renew_s = renew_s
        self._run_id = _variable(RUN)
        self._settings = AwsSettings(name=_variable(DEPLOYMENT))
        # Opened by the first invocation, which says in which account it is.
        self._backend: AwsBackend | None = None
        self._ports: RunPorts | None = None
        self._made: T | None = None
        # Of the run's record as it was read last; and when that was, by a clock that nobody sets.
        self._version = 0
        self._read_at = 0.0
        self._loop = asyncio.new_event_loop()
        # For adapters that ask for the loop of the thread.
        asyncio.set_event_loop(self._loop)
        configure_logging(function, run_id=self._run_id, form="json")

    def run(self, context: Context, work: Callable[[T], Awaitable[R]]) -> R:
        """Do an invocation's work with what was made of the run; raises as `begin` does, and what the work raises."""
        return self._loop.run_until_complete(self._run(context, work))

    async def _run(self, context: Context, work: Callable[[T], Awaitable[R]]) -> R:
        return await work(await self.begin(context))

    async def begin(self, context: Context) -> T:
        """What an invocation works with: made of the run as its record is now, or was a moment ago.

        Raises `NotFound` for no such run, `InvalidInput` for one that has ended, `BackendUnavailable`. What is logged
        from here on is about the invocation.
        """
        log_at(context.aws_request_id)
        if self._made is None or time.monotonic() - self._read_at >= self._renew_s:
            self._made = await self._renewed(*self._opened(context))
        return self._made

    def _opened(self, context: Context) -> tuple[AwsBackend, RunPorts]:
        if self._backend is None or self._ports is None:
            account = context.invoked_function_arn.split(":")[4]
            self._backend = AwsBackend(self._settings, account=account, weights_of=lambda _: NoWeights())
            self._ports = self._backend.open_external_run(self._run_id)
        return self._backend, self._ports

    async def _renewed(self, backend: AwsBackend, ports: RunPorts) -> T:
        (stored,) = await ports.runs.get([run_key(self._run_id)])
        if stored is None:
            raise NotFound(f"run {self._run_id!r} of deployment {self._settings.name!r} has no record")
        if self._made is not None and stored.version == self._version:
            self._read_at = time.monotonic()
            return self._made
        run = decode(stored.value, Run)
        if run.status.is_final:
            raise InvalidInput(f"run {run.run_id} has ended: {run.status}")
        notifier = backend.notifier(backend.topic, "sns")
        made = self._make(Opened(run=run, config=from_dict(run.config), ports=ports, notifier=notifier))
        self._version, self._read_at = stored.version, time.monotonic()
        return made


class NoWeights:
    """Implements `ports.WeightStore` for a run whose weights are somebody else's: there are none."""

    async def publish(self, version: Version, source: Path, digest: str) -> WeightVersion:
        """See `ports.WeightStore.publish`; raises `InvalidInput`."""
        raise InvalidInput(f"version {version} can't be published: the weights of this run are its trainer's")

    async def point(self, version: Version) -> None:
        """See `ports.WeightStore.point`."""
        raise _not_here(version)

    async def current(self) -> WeightVersion | None:
        """See `ports.WeightStore.current`."""
        return None

    async def get(self, version: Version) -> WeightVersion:
        """See `ports.WeightStore.get`."""
        raise _not_here(version)

    async def prune(self, keep: Sequence[Version]) -> None:
        """See `ports.WeightStore.prune`."""


def _not_here(version: Version) -> NotFound:
    return NotFound(f"version {version} is not here: the weights of this run are its trainer's")


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise InvalidInput(f"{name} is not set: the functions of a run are deployed with its stack, which sets it")
    return value
