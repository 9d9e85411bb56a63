"""The one definition of the pipeline: an ordered table of stages, each two idempotent functions.

    ValidateData -> StartGeneration -> StartRewardWorkers -> SubmitTraining -> Evaluate -> Teardown

`start(ctx)` sets something going and returns a handle (JSON); `poll(ctx, handle)` says running, done with a result, or
raises. Both return within seconds; whoever walks the table owns waiting, time-outs, retries and the record of it.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from turnmill.config import Config
from turnmill.errors import BackendUnavailable, NotFound, RoleFailed, StageFailed, TurnmillError
from turnmill.ports import Launcher, RoleSpec, RoleStatus, RunPorts
from turnmill.records import (
    ReplicaStatus,
    Run,
    RunKind,
    TrainingStatus,
    Version,
    decode,
    replica_key,
    training_key,
    worker_key,
)

Handle = dict[str, Any]
BASE_VERSION = Version(incarnation=0, n=0)
# A role that died is started again this often: its work is leased again, a trainer goes on from its records.
MAX_RESTARTS = 5
# A trainer that failed has said why, and would fail again: exit codes of errors that are raised (see `cli.errors`).
FINAL_EXIT_CODES = (0, 1, 2)
# The only role that comes to an end by itself.
TRAINER = "trainer"


@dataclass(frozen=True, kw_only=True)
class Running:
    """Not finished; `detail` is for people."""

    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Done:
    """Finished; `result` goes into the run's history."""

    result: dict[str, Any] = field(default_factory=dict)


class Evaluations(Protocol):
    """Held-out evaluations in the background, by name; starting a name twice does nothing."""

    async def start(self, name: str, path: Path) -> None: ...

    def poll(self, name: str) -> dict[str, Any] | None:
        """The result, or None while it runs; raises what the evaluation raised."""
        ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What stages act on. `validate` reports on a data file and raises `DataError` where it is bad.

    `claim` takes the content of an upload, by the digest of its data, and reports on that; it raises `Duplicate`.
    `check` raises what ended a part of the control process without which no stage can come to its end.
    """

    run: Run
    config: Config
    ports: RunPorts
    launcher: Launcher
    evaluations: Evaluations
    validate: Callable[[Path], Awaitable[dict[str, Any]]]
    claim: Callable[[str], Awaitable[dict[str, Any]]]
    # Environment of the worker processes: where the proxy is, the run's worker token.
    worker_env: Mapping[str, str]
    check: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Which errors are worth another `start`, how often, and how long to wait (doubling, with jitter)."""

    errors: tuple[type[TurnmillError], ...] = (BackendUnavailable,)
    max_retries: int = 3
    first_delay_s: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One row of the table. `expected_s` is a signal (slower is told), `timeout_s` ends the stage as failed."""

    name: str
    start: Callable[[StageContext], Awaitable[Handle]]
    poll: Callable[[StageContext, Handle], Awaitable[Running | Done]]
    timeout_s: Callable[[Config], float]
    expected_s: float
    retry: Retry = Retry()
    kinds: tuple[RunKind, ...] = (RunKind.TRAIN, RunKind.EVAL)
    # It runs whatever happened before.
    always: bool = False


# ---------------------------------------------------------------- ValidateData


async def start_validate(ctx: StageContext) -> Handle:
    """Both files are read whole, row by row; a bad one ends the run before any process is started."""
    result = {}
    for name, path in (("data", ctx.run.data_path), ("eval_data", ctx.run.eval_path)):
        if path is not None:
            result[name] = await ctx.validate(Path(path))
    if ctx.run.upload is not None:
        # Runs that were begun by hand are meant, also when they repeat another one.
        result["data"] |= await ctx.claim(result["data"]["digest"])
    return {"reports": result}


async def poll_validate(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result=handle["reports"])


# ---------------------------------------------------------------- StartGeneration


def thread_env(config: Config) -> dict[str, str]:
    """Torch reads its number of threads from here when it is imported."""
    return {"OMP_NUM_THREADS": str(config.torch_threads), "MKL_NUM_THREADS": str(config.torch_threads)}


def replica_name(index: int) -> str:
    return f"replica-{index}"


async def start_generation(ctx: StageContext) -> Handle:
    names = [replica_name(i) for i in range(ctx.config.generation_replicas)]
    for name in names:
        await ctx.launcher.start(
            RoleSpec(
                role="replica",
                name=name,
                run_id=ctx.run.run_id,
                env=thread_env(ctx.config),
                max_restarts=MAX_RESTARTS,
            )
        )
    return {"replicas": names}


async def poll_generation(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done when each replica has written what it serves."""
    await check_roles(ctx.launcher)
    stored = await ctx.ports.records.get([replica_key(ctx.run.run_id, name) for name in handle["replicas"]])
    ready = [decode(item.value, ReplicaStatus) for item in stored if item is not None]
    if len(ready) < len(handle["replicas"]):
        return Running(detail=f"{len(ready)} of {len(handle['replicas'])} replicas are ready")
    return Done(result={status.replica: str(status.version) for status in ready})


# ---------------------------------------------------------------- StartRewardWorkers


async def start_reward_workers(ctx: StageContext) -> Handle:
    name = "worker-0"
    await ctx.launcher.start(
        RoleSpec(role="worker", name=name, run_id=ctx.run.run_id, env=dict(ctx.worker_env), max_restarts=MAX_RESTARTS)
    )
    return {"workers": [name]}


