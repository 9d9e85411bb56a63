"""The one definition of the pipeline: an ordered table of stages.

    ValidateData -> Preflight -> DeployRunInfra -> StartGeneration -> StartRewardWorkers -> SubmitTraining -> Evaluate
                 -> Publish -> Teardown

What a stage is says `stage`; what each one does, `checking`, `preparing`, `processes`, `results` and `publishing`.
"""

from turnmill.config import Config
from turnmill.pipeline.checking import poll_validate, start_validate
from turnmill.pipeline.preparing import poll_deploy, poll_preflight, start_deploy, start_preflight
from turnmill.pipeline.processes import (
    poll_generation,
    poll_reward_workers,
    poll_training,
    start_generation,
    start_reward_workers,
    start_training,
)
from turnmill.pipeline.publishing import poll_publish, start_publish
from turnmill.pipeline.results import poll_evaluate, start_evaluate
from turnmill.pipeline.stage import Done, Handle, Running, Stage, StageContext
from turnmill.records import RunKind

# ---------------------------------------------------------------- Teardown


async def start_teardown(ctx: StageContext) -> Handle:
    """End what was started, last first, and remove the messages that nobody receives any more.

    Results (records, conversations, checkpoints, logs) and dead letters stay.
    """
    stopped = [role.name for role in await ctx.launcher.statuses()]
    await ctx.launcher.close()
    given_up = await ctx.give_up_redriven()
    return {"stopped": stopped, "given_up": given_up, "removed_messages": await ctx.ports.infra.retire()}


async def poll_teardown(ctx: StageContext, handle: Handle) -> Running | Done:
    return Done(result=handle)


# ---------------------------------------------------------------- the table


def _whole_run_s(config: Config) -> float:
    """The run's own limit ends these stages, in order (see `budget`): this one only if that fails."""
    return config.max_runtime_s + 120.0


STAGES: tuple[Stage, ...] = (
    Stage(
        name="ValidateData",
        does="Reads the data files whole, row by row, and refuses bad ones with a report.",
        start=start_validate,
        poll=poll_validate,
        timeout_s=lambda config: 600.0,
        expected_s=5.0,
    ),
    Stage(
        name="Preflight",
        does="Plays some tasks without a model, well and senselessly, and sees whether the disk has room.",
        start=start_preflight,
        poll=poll_preflight,
        timeout_s=lambda config: 300.0,
        expected_s=10.0,
    ),
    Stage(
        name="DeployRunInfra",
        does="Makes the run's queues, records and folders, and writes to each.",
        start=start_deploy,
        poll=poll_deploy,
        # A cloud's services take minutes.
        timeout_s=lambda config: 900.0,
        expected_s=5.0,
    ),
    Stage(
        name="StartGeneration",
        does="Starts the replicas, and waits until each serves a weight version.",
        start=start_generation,
        poll=poll_generation,
        timeout_s=lambda config: 600.0,
        expected_s=60.0,
    ),
    Stage(
        name="StartRewardWorkers",
        does="Starts the workers, and waits until each has asked for work.",
        start=start_reward_workers,
        poll=poll_reward_workers,
        timeout_s=lambda config: 120.0,
        expected_s=10.0,
    ),
    Stage(
        name="SubmitTraining",
        does="Starts the trainer, and waits until it has made all steps.",
        start=start_training,
        poll=poll_training,
        timeout_s=_whole_run_s,
        expected_s=600.0,
        kinds=(RunKind.TRAIN,),
    ),
    Stage(
        name="Evaluate",
        does="Has the trained weights and the base play the held-out tasks.",
        start=start_evaluate,
        poll=poll_evaluate,
        timeout_s=_whole_run_s,
        expected_s=120.0,
    ),
    Stage(
        name="Publish",
        does="Decides by the held-out results; publishes the final checkpoint with its card, for good.",
        start=start_publish,
        poll=poll_publish,
        timeout_s=lambda config: 3600.0,
        expected_s=30.0,
        kinds=(RunKind.TRAIN,),
    ),
    Stage(
        name="Teardown",
        does="Ends the processes, last first, and removes the messages that nobody receives any more.",
        start=start_teardown,
        poll=poll_teardown,
        timeout_s=lambda config: 120.0,
        expected_s=20.0,
        always=True,
    ),
)


# Nothing is started before the first one is done, and nothing is left when the last one is.
FIRST_STAGE, LAST_STAGE = STAGES[0].name, STAGES[-1].name


def stages_of(kind: RunKind) -> tuple[Stage, ...]:
    """The rows of the table that a run of this kind walks."""
    return tuple(stage for stage in STAGES if kind in stage.kinds)
