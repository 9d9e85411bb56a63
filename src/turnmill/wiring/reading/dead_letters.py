"""All that was given up in a deployment, in one list: triggers, rollouts, messages and deliveries of alerts.

    records of the deployment and of its runs, queues -> Letter -> redrive: it goes on from there | purge: it is removed

Looking changes nothing. Whether a letter is still there is decided when it is redriven or purged, by the store that
holds it. A letter that was redriven is gone; what becomes of it is said by the run, and by a new letter if it dies
again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from turnmill.alerts import Feed
from turnmill.backends.embedded import open_quarantine
from turnmill.errors import InvalidInput, NotFound
from turnmill.ports import GENERATE_REQUEST, DeadLetter, Queue, RunPorts, Write
from turnmill.records import (
    DELIVERY_DEAD_LETTER_PREFIX,
    TRIGGER_DEAD_LETTER_PREFIX,
    Call,
    DeadDelivery,
    DeadSample,
    DeadTrigger,
    Run,
    call_prefix,
    dead_letter_key,
    decode,
    digest_of,
    encode,
)
from turnmill.wiring.backend import backend_of, open_external_run
from turnmill.wiring.reading.queues import queues_of
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.running.redriving import redrive_sample


class LetterKind(StrEnum):
    """What was given up."""

    # An upload that can't be trained, or whose content was gone.
    TRIGGER = "trigger"
    # A sample that no attempt could end.
    ROLLOUT = "rollout"
    # A message that was received too often.
    MESSAGE = "message"
    # An alert that a channel did not take.
    DELIVERY = "delivery"


@dataclass(frozen=True, kw_only=True)
class Letter:
    """One dead letter."""

    # Opaque; begins in its kind.
    letter_id: str
    kind: LetterKind
    # None where it is about no run.
    run_id: str | None
    dead_at: float
    # What could not be done, on what.
    input: dict[str, Any]
    error: str
    attempts: int
    # Of `code`, `config` (a digest) and `weights`, those that are known.
    versions: dict[str, str]
    # As it is stored.
    stored: DeadTrigger | DeadSample | DeadLetter | DeadDelivery = field(repr=False)
    # Of a message: where it was sent.
    queue: str | None = None

    def as_object(self) -> dict[str, Any]:
        """What `--json` prints."""
        names = ("letter_id", "kind", "run_id", "dead_at", "input", "error", "attempts", "versions")
        found: dict[str, Any] = msgspec.to_builtins({name: getattr(self, name) for name in names})
        return found


# ---------------------------------------------------------------- looking


def look_at_letters(root: Path, *, run_id: str | None = None, kind: LetterKind | None = None) -> list[Letter]:
    """Those of one run or all, of one kind or all, oldest first."""
    runs = [run for run in look_at_runs(root) if run_id in (None, run.run_id)]
    sources: dict[LetterKind, Callable[[], list[Letter]]] = {
        LetterKind.TRIGGER: lambda: _triggers(root),
        LetterKind.ROLLOUT: lambda: [letter for run in runs for letter in _rollouts(root, run)],
        LetterKind.MESSAGE: lambda: [letter for run in runs for letter in _messages(root, run)],
        LetterKind.DELIVERY: lambda: _deliveries(root),
    }
    found = [letter for name, source in sources.items() if kind in (None, name) for letter in source()]
    return sorted((one for one in found if run_id in (None, one.run_id)), key=lambda one: (one.dead_at, one.letter_id))


def choose_letter(letters: Sequence[Letter], letter_id: str) -> Letter:
    """The one of this id; raises `NotFound`."""
    for letter in letters:
        if letter.letter_id == letter_id:
            return letter
    raise NotFound(f"there is no dead letter {letter_id!r}; `turnmill dlq list` shows what there is")


def _triggers(root: Path) -> list[Letter]:
    found = [decode(item.value, DeadTrigger) for item in backend_of(root).look_at_records(TRIGGER_DEAD_LETTER_PREFIX)]
    return [
        Letter(
            letter_id=f"{LetterKind.TRIGGER}/{dead.name}",
            kind=LetterKind.TRIGGER,
            run_id=dead.run_id,
            dead_at=dead.dead_at,
            input={
                "bucket": dead.upload.bucket,
                "key": dead.upload.key,
                "version": dead.upload.version,
                "digest": dead.digest,
                "held_in": str(open_quarantine(root).folder_of(dead.place)) if dead.place else None,
            },
            error=dead.error,
            attempts=dead.attempts,
            versions=_versions(code=dead.code_version, config=dead.config),
            stored=dead,
        )
        for dead in found
    ]


def _rollouts(root: Path, run: Run) -> list[Letter]:
    prefix = dead_letter_key(run.run_id, "")
    found = [decode(item.value, DeadSample) for item in backend_of(root).reader(run.run_id).records(prefix, limit=-1)]
    return [
        Letter(
            letter_id=f"{LetterKind.ROLLOUT}/{run.run_id}/{dead.purpose}/{dead.sample_id}",
            kind=LetterKind.ROLLOUT,
            run_id=run.run_id,
            dead_at=dead.dead_at,
            input=msgspec.to_builtins(dead.request),
            error=dead.detail,
            attempts=dead.num_attempts,
            versions=_versions(code=dead.code_version, config=run.config, weights=_weights_of(root, dead)),
            stored=dead,
        )
        for dead in found
    ]


def _weights_of(root: Path, dead: DeadSample) -> str:
    """The version that its last recorded call was sampled by; "" where none was."""
    prefix = call_prefix(dead.run_id, dead.purpose, dead.sample_id)
    calls = [decode(item.value, Call) for item in backend_of(root).reader(dead.run_id).records(prefix, limit=-1)]
    return max(calls, key=lambda call: call.created_at).version if calls else ""


def _messages(root: Path, run: Run) -> list[Letter]:
    reader = backend_of(root).reader(run.run_id)
    return [
        Letter(
            letter_id=f"{LetterKind.MESSAGE}/{run.run_id}/{name}/{dead.letter_id}",
            kind=LetterKind.MESSAGE,
            run_id=run.run_id,
            dead_at=dead.dead_at,
            input={"queue": name, "group": dead.group, "body": _readable(dead.body)},
            error=f"received {dead.num_receives} times and never done: whoever received it died or gave it back",
            attempts=dead.num_receives,
            versions=_versions(config=run.config),
            stored=dead,
            queue=name,
        )
        for name in queues_of(run)
        for dead in reader.dead_letters(name)
    ]


def _readable(body: bytes) -> Any:
    """The value of a body that is JSON, else its text."""
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode("utf-8", "backslashreplace")


def _deliveries(root: Path) -> list[Letter]:
    found = [decode(item.value, DeadDelivery) for item in backend_of(root).look_at_records(DELIVERY_DEAD_LETTER_PREFIX)]
    return [
        Letter(
            letter_id=f"{LetterKind.DELIVERY}/{dead.alert.alert_id}.{dead.channel}.{dead.action}",
            kind=LetterKind.DELIVERY,
            run_id=dead.alert.run_id,
            dead_at=dead.dead_at,
            input={
                "alert": dead.alert.alert_id,
                "kind": dead.alert.kind.value,
                "summary": dead.alert.summary,
                "channel": dead.channel,
                "action": dead.action.value,
            },
            error=dead.error,
            attempts=dead.attempts,
            versions={},
            stored=dead,
        )
        for dead in found
    ]


def _versions(*, code: str = "", config: dict[str, Any], weights: str = "") -> dict[str, str]:
    known = {"code": code, "config": digest_of(encode(sorted(config.items()))) if config else "", "weights": weights}
    return {name: version for name, version in known.items() if version}


# ---------------------------------------------------------------- redriving


async def redrive(root: Path, letter: Letter) -> str:
    """Have it done once more; what happens now, for people. Raises `InvalidInput` where that can't be."""
    match letter.stored:
        case DeadTrigger():
            return await _redrive_trigger(root, letter.stored)
        case DeadDelivery():
            return await _redrive_delivery(root, letter.stored)
        case DeadSample():
            ports = backend_of(root).open_run(letter.stored.run_id, num_replicas=0)
            try:
                await redrive_sample(ports, letter.stored)
            finally:
                ports.close()
            return f"sample {letter.stored.sample_id} is played once more, without replay"
        case DeadLetter():
            await _with_queue(root, letter, lambda queue, letter_id: queue.redrive([letter_id]))
            return f"the message is in {letter.queue} again, never received"


