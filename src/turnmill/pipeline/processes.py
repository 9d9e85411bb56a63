"""The stages that start the run's processes: generation replicas, reward workers, the trainer."""

from turnmill.config import Config
from turnmill.errors import RoleFailed, StageFailed
from turnmill.pipeline.baseline import load_baseline, pass_baseline
from turnmill.pipeline.budget import TRAINER, budget_exceeded, check_budget, trainer_says
from turnmill.pipeline.stage import Done, Handle, Running, StageContext
from turnmill.ports import Launcher, RoleSpec, RoleStatus
from turnmill.records import (
    ReplicaState,
    ReplicaStatus,
    TrainingStatus,
    decode,
    replica_key,
    replica_name,
    worker_key,
)

# A role that died is started again this often: its work is leased again, a trainer goes on from its records.
MAX_RESTARTS = 5
# A job that failed has said why, and would fail again: exit codes of errors that are raised (see `cli.errors`).
EXIT_UNUSABLE = 2
FINAL_EXIT_CODES = (0, 1, EXIT_UNUSABLE)
# A replica twice in a row found other weights in its memory than were published, and says which.
EXIT_REFUSED = 3
# A parameter that can't be used with this model will not be usable the next time, either.
REPLICA_FINAL_EXIT_CODES = (0, EXIT_UNUSABLE, EXIT_REFUSED)
# Names of roles that come to an end by themselves begin with these; the others serve until they are ended.
JOBS = (TRAINER, "preflight")
PROXY = "proxy"


def _death(role: RoleStatus) -> str:
    tail = "\n".join(f"    {line}" for line in role.log_tail[-8:])
    return (
        f"{role.name} ended with exit code {role.exit_code} after {role.num_restarts} restarts; "
        f"its last log lines:\n{tail}"
    )


async def check_roles(launcher: Launcher) -> None:
    """Raise `RoleFailed` with the last log lines if a role died for good, or a service ended as if it were done.

    `StageFailed` where it can't be run with what it was given: nobody need go on with that as it is.
    """
    for role in await launcher.statuses():
        if role.state == "failed" or (role.state == "exited" and not role.name.startswith(JOBS)):
            raise (StageFailed if role.exit_code == EXIT_UNUSABLE else RoleFailed)(_death(role))


# ---------------------------------------------------------------- StartGeneration


def thread_env(config: Config) -> dict[str, str]:
    """Torch reads its number of threads from here when it is imported."""
    return {"OMP_NUM_THREADS": str(config.torch_threads), "MKL_NUM_THREADS": str(config.torch_threads)}


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
                final_exit_codes=REPLICA_FINAL_EXIT_CODES,
            )
        )
    return {"replicas": names}


async def poll_generation(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done when each replica has proved what it serves."""
    await check_roles(ctx.launcher)
    await check_budget(ctx)
    stored = await ctx.ports.records.get([replica_key(ctx.run.run_id, name) for name in handle["replicas"]])
    found = [decode(item.value, ReplicaStatus) for item in stored if item is not None]
    ready = [status for status in found if status.state is ReplicaState.SERVING]
    if len(ready) < len(handle["replicas"]):
        errors = "".join(f"; {status.error}" for status in found if status.error)
        return Running(detail=f"{len(ready)} of {len(handle['replicas'])} replicas are ready{errors}")
    return Done(result={status.replica: str(status.version) for status in ready})


# ---------------------------------------------------------------- StartRewardWorkers


async def start_reward_workers(ctx: StageContext) -> Handle:
    """Where control does not serve the proxy, that is started before those who talk to it."""
    name = "worker-0"
    proxies: list[str] = []
    if ctx.proxy_env is not None:
        proxies.append(PROXY)
        await ctx.launcher.start(
            RoleSpec(
                role="proxy",
                name=PROXY,
                run_id=ctx.run.run_id,
                env=dict(ctx.proxy_env),
                max_restarts=MAX_RESTARTS,
            )
        )
    await ctx.launcher.start(
        RoleSpec(role="worker", name=name, run_id=ctx.run.run_id, env=dict(ctx.worker_env), max_restarts=MAX_RESTARTS)
    )
    return {"workers": [name], "proxies": proxies}


async def poll_reward_workers(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done when each worker has asked the proxy for work."""
    await check_roles(ctx.launcher)
    await check_budget(ctx)
    stored = await ctx.ports.records.get([worker_key(ctx.run.run_id, name) for name in handle["workers"]])
    ready = sum(item is not None for item in stored)
    if ready < len(stored):
        return Running(detail=f"{ready} of {len(stored)} workers are ready")
    return Done(result={"workers": handle["workers"]})


# ---------------------------------------------------------------- SubmitTraining


async def start_training(ctx: StageContext) -> Handle:
    """What the run's earlier trainers said of themselves does not count. The trainer waits for the baseline."""
    status = await training_status(ctx)
    return {"trainer": TRAINER, "after_incarnation": status.incarnation if status else 0}


async def _start_trainer(ctx: StageContext) -> None:
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


async def training_status(ctx: StageContext) -> TrainingStatus | None:
    return await trainer_says(ctx.ports, ctx.run.run_id)


async def poll_training(ctx: StageContext, handle: Handle) -> Running | Done:
    """The baseline first. Done when the trainer says so; a trainer that ends without saying so is a failure."""
    trainer = [role for role in await ctx.launcher.statuses() if role.name == handle["trainer"]]
    if not trainer:
        await check_roles(ctx.launcher)
        if isinstance(gate := await pass_baseline(ctx), Running):
            return gate
        await _start_trainer(ctx)
    status = await training_status(ctx)
    if status is not None and status.incarnation <= handle["after_incarnation"]:
        status = None
    if status is not None and status.state == "succeeded":
        baseline = await load_baseline(ctx)
        return Done(
            result={
                "steps": status.step,
                "checkpoint": status.checkpoint,
                "version": str(status.version),
                "baseline": baseline.figures() if baseline else None,
            },
        )
    if status is not None and status.state == "exhausted":
        raise await budget_exceeded(ctx, "budget_tokens")
    if status is not None and status.state == "failed":
        raise StageFailed(f"the trainer stopped at step {status.step}: {status.error}")
    if status is not None and status.state == "cancelled":
        raise StageFailed(f"the trainer was told to stop at step {status.step} by somebody else than this pipeline")
    await check_budget(ctx)
    await check_roles(ctx.launcher)
    for role in trainer:
        if role.state == "exited":
            raise RoleFailed(_death(role))
    return Running(detail=f"step {status.step} of {status.max_steps}" if status else "the trainer is starting")
