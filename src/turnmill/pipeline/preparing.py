"""The stages between the data and the run's processes: can it work at all, and is there a place for it?"""

import logging
from dataclasses import replace
from typing import Any

import msgspec

from turnmill import assets, failpoints
from turnmill.config import Config
from turnmill.errors import BackendUnavailable, EnvironmentFailed, NotFound, RoleFailed
from turnmill.pipeline.capacity import bytes_to_keep, num_parameters, num_trained, shown
from turnmill.pipeline.processes import FINAL_EXIT_CODES, check_roles
from turnmill.pipeline.stage import Done, Handle, Running, StageContext
from turnmill.ports import RoleSpec
from turnmill.records import Check, CheckState, PreflightReport, PreflightRequest, RunKind, decode, encode

logger = logging.getLogger(__name__)

# Longest conversation without a model, and time after which no further one is begun, in seconds.
PLAY_S, TOTAL_S = 30.0, 60.0
# A preflight that is killed from outside is played again so often; one that says what is wrong is not.
MAX_KILLS = 2

# ---------------------------------------------------------------- Preflight


async def start_preflight(ctx: StageContext) -> Handle:
    """Without a model, in a process of its own: an environment that hangs or crashes takes nothing with it.

    Raises `BackendUnavailable` where the disk has no room for what the run will keep.
    """
    capacity = [await _check_disk(ctx), _check_slots(ctx)]
    for check in capacity:
        logger.info("preflight: %s: %s", check.name, check.detail, extra={"at": ctx.run.run_id})
    name = f"preflight-{ctx.run.attempt}"
    config = ctx.config
    is_training = ctx.run.kind is RunKind.TRAIN
    data_path = ctx.run.data_path if is_training else ctx.run.eval_path
    request = preflight_request(config, str(data_path), is_training=is_training)
    await ctx.ports.blobs.put(request_key(name), encode(request))
    await ctx.launcher.start(
        RoleSpec(
            role="preflight",
            name=name,
            run_id=ctx.run.run_id,
            env=dict(ctx.judges_env),
            max_restarts=MAX_KILLS,
            final_exit_codes=FINAL_EXIT_CODES,
        )
    )
    failpoints.hit("preflight-started")
    return {"role": name, "capacity": _plain(capacity)}


def preflight_request(config: Config, data_path: str, *, is_training: bool) -> PreflightRequest:
    """What is asked about the environment of a run."""
    return PreflightRequest(
        environment=config.environment,
        data_path=data_path,
        seed=config.seed,
        max_length=config.max_length,
        play_s=min(PLAY_S, config.training_timeout),
        total_s=TOTAL_S,
        group_rewards=config.group_rewards if is_training else None,
    )


async def poll_preflight(ctx: StageContext, handle: Handle) -> Running | Done:
    """Done with its report; raises `EnvironmentFailed` where a check failed."""
    name = handle["role"]
    # Looked at first: a process that has ended by then has written its report before.
    has_ended = any(role.name == name and role.state != "running" for role in await ctx.launcher.statuses())
    try:
        found = decode(await ctx.ports.blobs.get(report_key(name)), PreflightReport)
    except NotFound:
        await check_roles(ctx.launcher)
        if has_ended:
            raise RoleFailed(f"{name} ended without a report; see its log (turnmill logs --role {name})") from None
        return Running(detail="the environment is played without a model")
    capacity = (msgspec.convert(check, Check) for check in handle["capacity"])
    report = replace(found, checks=(*found.checks, *capacity))
    if report.failed:
        raise EnvironmentFailed(_failure(ctx.config.environment.env_id, report))
    for check in report.warnings:
        logger.warning("preflight: %s: %s", check.name, check.detail, extra={"at": ctx.run.run_id})
    return Done(result=_plain(report))


def request_key(name: str) -> str:
    """Of the blob that the preflight process `name` is started with."""
    return f"preflight/{name}.request.json"


def report_key(name: str) -> str:
    """Of the blob that it leaves."""
    return f"preflight/{name}.report.json"


def _plain(value: object) -> Any:
    """As it comes back from a record."""
    return msgspec.json.decode(encode(value))


def _failure(env: str, report: PreflightReport) -> str:
    lines = [f"  {check.name}: {check.detail}" for check in report.failed]
    return "\n".join([f"environment {env} can't be trained on with this data:", *lines])


async def _check_disk(ctx: StageContext) -> Check:
    free = await ctx.ports.infra.free_bytes()
    if free is None:
        return Check(name="disk", state=CheckState.NOT_CHECKED, detail="nothing limits what can be stored")
    folder = assets.model_folder(ctx.config.base_model)
    parameters = num_parameters(folder)
    trained = 0 if ctx.run.kind is RunKind.EVAL else num_trained(ctx.config, folder)
    needed = bytes_to_keep(ctx.config, ctx.run.kind, parameters, trained)
    if needed > free:
        raise BackendUnavailable(
            f"the disk has {shown(free)} free and weights and checkpoints may take {shown(needed)} "
            f"({parameters} parameters, save_top_k = {ctx.config.save_top_k}): free some space or lower save_top_k"
        )
    return Check(name="disk", state=CheckState.OK, detail=f"{shown(needed)} of {shown(free)} free may be needed")


def _check_slots(ctx: StageContext) -> Check:
    """Too few slots cost time and nothing else, so it is told."""
    config = ctx.config
    slots = config.generation_replicas * config.generation_slots
    text = f"{slots} conversations can be kept warm, {config.max_concurrent_rollouts} are played at once"
    if slots < config.max_concurrent_rollouts:
        text += "; the others are read anew at each turn: raise generation_slots, or lower max_concurrent_rollouts"
    return Check(name="slots", state=CheckState.OK, detail=text)


# ---------------------------------------------------------------- DeployRunInfra


async def start_deploy(ctx: StageContext) -> Handle:
    """Queues, records and folders are made and written to now, so that no process finds out later that it can't."""
    deployed = await ctx.ports.infra.deploy()
    failpoints.hit("infra-deployed")
    return {"deployed": deployed}


async def poll_deploy(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result=handle)
