"""Evaluations as they are kept with a run: one blob each, with the result of each task."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from turnmill.errors import RecordCorrupt
from turnmill.evaluation import Evaluation, TaskResult, changes_of
from turnmill.records import TaskChange, decode
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import look_at_training

PREFIX = "evaluations/"
_BEFORE, _AFTER = "before", "after"


def evaluation_key(name: str) -> str:
    """Of the blob of an evaluation; one that is played again takes its place."""
    return f"{PREFIX}{name.replace(' ', '-')}.json"


@dataclass(frozen=True, kw_only=True)
class StoredEvaluation:
    """What an evaluation found, and when."""

    # before | after | eval | step N
    name: str
    # Optimizer steps that its weights had; None where the name says it: before and after all of them.
    step: int | None
    # Unix seconds.
    at: float
    # Figures, and by task id how each task went; see `evaluation.Evaluation`.
    found: dict[str, Any]

    @classmethod
    def of(cls, found: Evaluation, *, name: str, at: float, step: int | None = None) -> "StoredEvaluation":
        return cls(name=name, step=step, at=at, found=asdict(found))

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """By task id."""
        tasks: dict[str, dict[str, Any]] = self.found["tasks"]
        return tasks


async def read_evaluations(root: Path, run_id: str) -> list[StoredEvaluation]:
    """Those of a run: before training, by step, after it. Without those of steps that were given up.

    Raises `RecordCorrupt`.
    """
    training = look_at_training(root, run_id)
    ports = backend_of(root).open_run(run_id, num_replicas=0)
    found: list[StoredEvaluation] = []
    try:
        for blob in await ports.blobs.list(PREFIX):
            try:
                found.append(decode(await ports.blobs.get(blob.key), StoredEvaluation))
            except msgspec.DecodeError as error:
                raise RecordCorrupt(f"{blob.key} of run {run_id} holds no evaluation: {error}") from error
    finally:
        ports.close()
    return sorted((one for one in found if one.step is None or training is None or one.step <= training.step), key=_at)


def _at(one: StoredEvaluation) -> tuple[float, float]:
    place = {_BEFORE: -1.0, _AFTER: float("inf")}.get(one.name)
    return (place if place is not None else float(one.step or 0), one.at)


def change_by_task(found: Sequence[StoredEvaluation]) -> list[TaskChange]:
    """How each task went in the last evaluation against the first, those that lost most first; empty for one alone."""
    if len(found) < 2:
        return []
    first, last = ({name: TaskResult(**task) for name, task in one.tasks.items()} for one in (found[0], found[-1]))
    return sorted(changes_of(first, last), key=lambda change: (change.gain("solved"), change.gain("reward")))