async def poll_reward_workers(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done when each worker has asked the proxy for work."""
    await check_roles(ctx.launcher)
    stored = await ctx.ports.records.get([worker_key(ctx.run.run_id, name) for name in handle["workers"]])
    ready = sum(item is not None for item in stored)
    if ready < len(stored):
        return Running(detail=f"{ready} of {len(stored)} workers are ready")
    return Done(result={"workers": handle["workers"]})


# ---------------------------------------------------------------- SubmitTraining


async def start_training(ctx: StageContext) -> Handle:
    """What the run's earlier trainers said of themselves does not count."""
    status = await _training_status(ctx)
    await ctx.launcher.start(
        RoleSpec(
            role="trainer",
            name=TRAINER,
            run_id=ctx.run.run_id,
            env=thread_env(ctx.config),
            max_restarts=MAX_RESTARTS,
            final_exit_codes=FINAL_EXIT_CODES,
        )
    )
    return {"trainer": TRAINER, "after_incarnation": status.incarnation if status else 0}


async def _training_status(ctx: StageContext) -> TrainingStatus | None:
    (stored,) = await ctx.ports.records.get([training_key(ctx.run.run_id)])
    return decode(stored.value, TrainingStatus) if stored else None


async def poll_training(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done when the trainer says so; a trainer that ends without saying so is a failure."""
    status = await _training_status(ctx)
    if status is not None and status.incarnation <= handle["after_incarnation"]:
        status = None
    if status is not None and status.state == "succeeded":
        return Done(
            result={"steps": status.step, "checkpoint": status.checkpoint, "version": str(status.version)},
        )
    if status is not None and status.state == "failed":
        raise StageFailed(f"the trainer stopped at step {status.step}: {status.error}")
    if status is not None and status.state == "cancelled":
        raise StageFailed(f"the trainer was told to stop at step {status.step} by somebody else than this pipeline")
    await check_roles(ctx.launcher)
    for role in await ctx.launcher.statuses():
        if role.name == handle["trainer"] and role.state == "exited":
            raise RoleFailed(_death(role))
    return Running(detail=f"step {status.step} of {status.max_steps}" if status else "the trainer is starting")


# ---------------------------------------------------------------- Evaluate


async def start_evaluate(ctx: StageContext) -> Handle:
    """The trained weights and the base play the same held-out tasks; a run without a held-out file skips it."""
    if ctx.run.eval_path is None:
        return {"evaluations": {}}
    if ctx.run.kind is RunKind.EVAL:
        return {"evaluations": {"eval": None}}
    status = await _training_status(ctx)
    if status is None:
        raise NotFound(f"run {ctx.run.run_id} has no training status: there is nothing to evaluate")
    trained = status.version
    return {"evaluations": {"before": str(BASE_VERSION), "after": str(trained)}}


async def poll_evaluate(ctx: StageContext, handle: Handle) -> Running | Done:
    """One evaluation after the other: replicas serve the version pointed to, so the pointer moves in between."""
    await check_roles(ctx.launcher)
    results: dict[str, Any] = {}
    for name, version in handle["evaluations"].items():
        if version is not None and name not in handle.setdefault("pointed", []):
            await ctx.ports.weights.point(Version.parse(version))
            handle["pointed"].append(name)
        await ctx.evaluations.start(name, Path(str(ctx.run.eval_path)))
        result = ctx.evaluations.poll(name)
        if result is None:
            return Running(detail=f"evaluating {name}")
        results[name] = {**result, "version": version or str(BASE_VERSION)}
    return Done(result=results)


# ---------------------------------------------------------------- Teardown


async def start_teardown(ctx: StageContext) -> Handle:
    """End what was started, last first. Results (records, conversations, checkpoints, logs) stay."""
    stopped = [role.name for role in await ctx.launcher.statuses()]
    await ctx.launcher.close()
    return {"stopped": stopped}


async def poll_teardown(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result={"stopped": handle["stopped"]})


# ---------------------------------------------------------------- the table


def _death(role: RoleStatus) -> str:
    tail = "\n".join(f"    {line}" for line in role.log_tail[-8:])
    return (
        f"{role.name} ended with exit code {role.exit_code} after {role.num_restarts} restarts; "
        f"its last log lines:\n{tail}"
    )


async def check_roles(launcher: Launcher) -> None:
    """Raise `RoleFailed` with the last log lines if a role died for good, or a service ended as if it were done."""
    for role in await launcher.statuses():
        if role.state == "failed" or (role.state == "exited" and role.name != TRAINER):
            raise RoleFailed(_death(role))


STAGES: tuple[Stage, ...] = (
    Stage(
        name="ValidateData",
        start=start_validate,
        poll=poll_validate,
        timeout_s=lambda config: 600.0,
        expected_s=5.0,
    ),
    Stage(
        name="StartGeneration",
        start=start_generation,
        poll=poll_generation,
        timeout_s=lambda config: 600.0,
        expected_s=60.0,
    ),
    Stage(
        name="StartRewardWorkers",
        start=start_reward_workers,
        poll=poll_reward_workers,
        timeout_s=lambda config: 120.0,
        expected_s=10.0,
    ),
    Stage(
        name="SubmitTraining",
        start=start_training,
        poll=poll_training,
        timeout_s=lambda config: config.max_runtime_s,
        expected_s=600.0,
        kinds=(RunKind.TRAIN,),
    ),
    Stage(
        name="Evaluate",
        start=start_evaluate,
        poll=poll_evaluate,
        timeout_s=lambda config: config.max_runtime_s,
        expected_s=120.0,
    ),
    Stage(
        name="Teardown",
        start=start_teardown,
        poll=poll_teardown,
        timeout_s=lambda config: 120.0,
        expected_s=20.0,
        always=True,
    ),
)


def stages_of(kind: RunKind) -> tuple[Stage, ...]:
    """The rows of the table that a run of this kind walks."""
    return tuple(stage for stage in STAGES if kind in stage.kinds)
