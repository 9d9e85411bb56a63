"""How long a run has run and what that costs, kept by its control process; and what is said when a limit is reached.

earlier clocks -> Meter -> clock record, again and again
                   '-> over(): which limit of time or dollars is reached
"""

import asyncio
import logging
import math
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

from turnmill.budget.spending import Spent, clocks, num_tokens, run_seconds, usd_of
from turnmill.config import Config, from_dict
from turnmill.config.values import shown
from turnmill.errors import BackendUnavailable, BudgetExceeded
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunClock, RunKind, TrainingStatus, encode

logger = logging.getLogger(__name__)

# So much of a run's time is not counted when its control process is killed.
_KEEP_S = 2.0
# What is proposed on top of what the rest of the run takes at its pace.
_MARGIN = 1.2


def usd_per_hour_of(run: Run) -> float:
    """As it was when the run began."""
    config = from_dict(run.config)
    return float((run.forecast or {}).get("usd_per_hour", config.usd_per_hour * config.instance_count))


async def spent_by(records: RecordStore, run: Run) -> Spent:
    """What a run has used, as its records say."""
    seconds = run_seconds(await clocks(records, run.run_id))
    return Spent(tokens=await num_tokens(records, run.run_id), run_s=seconds, usd=usd_of(seconds, usd_per_hour_of(run)))


def used_up(config: Config, spent: Spent) -> str | None:
    """The first limit that is reached, by the name of its parameter."""
    reached = {
        "budget_tokens": spent.num_tokens >= config.budget_tokens > 0,
        "budget_usd": spent.usd >= config.budget_usd > 0,
        "max_runtime_s": spent.run_s >= config.max_runtime_s,
    }
    return next((name for name, is_reached in reached.items() if is_reached), None)


@dataclass(frozen=True, kw_only=True)
class Breach:
    """A limit that is reached."""

    run: Run
    # Of the parameter.
    name: str
    spent: Spent
    # What the trainer says of itself; None before there is one.
    training: TrainingStatus | None
    # Folder of the deployment.
    root: Path

    @property
    def text(self) -> str:
        """What is used up, how much of it, where the run is, and the command that goes on."""
        limit = shown(self.run.config[self.name])
        source = self.run.sources.get(self.name, "default")
        by_purpose = ", ".join(f"{purpose} {count:,}" for purpose, count in self.spent.tokens.items()) or "none"
        figures = (
            f"{self.spent.num_tokens:,} tokens generated ({by_purpose}), {self.spent.run_s:.0f} s, "
            f"{self.spent.usd:.2f} USD"
        )
        return f"{self.name} = {limit} ({source}) is used up: {figures}; {self._where}; {self._advice}"

    @property
    def _where(self) -> str:
        if self.run.kind is not RunKind.TRAIN:
            return "the evaluation stopped"
        if self.training is None or not self.training.step:
            return "no step is made"
        at = f"stopped at step {self.training.step} of {self.training.max_steps}"
        return f"{at}, checkpoint {self.training.checkpoint}" if self.training.checkpoint else at

    @property
    def _advice(self) -> str:
        flag = f"--{self.name.replace('_', '-')}"
        root = str(self.root.absolute())
        command = shlex.join(["turnmill", "resume", self.run.run_id, flag, self._enough, "--root", root])
        if self.run.sources.get(self.name) == "turnmill.toml":
            return f"it is the ceiling of this deployment: raise it in [ceilings] of turnmill.toml, then {command}"
        return f"go on with more: {command}"

    @property
    def _enough(self) -> str:
        """What the whole run takes at its pace so far, or twice as much as before where it has none."""
        used = {
            "budget_tokens": float(self.spent.num_tokens),
            "budget_usd": self.spent.usd,
            "max_runtime_s": self.spent.run_s,
        }[self.name]
        steps, most = (self.training.step, self.training.max_steps) if self.training else (0, 0)
        factor = max(_MARGIN, most / steps * _MARGIN) if steps else 2.0
        enough = max(used, float(self.run.config[self.name])) * factor
        return f"{enough:.2f}" if self.name == "budget_usd" else str(math.ceil(enough))


class Meter:
    """The clock of one attempt."""

    def __init__(self, records: RecordStore, run: Run, *, root: Path, keep_s: float = _KEEP_S) -> None:
        self._records = records
        self._keep_s = keep_s
        self._run = run
        self._root = root
        self._config = from_dict(run.config)
        self._usd_per_hour = usd_per_hour_of(run)
        self._began = time.monotonic()
        self._began_at = time.time()
        # Of earlier attempts, and of earlier processes in this one: it is counted up when something was done in it.
        self._before_s = self._begun_s = 0.0
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Count on from the earlier attempts."""
        found = [clock for clock in await clocks(self._records, self._run.run_id) if clock.attempt <= self._run.attempt]
        self._before_s = run_seconds(found)
        self._begun_s = run_seconds([clock for clock in found if clock.attempt == self._run.attempt])
        await self._write()
        self._keeping = asyncio.create_task(self._keep(), name="run clock")

    async def close(self) -> None:
        """Write down how long it was; idempotent."""
        if self._keeping is None:
            return
        keeping, self._keeping = self._keeping, None
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        try:
            await self._write()
        except BackendUnavailable as error:
            # How the run ended is what is told; the clock is at most a tick behind.
            logger.warning("the last %g s of this run are not counted: %s", self._keep_s, error)

    @property
    def run_s(self) -> float:
        """Of the run so far, all attempts together."""
        return self._before_s + time.monotonic() - self._began

    def over(self) -> str | None:
        """The limit of time or dollars that is reached, by the name of its parameter; raises what ended the clock."""
        if self._keeping is not None and self._keeping.done():
            self._keeping.result()
        spent = Spent(tokens={}, run_s=self.run_s, usd=usd_of(self.run_s, self._usd_per_hour))
        return used_up(self._config, spent)

    async def exceeded(self, name: str, training: TrainingStatus | None) -> BudgetExceeded:
        """The error about the limit of this name."""
        tokens = await num_tokens(self._records, self._run.run_id)
        spent = Spent(tokens=tokens, run_s=self.run_s, usd=usd_of(self.run_s, self._usd_per_hour))
        breach = Breach(run=self._run, name=name, spent=spent, training=training, root=self._root)
        return BudgetExceeded(breach.text)

    async def _keep(self) -> None:
        is_told = False
        while True:
            await asyncio.sleep(self._keep_s)
            try:
                await self._write()
            except BackendUnavailable as error:
                # The time runs on here, and the next tick writes all of it: a moment without a store ends no run.
                if not is_told:
                    logger.warning(
                        "the run's time can't be written down now: %s", error, extra={"at": self._run.run_id}
                    )
                is_told = True
            else:
                is_told = False

    async def _write(self) -> None:
        clock = RunClock(
            run_id=self._run.run_id,
            attempt=self._run.attempt,
            began_at=self._began_at - self._begun_s,
            seconds=self._begun_s + time.monotonic() - self._began,
        )
        await self._records.write([Write(key=clock.key, value=encode(clock), expected=None)])