async def _redrive_trigger(root: Path, dead: DeadTrigger) -> str:
    if dead.place is None:
        raise InvalidInput(f"nothing is left of {dead.upload.key}: upload the file again, and purge the dead letter")
    open_quarantine(root).put_back(dead.place, dead.upload.key)
    await _remove(root, dead.key)
    return f"{dead.upload.key} is uploaded again; `turnmill up` makes a run of it"


async def _redrive_delivery(root: Path, dead: DeadDelivery) -> str:
    records = backend_of(root).open_records()
    try:
        await Feed(records).redrive(dead)
    finally:
        records.close()
    return f"channel {dead.channel} is told again while `turnmill up` runs, or when it is started"


async def _with_queue(root: Path, letter: Letter, act: Callable[[Queue, str], Any]) -> None:
    """Do something with the dead letter of a queue; raises `NotFound` where it is gone."""
    assert letter.run_id is not None and letter.queue is not None and isinstance(letter.stored, DeadLetter)
    ports = _ports_with(root, letter.run_id, letter.queue)
    try:
        if not await act(_queue_of(ports, letter.queue), letter.stored.letter_id):
            raise NotFound(f"the dead letter {letter.letter_id} is gone: somebody else redrove or purged it")
    finally:
        ports.close()


def _ports_with(root: Path, run_id: str, queue: str) -> RunPorts:
    """The ports of a run, this queue among them."""
    if queue == GENERATE_REQUEST:
        return open_external_run(root, run_id)
    index = queue.removeprefix(f"{GENERATE_REQUEST}-")
    return backend_of(root).open_run(run_id, num_replicas=int(index) + 1 if index.isdecimal() else 0)


