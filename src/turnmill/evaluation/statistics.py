"""What rollouts say about tasks that were played several times each, with intervals. Pure functions.

The unit is the task: rollouts of one task are alike, so that a hundred of ten tasks say less about other tasks than a
hundred of a hundred. Each 95 % interval below is therefore made of one number a task.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from statistics import fmean, variance

from turnmill.evaluation.intervals import Z_95, wilson

# Subsets of tasks whose means make an interval, where there are more than that; one less than a round number.
_NUM_SUBSETS = 999
_MISSED = 0.05
# From digits to what is false and true.
_FLAGS = bytes.maketrans(b"01", b"\x00\x01")
# Above so many degrees of freedom the expansion of Student's quantile is exact to six digits.
_MANY = 100


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over tasks with its 95 % interval."""

    value: float
    # None where there are too few tasks for an interval.
    low: float | None
    high: float | None


# ---------------------------------------------------------------- one task


def pass_at_k(num: int, num_solved: int, k: int) -> float:
    """The chance that at least one of k rollouts solves a task, of which `num_solved` of `num` >= k did.

    Unbiased: 1 - C(num - num_solved, k) / C(num, k), equation 1 of Chen et al., arXiv:2107.03374.
    """
    return 1.0 - math.comb(num - num_solved, k) / math.comb(num, k)


def pass_hat_k(num: int, num_solved: int, k: int) -> float:
    """The chance that all of k rollouts solve a task: C(num_solved, k) / C(num, k), of Yao et al., arXiv:2406.12045."""
    return math.comb(num_solved, k) / math.comb(num, k)


def powers_up_to(num: int) -> list[int]:
    """The k of which `num` rollouts a task tell something: 1, 2, 4, ..."""
    return [1 << i for i in range(num.bit_length())]


# ---------------------------------------------------------------- all tasks


def share_of_tasks(shares: Sequence[float], num_rollouts: int) -> Estimate:
    """The mean of one share a task, and where it lies for tasks like these; `num_rollouts` is that of all tasks.

    Wilson's interval with the number of independent trials that would vary as much as the tasks do: p (1 - p) / var(p),
    less where few tasks tell the variance, var(p) that of the mean over clusters. Korn & Graubard, Survey Methodology
    24 (1998), 193-201; with Wilson's interval, Dean & Pagano, Journal of Survey Statistics and Methodology 3 (2015),
    484-503. Tasks that are all alike count as one trial each: a variance of 0 must not make it certain.
    """
    mean, num_tasks = fmean(shares), len(shares)
    spread = variance(shares) / num_tasks if num_tasks > 1 else 0.0
    num_trials = float(num_tasks)
    if spread > 0:
        few = (Z_95 / student_quantile(num_tasks - 1)) ** 2
        num_trials = min(float(num_rollouts), few * mean * (1 - mean) / spread)
    low, high = wilson(mean, num_trials)
    # Rounding must not lead it past the share itself.
    return Estimate(value=mean, low=min(low, mean), high=max(high, mean))


def mean_of_tasks(values: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean of one number a task, or of one difference a task, and where it lies for tasks like these.

    By typical values: of numbers that are symmetric about their mean, the means of all subsets cut the line into
    intervals that hold it with equal chance, however few numbers there are, and so do those of randomly drawn subsets
    (J. A. Hartigan, Journal of the American Statistical Association 64 (1969), 1303-1317). It is the test that flips
    signs (R. A. Fisher, 1935), turned around. Of fewer than six tasks no interval holds 95 %.
    """
    mean, means = fmean(values), sorted(_subset_means(values, seed))
    num_cut = math.floor((len(means) + 1) * _MISSED / 2)
    if num_cut == 0:
        return Estimate(value=mean, low=None, high=None)
    return Estimate(value=mean, low=means[num_cut - 1], high=means[-num_cut])


def _subset_means(values: Sequence[float], seed: int) -> list[float]:
    num = len(values)
    if 2**num - 1 <= _NUM_SUBSETS:
        subsets = list(range(1, 2**num))
    else:
        random_numbers = random.Random(seed)
        drawn: dict[int, None] = {}
        while len(drawn) < _NUM_SUBSETS:
            if subset := random_numbers.getrandbits(num):
                drawn[subset] = None
        subsets = list(drawn)
    # Each subset as the binary digits of a number: 1 for what is in it.
    return [fmean(compress(values, f"{subset:0{num}b}".encode().translate(_FLAGS))) for subset in subsets]


def student_quantile(degrees: int) -> float:
    """Where Student's t has 2.5 % above it.

    From the sums of Abramowitz & Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4; of many degrees
    of freedom, their 26.7.5.
    """
    if degrees > _MANY:
        return Z_95 + (Z_95**3 + Z_95) / (4 * degrees) + (5 * Z_95**5 + 16 * Z_95**3 + 3 * Z_95) / (96 * degrees**2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_within(angle, degrees) < 1 - _MISSED else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def _student_within(angle: float, degrees: int) -> float:
    """The chance of |t| <= sqrt(degrees) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2
    term, total = (cosine, 0.0) if is_odd else (1.0, 0.0)
    for power in range(1 + is_odd, degrees, 2):
        total += term
        term *= cosine**2 * power / (power + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
