"""The gate before the first step: a base model that passes nothing, or everything, has nothing to learn from.

recorded and passed | the run has steps | it is switched off -> train
else: play it -> its record -> train, or stop and say why
"""

import math
from pathlib import Path

from turnmill.errors import StageFailed
from turnmill.pipeline.stage import Running, StageContext
from turnmill.records import Baseline, BaselineVerdict, Purpose, baseline_key, batch_prefix, decode

NAME = "baseline"
# One-sided, for a share of which not a single case was seen.
_CONFIDENCE = 0.95


async def load_baseline(ctx: StageContext) -> Baseline | None:
    """The one that was recorded last."""
    (stored,) = await ctx.ports.records.get([baseline_key(ctx.run.run_id)])
    return decode(stored.value, Baseline) if stored else None


async def pass_baseline(ctx: StageContext) -> Running | Baseline | None:
    """The baseline once the gate lets the run train, None where none is due; raises `StageFailed` where it must not.

    It is played once a run. Only one that stopped the run is played anew when the run is resumed: the environment may
    have been the reason.
    """
    baseline = await load_baseline(ctx)
    if baseline is not None and (baseline.lets_train or baseline.attempt == ctx.run.attempt):
        return _judged(baseline)
    if ctx.config.baseline_rollouts == 0 or await _has_steps(ctx):
        return None
    await ctx.evaluations.start(NAME, Path(str(ctx.run.data_path)), Purpose.BASELINE)
    # Asked for what ended it; what came of it is in the records.
    ctx.evaluations.poll(NAME)
    return Running(detail=f"baseline {ctx.evaluations.progress(NAME)}")


async def _has_steps(ctx: StageContext) -> bool:
    """A run that has begun to learn is past the question."""
    return bool(await ctx.ports.records.scan(batch_prefix(ctx.run.run_id), limit=1))


def _judged(baseline: Baseline) -> Baseline:
    if not baseline.lets_train:
        raise StageFailed(explain(baseline))
    return baseline


def unseen_bound(num: int) -> float:
    """The largest share that is still likely (95 %) to show no case at all in `num`: 1 - 0.05^(1/num)."""
    return 1.0 - math.pow(1.0 - _CONFIDENCE, 1.0 / num)


def explain(baseline: Baseline) -> str:
    """Why there is nothing to learn, and what to do."""
    num, bound = baseline.num_rollouts, f"{100 * unseen_bound(baseline.num_rollouts):.1f} %"
    if baseline.verdict is BaselineVerdict.TOO_HARD:
        what = f"the tasks are too hard for the base model: none of {num} rollouts passed (at most {bound} would)"
        todo = "give easier tasks or more turns, or a base model that passes some"
    else:
        what = f"the tasks are too easy for the base model: all of {num} rollouts passed (at most {bound} would fail)"
        todo = "give harder tasks"
    if baseline.num_rewards == 1:
        seen = f"every reward was {baseline.reward_mean:g}: does the reward tell good from bad?"
    else:
        seen = (
            f"rewards were {baseline.reward_min:g} to {baseline.reward_max:g}, {baseline.reward_mean:.3g} in the mean, "
            f"{baseline.num_rewards} different ones, and {baseline.threshold:g} is a pass: set success_threshold "
            "between them if that is too much or too little"
        )
    return f"{what}; {seen}; {todo}, or set ignore_baseline = true to train all the same"