def _queue_of(ports: RunPorts, name: str) -> Queue:
    if name == GENERATE_REQUEST:
        return ports.generate_request[0]
    replicas = {f"{GENERATE_REQUEST}-{index}": queue for index, queue in enumerate(ports.generate_request)}
    queues = {
        "rollout_request": ports.rollout_request,
        "rollout_response": ports.rollout_response,
        "generate_response": ports.generate_response,
        **replicas,
    }
    return queues[name]


# ---------------------------------------------------------------- purging


async def purge(root: Path, letter: Letter) -> None:
    """Remove it for good, with what is held for it; raises `NotFound` where it is gone."""
    match letter.stored:
        case DeadTrigger():
            # The file first: a letter whose file is gone can still be purged.
            if letter.stored.place is not None:
                open_quarantine(root).discard(letter.stored.place)
            await _remove(root, letter.stored.key)
        case DeadDelivery():
            await _remove(root, letter.stored.key)
        case DeadSample():
            ports = backend_of(root).open_run(letter.stored.run_id, num_replicas=0)
            try:
                await ports.records.write([Write(key=letter.stored.key, value=None, expected=None)])
            finally:
                ports.close()
        case DeadLetter():
            await _with_queue(root, letter, lambda queue, letter_id: queue.discard([letter_id]))


async def _remove(root: Path, key: str) -> None:
    records = backend_of(root).open_records()
    try:
        await records.write([Write(key=key, value=None, expected=None)])
    finally:
        records.close()
