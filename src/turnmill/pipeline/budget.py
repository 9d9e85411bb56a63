"""A run stops in order when its time or its dollars are used up, whatever its processes are doing."""

from turnmill.errors import BudgetExceeded
from turnmill.pipeline.stage import StageContext
from turnmill.ports import RunPorts
from turnmill.records import TrainingStatus, decode, training_key

TRAINER = "trainer"


async def check_budget(ctx: StageContext) -> None:
    """Raise `BudgetExceeded` at the limit, once the trainer has left a checkpoint: it is asked to stop first."""
    name = ctx.meter.over() if ctx.meter is not None else None
    if name is not None:
        await ctx.launcher.stop(TRAINER)
        raise await budget_exceeded(ctx, name)


async def budget_exceeded(ctx: StageContext, name: str) -> BudgetExceeded:
    """The error about the limit of this name, with what the trainer says of itself."""
    if ctx.meter is None:
        return BudgetExceeded(f"{name} is used up")
    return await ctx.meter.exceeded(name, await trainer_says(ctx.ports, ctx.run.run_id))


async def trainer_says(ports: RunPorts, run_id: str) -> TrainingStatus | None:
    """What the run's last trainer says of itself."""
    (stored,) = await ports.records.get([training_key(run_id)])
    return decode(stored.value, TrainingStatus) if stored else None
