"""The one definition of the pipeline: an ordered table of stages.

    ValidateData -> StartGeneration -> StartRewardWorkers -> SubmitTraining -> Evaluate -> Teardown

What a stage is says `stage`; what each one does, `checking`, `processes` and `results`.
"""

from turnmill.pipeline.checking import poll_validate, start_validate
from turnmill.pipeline.processes import (
    poll_generation,
    poll_reward_workers,
    poll_training,
    start_generation,
    start_reward_workers,
    start_training,
)
from turnmill.pipeline.results import poll_evaluate, start_evaluate
from turnmill.pipeline.stage import Done, Handle, Running, Stage, StageContext
from turnmill.records import RunKind

# ---------------------------------------------------------------- Teardown


async def start_teardown(ctx: StageContext) -> Handle:
    """End what was started, last first. Results (records, conversations, checkpoints, logs) stay."""
    stopped = [role.name for role in await ctx.launcher.statuses()]
    await ctx.launcher.close()
    return {"stopped": stopped}


async def poll_teardown(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result={"stopped": handle["stopped"]})


# ---------------------------------------------------------------- the table


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
