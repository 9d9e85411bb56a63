"""What a run has used so far: tokens from the counters beside its calls, time from its clock, dollars from both."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnmill.ports import RecordStore
from turnmill.records import Purpose, Run, RunClock, clock_prefix, decode, token_count_key, token_count_prefix

_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Spent:
    """So far."""

    # Sampled and recorded tokens by purpose, those of dropped and invalid samples and of earlier attempts included.
    tokens: dict[str, int]
    # In which a control process had the run.
    run_s: float
    usd: float

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())


async def num_tokens(records: RecordStore, run_id: str) -> dict[str, int]:
    """Sampled tokens by purpose. Exact: a counter and the calls that it counts are written in one transaction."""
    prefixes = {token_count_key(run_id, purpose, ""): purpose for purpose in Purpose}
    counts = dict.fromkeys((purpose.value for purpose in Purpose), 0)
    page = await records.scan(token_count_prefix(run_id), limit=_PAGE)
    while page:
        for stored in page:
            purpose = next(purpose for prefix, purpose in prefixes.items() if stored.key.startswith(prefix))
            counts[purpose] += int(stored.value)
        page = await records.scan(token_count_prefix(run_id), after=page[-1].key, limit=_PAGE)
    return {purpose: count for purpose, count in counts.items() if count}


async def clocks(records: RecordStore, run_id: str) -> list[RunClock]:
    """One for each attempt that a control process has begun, in order."""
    found = [decode(stored.value, RunClock) for stored in await records.scan(clock_prefix(run_id))]
    return sorted(found, key=lambda clock: clock.attempt)


def run_seconds(of_attempts: Sequence[RunClock]) -> float:
    """How long the run has run, all attempts together; the time in which nobody had it does not count."""
    return sum(clock.seconds for clock in of_attempts)


def usd_of(seconds: float, usd_per_hour: float) -> float:
    return seconds / 3600 * usd_per_hour


def stage_hours(run: Run, of_attempts: Sequence[RunClock]) -> dict[str, float]:
    """By stage, all attempts together; one that was interrupted ends where its control process was seen last."""
    seen = {clock.attempt: clock.began_at + clock.seconds for clock in of_attempts}
    hours: dict[str, float] = {}
    for stage in run.stages:
        ended_at = stage.ended_at if stage.ended_at is not None else seen.get(stage.attempt, stage.started_at)
        hours[stage.name] = hours.get(stage.name, 0.0) + max(0.0, ended_at - stage.started_at) / 3600
    return hours
