"""Dead letters that become more: messages nobody could use, samples given up, alerts that could not be delivered."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec

from turnmill.errors import NotFound
from turnmill.ports import Queue, RecordStore, RunPorts, Stored
from turnmill.records import (
    DELIVERY_DEAD_LETTER_PREFIX,
    AlertKind,
    DeadSample,
    dead_letter_key,
    decode,
    sample_key,
)
from turnmill.wiring.watching.monitor import Finding

# They grow for so long after the last one came.
GROWING_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A dead letter as evidence."""

    error: str
    conversation: str | None = None


class Source(Protocol):
    """A place where dead letters lie. Both methods raise `BackendUnavailable`."""

    async def counts(self) -> dict[str, int]:
        """How many there are, by where."""
        ...

    async def letter(self, where: str) -> Letter | None:
        """One of them, the last one where that is known; None where none is left."""
        ...


class Growth:
    """Which counts rose of late, as they are looked at now and then; what is there at the first look is no rise."""

    def __init__(self) -> None:
        self._counts: dict[str, int] | None = None
        self._rose_at: dict[str, float] = {}

    def growing(self, counts: dict[str, int], now: float) -> list[str]:
        """Where they grow. `now`: seconds on a clock that only rises."""
        if self._counts is not None:
            rose = [where for where, count in counts.items() if count > self._counts.get(where, 0)]
            self._rose_at.update(dict.fromkeys(rose, now))
        self._counts = counts
        # Those that were removed or sent again are no trouble any more.
        return [where for where, at in self._rose_at.items() if now - at <= GROWING_S and counts.get(where, 0) > 0]


class DeadLetters:
    """Implements `Check` over all sources: one finding, that tells of each place where they grow."""

    def __init__(
        self, sources: Sequence[Source], *, about: str, command: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`about`: whose they are, for people. `command`: what to run next."""
        self._sources = sources
        self._about = about
        self._command = command
        self._clock = clock
        self._growth = Growth()

    async def look(self) -> list[Finding]:
        """See `Check.look`."""
        owners: dict[str, Source] = {}
        counts: dict[str, int] = {}
        for source in self._sources:
            found = await source.counts()
            counts.update(found)
            owners.update(dict.fromkeys(found, source))
        growing = self._growth.growing(counts, self._clock())
        if not growing:
            return []
        letters = {where: await owners[where].letter(where) for where in growing}
        told = ", ".join(f"{counts[where]} in {where}" for where in growing)
        errors = [f"{where}: {letter.error}" for where, letter in letters.items() if letter is not None]
        conversations = [letter.conversation for letter in letters.values() if letter and letter.conversation]
        return [
            Finding(
                kind=AlertKind.DEAD_LETTERS_GROWING,
                summary=f"dead letters of {self._about} grow: {told}",
                command=self._command,
                error="\n".join(errors) or None,
                conversation=conversations[0] if conversations else None,
            )
        ]


class DeadMessages:
    """A `Source`: the queues of a run."""

    def __init__(self, ports: RunPorts) -> None:
        self._queues: dict[str, Queue] = {
            "queue rollout_request": ports.rollout_request,
            "queue rollout_response": ports.rollout_response,
            "queue generate_response": ports.generate_response,
            **{f"queue generate_request-{index}": queue for index, queue in enumerate(ports.generate_request)},
        }

    async def counts(self) -> dict[str, int]:
        """See `Source.counts`; none of a queue that a stage has not made yet."""
        found: dict[str, int] = {}
        for where, queue in self._queues.items():
            with suppress(NotFound):
                found[where] = (await queue.counts()).dead
        return found

    async def letter(self, where: str) -> Letter | None:
        """See `Source.letter`: the first one, since a queue gives them in that order."""
        letters = await self._queues[where].dead_letters(limit=1)
        if not letters:
            return None
        return Letter(error=f"a message of group {letters[0].group!r} was received {letters[0].num_receives} times")


class DeadSamples:
    """A `Source`: the samples of a run that no attempt brought to an end."""

    _WHERE = "samples"

    def __init__(self, records: RecordStore, run_id: str) -> None:
        self._records = records
        self._prefix = dead_letter_key(run_id, "")

    async def counts(self) -> dict[str, int]:
        """See `Source.counts`."""
        return {self._WHERE: len(await _scan(self._records, self._prefix))}

    async def letter(self, where: str) -> Letter | None:
        """See `Source.letter`."""
        found = [decode(one.value, DeadSample) for one in await _scan(self._records, self._prefix)]
        if not found:
            return None
        last = max(found, key=lambda letter: letter.dead_at)
        return Letter(
            error=f"{last.sample_id}, {last.num_attempts} attempts: {last.detail}",
            conversation=sample_key(last.run_id, last.purpose, last.sample_id),
        )


class _AlertOf(msgspec.Struct, frozen=True):
    kind: AlertKind
    run_id: str | None = None


class _Delivery(msgspec.Struct, frozen=True):
    """Of a `DeadDelivery`, what tells whose it is and why."""

    alert: _AlertOf
    channel: str
    error: str
    dead_at: float


class DeadDeliveries:
    """A `Source`: alerts about a run (None: about none) that could not be delivered.

    Without those about dead letters: each would be the next one's cause.
    """

    _WHERE = "alert deliveries"

    def __init__(self, records: RecordStore, run_id: str | None) -> None:
        self._records = records
        self._run_id = run_id

    async def counts(self) -> dict[str, int]:
        """See `Source.counts`."""
        return {self._WHERE: len(await self._found())}

    async def letter(self, where: str) -> Letter | None:
        """See `Source.letter`."""
        last = max(await self._found(), key=lambda one: one.dead_at, default=None)
        return None if last is None else Letter(error=f"{last.alert.kind} to {last.channel}: {last.error}")

    async def _found(self) -> list[_Delivery]:
        stored = await _scan(self._records, DELIVERY_DEAD_LETTER_PREFIX)
        found = [decode(one.value, _Delivery) for one in stored]
        return [
            one
            for one in found
            if one.alert.run_id == self._run_id and one.alert.kind is not AlertKind.DEAD_LETTERS_GROWING
        ]


async def _scan(records: RecordStore, prefix: str) -> list[Stored]:
    found: list[Stored] = []
    while page := await records.scan(prefix, after=found[-1].key if found else ""):
        found += page
    return found
