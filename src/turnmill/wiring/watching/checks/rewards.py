"""Training that makes the model worse: rewards that fall, that end at the lowest there is, or that are no rewards.

Each rule compares the last steps with those before, and fires where the difference is both large and no chance. All are
tried with simulated curves in the tests: how often noise is taken for a collapse, and how soon one is seen.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from turnmill.records import AlertKind, Metric
from turnmill.wiring.watching.checks.metrics import RecentMetrics
from turnmill.wiring.watching.evidence import command, failing_conversation, last_lines
from turnmill.wiring.watching.monitor import Finding

# Steps whose mean is compared with that of as many earlier ones.
WINDOW = 8
# The drop is at least so many standard errors of the difference, and this share of the height above the lowest reward.
NUM_ERRORS, DROP = 6.0, 0.4
# That all rollouts of the last steps are at the lowest reward must be less likely than this, by what was there before.
CHANCE, LEAST_STEPS = 1e-9, 3
# Of the last steps, against all before: so much more of the rollouts came to no reward.
INVALID_STEPS, INVALID_RISE, LEAST_ROLLOUTS = 4, 0.3, 16
# Of the differences, while the alert is open: what is just above one must not come and go.
STILL = 0.5


@dataclass(frozen=True, kw_only=True)
class StepRewards:
    """The rewards of one step."""

    mean: float
    lowest: float
    highest: float
    num_valid: int
    num_invalid: int


def fallen(steps: Sequence[StepRewards], *, is_open: bool = False) -> str | None:
    """The mean of the last `WINDOW` steps against the best earlier window; None where it is no collapse.

    best - now > max(6 SE, 0.4 (best - lowest)), SE = sigma sqrt(2 / WINDOW), and sigma² half the mean square of the
    differences between neighbouring steps (von Neumann), so that a trend is not taken for noise.
    """
    steps = [step for step in steps if step.num_valid]
    if len(steps) < 2 * WINDOW:
        return None
    means = [step.mean for step in steps]
    lowest = min(step.lowest for step in steps)
    best, now = _best_window(means[:-WINDOW]), fmean(means[-WINDOW:])
    sigma = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(means)) / 2)
    margin = max(NUM_ERRORS * sigma * math.sqrt(2 / WINDOW), DROP * (best - lowest))
    if best - now <= (STILL if is_open else 1.0) * margin or best <= now:
        return None
    return f"the mean reward fell from {best:.3g} (best {WINDOW} steps) to {now:.3g} (last {WINDOW} steps)"


def at_the_bottom(steps: Sequence[StepRewards], *, is_open: bool = False) -> str | None:
    """All rollouts of the last steps, three at least, have the lowest reward there is, which is no chance.

    Of the rollouts before, at least the share p = (mean - lowest) / (highest - lowest) had more, so that n in a row at
    the lowest have a chance of (1 - p)^n at most; it must be below 1e-9.
    """
    steps = [step for step in steps if step.num_valid]
    lowest = min((step.lowest for step in steps), default=0.0)
    highest = max((step.highest for step in steps), default=0.0)
    num_flat = next((i for i, step in enumerate(reversed(steps)) if step.highest > lowest), len(steps))
    earlier = steps[: len(steps) - num_flat]
    if num_flat < (1 if is_open else LEAST_STEPS) or len(earlier) < WINDOW:
        return None
    share = (fmean(step.mean for step in earlier) - lowest) / (highest - lowest)
    num_rollouts = sum(step.num_valid for step in steps[len(earlier) :])
    if not is_open and (1 - share) ** num_rollouts > CHANCE:
        return None
    return f"all {num_rollouts} rollouts of the last {num_flat} steps have the lowest reward, {lowest:g}"


def invalid(steps: Sequence[StepRewards], *, is_open: bool = False) -> str | None:
    """Many more of the last steps' rollouts than before came to no reward, for reasons that are not the model's.

    Of shares p: now - before > max(0.3, 6 SE), SE² = p (1 - p) (1 / n_now + 1 / n_before) with p of both together.
    """
    if len(steps) < 2 * INVALID_STEPS:
        return None
    num_before, invalid_before = _counts(steps[:-INVALID_STEPS])
    num_now, invalid_now = _counts(steps[-INVALID_STEPS:])
    if num_now < LEAST_ROLLOUTS or num_before < LEAST_ROLLOUTS:
        return None
    before, now = invalid_before / num_before, invalid_now / num_now
    share = (invalid_before + invalid_now) / (num_before + num_now)
    error = math.sqrt(share * (1 - share) * (1 / num_now + 1 / num_before))
    if now - before <= (STILL if is_open else 1.0) * max(INVALID_RISE, NUM_ERRORS * error):
        return None
    return f"{now:.0%} of the rollouts of the last {INVALID_STEPS} steps are invalid; before it were {before:.0%}"


RULES = (fallen, at_the_bottom, invalid)


def collapses(steps: Sequence[StepRewards], *, is_open: bool = False) -> list[str]:
    """What each rule says that fires."""
    return [text for rule in RULES if (text := rule(steps, is_open=is_open))]


class CollapsedRewards:
    """Implements `Check` for the steps of a training."""

    def __init__(self, root: Path, run_id: str, metrics: RecentMetrics) -> None:
        self._root = root
        self._run_id = run_id
        self._metrics = metrics
        # With the evidence of when it began.
        self._found: Finding | None = None

    async def look(self) -> list[Finding]:
        """See `Check.look`."""
        metrics = await self._metrics.read()
        # A long run has many steps, and control has conversations to serve.
        texts = await asyncio.to_thread(_collapses_in, metrics, is_open=self._found is not None)
        if not texts:
            self._found = None
        elif self._found is None:
            self._found = await self._finding(metrics[-1].step, texts)
        return [] if self._found is None else [self._found]

    async def _finding(self, step: int, texts: Sequence[str]) -> Finding:
        return Finding(
            kind=AlertKind.REWARD_COLLAPSE,
            summary=f"rewards of run {self._run_id} collapsed by step {step}: {texts[0]}",
            command=command(self._root, "status", self._run_id),
            stage="SubmitTraining",
            error="\n".join(texts),
            log_lines=tuple(await asyncio.to_thread(last_lines, self._root, self._run_id, ["trainer", "worker"])),
            conversation=await asyncio.to_thread(failing_conversation, self._root, self._run_id),
        )


def rewards_of(metric: Metric) -> StepRewards:
    """What a metric says of the rewards of its step."""
    values = metric.values
    mean = values.get("reward_mean", 0.0)
    return StepRewards(
        mean=mean,
        lowest=values.get("reward_min", mean),
        highest=values.get("reward_max", mean),
        num_valid=int(values.get("num_generated", 0)) if "reward_mean" in values else 0,
        num_invalid=int(values.get("num_invalid", 0)),
    )


def _collapses_in(metrics: Sequence[Metric], *, is_open: bool) -> list[str]:
    return collapses([rewards_of(metric) for metric in metrics], is_open=is_open)


def _best_window(means: Sequence[float]) -> float:
    """The highest mean of `WINDOW` neighbours."""
    total = sum(means[:WINDOW])
    best = total
    for leaving, coming in zip(means, means[WINDOW:], strict=False):
        total += coming - leaving
        best = max(best, total)
    return best / WINDOW


def _counts(steps: Sequence[StepRewards]) -> tuple[int, int]:
    """Rollouts, and those of them that are invalid."""
    num_invalid = sum(step.num_invalid for step in steps)
    return num_invalid + sum(step.num_valid for step in steps), num_invalid
