"""What a stage is: two idempotent functions and the rules by which they are called; and what they act on.

`start(ctx)` sets something going and returns a handle (JSON); `poll(ctx, handle)` says running, done with a result, or
raises. Both return within seconds; whoever walks the table owns waiting, time-outs, retries and the record of it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turnmill.budget import Meter
from turnmill.config import Config
from turnmill.errors import InvalidInput
from turnmill.pipeline.background import Background
from turnmill.ports import Launcher, RunPorts
from turnmill.records import ErrorClass, Purpose, Run, RunKind, Version

Handle = dict[str, Any]
# Weights that nobody has trained.
BASE_VERSION = Version(incarnation=0, n=0)


@dataclass(frozen=True, kw_only=True)
class Running:
    """Not finished; `detail` is for people."""

    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Finished; `result` goes into the run's history."""

    result: dict[str, Any] = field(default_factory=dict)


class Evaluations(Protocol):
    """Rollouts that are measured, in the background, by name; starting a name twice does nothing."""

    async def start(
        self, name: str, path: Path, purpose: Purpose = Purpose.EVAL, version: Version = BASE_VERSION
    ) -> None:
        """Evaluate a version on a file, or (BASELINE) play the baseline on it, which ends by recording it.

        The version must be the one pointed to.
        """
        ...

    def poll(self, name: str) -> dict[str, Any] | None:
        """The result, or None while it runs; raises what the evaluation raised."""
        ...

    def compare(self, before: str, after: str, *, by: str) -> dict[str, Any]:
        """How the tasks of two evaluations that are done went: see `evaluation.Comparison`; `by` solved or reward."""
        ...

    def progress(self, name: str) -> str:
        """How far it is, for people."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What stages act on. `validate` reports on a data file and raises `DataError` where it is bad.

    `quarantine` takes the upload of a run that can't be trained out of the way, and returns the error that says so with
    the place where it lies; it does nothing for a run that was begun by hand.
    `claim` takes the content of an upload, by the digests of its data and its held-out tasks, if any, and reports on
    that; it raises `Duplicate`.
    `check` raises what ended a part of the control process without which no stage can come to its end.
    """

    run: Run
    config: Config
    ports: RunPorts
    launcher: Launcher
    evaluations: Evaluations
    validate: Callable[[Path], Awaitable[dict[str, Any]]]
    quarantine: Callable[[InvalidInput], Awaitable[InvalidInput]]
    claim: Callable[[str, str | None], Awaitable[dict[str, Any]]]
    # Gives up what was redriven and did not end in time; when no process of the run is left.
    give_up_redriven: Callable[[], Awaitable[int]]
    # Environment of the worker processes: where the proxy is, the run's worker token.
    worker_env: Mapping[str, str]
    check: Callable[[], None]
    # Environment of whatever process runs the environment's code: which judges it may ask.
    judges_env: Mapping[str, str] = field(default_factory=dict)
    # Environment of the proxy's process; None: control serves the proxy itself.
    proxy_env: Mapping[str, str] | None = None
    # Of the run's time and dollars; None: nobody counts them.
    meter: Meter | None = None
    background: Background = field(default_factory=Background)


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Which failures of `start`, or of a `poll`, are worth another try, how often, and how long to wait: a random part
    of a doubling pause.

    Raises `ValueError` for a class that is permanent.
    """

    classes: tuple[ErrorClass, ...] = (ErrorClass.INFRASTRUCTURE,)
    max_retries: int = 3
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0

    def __post_init__(self) -> None:
        for each in self.classes:
            if each.is_permanent:
                raise ValueError(f"{each} is permanent: the same start would fail again")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table. `expected_s`: what takes longer is alerted about; `timeout_s` ends the stage as failed."""

    name: str
    # For people, in one sentence.
    does: str = ""
    start: Callable[[StageContext], Awaitable[Handle]]
    poll: Callable[[StageContext, Handle], Awaitable[Running | Done]]
    timeout_s: Callable[[Config], float]
    expected_s: float
    retry: Retry = Retry()
    kinds: tuple[RunKind, ...] = (RunKind.TRAIN, RunKind.EVAL)
    # It runs whatever happened before.
    always: bool = False
