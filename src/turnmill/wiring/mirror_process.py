"""Mirrors runs to MLflow, in a process of its own: `python -m turnmill.wiring.mirror_process ROOT [RUN]`.

    records of a run -> what MLflow does not have yet -> MLflow -> ROOT/runs/<run>/mlflow.json says how far it has come

Reads what everybody may read and leaves no trace in it, so nothing that happens to MLflow or to this process can hold
up a run: what could not be sent is sent later, by this process or, after its end, by that of the next `turnmill up`.
Ends when its standard input does (control is gone or done), having sent the rest if that is possible soon.
"""

import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turnmill.alerts import Redactor
from turnmill.backends.embedded.files import write_atomically
from turnmill.backends.mlflow import MlflowRuns
from turnmill.config.deployment import MlflowStore, load_deployment
from turnmill.pipeline.card import CARD, LINEAGE
from turnmill.records import Metric, Run, RunStatus
from turnmill.telemetry import configure_logging
from turnmill.wiring.backend import remote_of
from turnmill.wiring.reading.runs import SeenSteps, look_at_runs
from turnmill.wiring.variables import log_format

logger = logging.getLogger(__name__)

STATE_FILE = "mlflow.json"
# Between two looks; after a failure, doubling up to the longest.
_LOOK_S, _LONGEST_PAUSE_S = 2.0, 60.0
# How long what is left may take when control ends.
LAST_S = 8.0
_STATUSES = {
    RunStatus.SUCCEEDED: "FINISHED",
    RunStatus.DUPLICATE: "FINISHED",
    RunStatus.FAILED: "FAILED",
    RunStatus.INTERRUPTED: "FAILED",
    RunStatus.CANCELLED: "KILLED",
}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """How much of a run MLflow has."""

    mlflow_id: str | None = None
    is_described: bool = False
    # For each run of steps: first, last, incarnation of their batches. A step given up and made again has another one.
    steps: tuple[tuple[int, int, int], ...] = ()
    # Evaluations, by name.
    evaluations: tuple[str, ...] = ()
    # What was told as the run's status last; with all that belongs to it.
    status: str | None = None

    def has(self, metric: Metric) -> bool:
        """Whether this very step was sent."""
        return any(first <= metric.step <= last and metric.incarnation == made for first, last, made in self.steps)

    def with_step(self, metric: Metric) -> "Sent":
        """With this step, in the place of an earlier one of its number."""
        kept: list[tuple[int, int, int]] = []
        for first, last, made in self.steps:
            # All later steps were given up with it.
            if first < metric.step:
                kept.append((first, min(last, metric.step - 1), made))
        if kept and kept[-1][1:] == (metric.step - 1, metric.incarnation):
            kept[-1] = (kept[-1][0], metric.step, metric.incarnation)
        else:
            kept.append((metric.step, metric.step, metric.incarnation))
        return replace(self, steps=tuple(kept))


class Mirror:
    """Mirrors one run, or all of a deployment that go on or were not mirrored to their end."""

    def __init__(
        self, root: Path, run_id: str | None, store: MlflowStore, open_store: Callable[[], MlflowRuns]
    ) -> None:
        """`open_store` is called when there is something to send first."""
        self._root = root
        self._run_id = run_id
        self._open_store = open_store
        self._store: MlflowRuns | None = None
        self._redact = Redactor([store.tracking_uri] if "@" in store.tracking_uri else [])
        self._began_at = time.time()
        self._steps: dict[str, SeenSteps] = {}
        # By run id: what it was like when all of it had been sent.
        self._done: dict[str, tuple[object, ...]] = {}
        # Runs that have ended and are mirrored to their end, with how they ended.
        self._ended: dict[str, str] = {}
        # Runs that could not be sent the last time, by id.
        self._failed: set[str] = set()
        # Told once, until it works again.
        self._trouble: str | None = None
        self._num_failures = 0

    def follow(self, ended: threading.Event) -> None:
        """Until `ended`, and what is left then, for a while."""
        give_up = None
        while True:
            is_last = ended.is_set()
            give_up = give_up or (time.monotonic() + LAST_S if is_last else None)
            is_sent = self.look()
            if give_up is not None and (is_sent or time.monotonic() >= give_up):
                if is_last and not is_sent:
                    logger.warning("MLflow does not have all yet; the next `turnmill up` sends what is left")
                if is_last:
                    return
            pause_s = min(_LOOK_S * 2**self._num_failures, _LONGEST_PAUSE_S) * random.uniform(0.75, 1.0)
            if is_last:
                time.sleep(min(pause_s, 1.0))
            else:
                ended.wait(pause_s)

    def look(self) -> bool:
        """Send what is new; False if something could not be sent."""
        run_id = None
        try:
            # What is wrong may be the run's own, and must not hold up the others: those that failed come last.
            for run in sorted(self._runs(), key=lambda run: run.run_id in self._failed):
                run_id = run.run_id
                self._send(run)
                self._failed.discard(run_id)
        except Exception as error:
            # The supervision boundary: whatever MLflow, its plug-ins and their transports raise is no defect of a run.
            self._num_failures += 1
            if run_id is not None:
                self._failed.add(run_id)
            text = self._redact(f"{type(error).__name__}: {error}")[:500]
            if self._trouble is None:
                logger.warning("MLflow can't be told, and is tried again until it can: %s", text)
            self._trouble = text
            return False
        if self._trouble is not None:
            logger.info("MLflow can be told again; it has everything up to now")
        self._trouble, self._num_failures = None, 0
        return True

    def _runs(self) -> list[Run]:
        if self._run_id is not None:
            return [run for run in look_at_runs(self._root) if run.run_id == self._run_id]
        return [run for run in look_at_runs(self._root) if self._is_ours(run)]

    def _is_ours(self, run: Run) -> bool:
        if not run.stages or self._ended.get(run.run_id) == _told(run):
            return False
        # Control has just started, and goes on with it.
        if run.status is RunStatus.INTERRUPTED and run.upload is not None:
            return False
        path = self._root / "runs" / run.run_id / STATE_FILE
        if path.exists():
            if run.status.is_final and _decoded(path).status == _told(run):
                self._ended[run.run_id] = _told(run)
            return run.run_id not in self._ended
        # Those that ended before anybody wanted them mirrored stay where they are.
        return run.status is RunStatus.ACTIVE or (run.ended_at or 0.0) >= self._began_at

    # ------------------------------------------------------------ one run

    def _send(self, run: Run) -> None:
        steps = self._steps.setdefault(run.run_id, SeenSteps(self._root, run.run_id, first=0)).look()
        mark = (*_mark_of(run), len(steps), steps[-1:])
        if self._done.get(run.run_id) == mark:
            return
        path = self._root / "runs" / run.run_id / STATE_FILE
        if path.exists():
            sent = _decoded(path)
        else:
            # Before the first attempt: so that it is found later, if there is nobody to be told now.
            sent = Sent()
            _save(path, sent)
        if self._store is None:
            self._store = self._open_store()
        # What was sent before this process may not have been written down.
        unsure = self._done.pop(run.run_id, None) is None
        for step in (self._ensure, self._describe, self._log_steps, self._log_evaluations, self._conclude):
            after = step(self._store, run, steps, sent, unsure)
            if after != sent:
                _save(path, after)
            sent = after
        self._done[run.run_id] = mark

    def _ensure(self, store: MlflowRuns, run: Run, _: list[Metric], sent: Sent, unsure: bool) -> Sent:
        """With an id of a run that is there; one that somebody deleted is made and filled anew."""
        if sent.mlflow_id is not None and (not unsure or store.is_there(sent.mlflow_id)):
            return sent
        return Sent(mlflow_id=store.find_or_create(run.run_id, run.created_at))

    def _describe(self, store: MlflowRuns, run: Run, _: list[Metric], sent: Sent, __: bool) -> Sent:
        if sent.is_described:
            return sent
        tags = {f"turnmill.source.{name}": source for name, source in run.sources.items() if source != "default"}
        tags |= {"turnmill.kind": run.kind, "turnmill.upload": run.upload or ""}
        store.describe(str(sent.mlflow_id), params=run.config, tags={name: text for name, text in tags.items() if text})
        return replace(sent, is_described=True)

    def _log_steps(self, store: MlflowRuns, run: Run, steps: list[Metric], sent: Sent, unsure: bool) -> Sent:
        left = [metric for metric in steps if not sent.has(metric)]
        if not left:
            return sent
        if sent.steps and left[0].step <= sent.steps[-1][1]:
            # MLflow forgets no value: the later one of a step counts, and this tells where that is so.
            store.describe(str(sent.mlflow_id), params={}, tags={"turnmill.resumed_from": str(left[0].step - 1)})
        store.log(str(sent.mlflow_id), left, unsure=unsure)
        for metric in left:
            sent = sent.with_step(metric)
        return sent

    def _log_evaluations(self, store: MlflowRuns, run: Run, steps: list[Metric], sent: Sent, _: bool) -> Sent:
        """`eval/<name>/<figure>`: before training at step 0, after it at the last one."""
        for stage in run.current_stages:
            if stage.name != "Evaluate" or stage.ended_at is None:
                continue
            for name, found in stage.result.items():
                if name in sent.evaluations or not isinstance(found, dict):
                    continue
                values = {f"eval/{name}/{key}": float(value) for key, value in found.items() if _is_number(value)}
                step = steps[-1].step if steps and name != "before" else 0
                metric = Metric(run_id=run.run_id, step=step, time=stage.ended_at, values=values)
                store.log(str(sent.mlflow_id), [metric], unsure=True)
                sent = replace(sent, evaluations=(*sent.evaluations, name))
        return sent

    def _conclude(self, store: MlflowRuns, run: Run, _: list[Metric], sent: Sent, __: bool) -> Sent:
        """The status, and what is to be kept of a run that has ended."""
        told = _told(run)
        if sent.status == told:
            return sent
        mlflow_id = str(sent.mlflow_id)
        store.describe(mlflow_id, params={}, tags={"turnmill.status": run.status})
        if run.status not in _STATUSES:
            store.set_status(mlflow_id, "RUNNING", None)
            return replace(sent, status=told)
        store.set_status(mlflow_id, _STATUSES[run.status], run.ended_at or time.time())
        store.keep(mlflow_id, "turnmill/config.json", {"config": run.config, "sources": run.sources})
        store.keep(mlflow_id, "turnmill/run.json", _public(run))
        for name, content in _documents_of(self._root, run).items():
            store.keep(mlflow_id, f"turnmill/{name}", content.decode(errors="replace"))
        return replace(sent, status=told)


def _told(run: Run) -> str:
    """Its status; of each attempt another one."""
    return f"{run.status}/{run.attempt}"


def _mark_of(run: Run) -> tuple[object, ...]:
    """Another one when something of its record changed that is mirrored."""
    return run.status, run.attempt, tuple((stage.name, stage.state) for stage in run.current_stages)


def _public(run: Run) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "worker_token_hash"}


def _documents_of(root: Path, run: Run) -> dict[str, bytes]:
    """Card and lineage of the model that the run published; none where it published none, or it was removed since."""
    published = next((stage.result for stage in run.current_stages if stage.name == "Publish"), {})
    location = published.get("location")
    if not location:
        return {}
    if (remote := remote_of(root)) is not None:
        found = {name: remote.model_document(location, name) for name in (CARD, LINEAGE)}
    else:
        paths = {name: Path(location) / name for name in (CARD, LINEAGE)}
        found = {name: path.read_bytes() if path.is_file() else None for name, path in paths.items()}
    return {name: content for name, content in found.items() if content is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decoded(path: Path) -> Sent:
    """Where the file is damaged, as if nothing had been sent: MLflow is asked what it has then."""
    try:
        fields = json.loads(path.read_bytes())
        steps = tuple((first, last, made) for first, last, made in fields.pop("steps"))
        return Sent(steps=steps, evaluations=tuple(fields.pop("evaluations")), **fields)
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged: %s", path, error)
        return Sent()


def _save(path: Path, sent: Sent) -> None:
    # A run may be cleaned up meanwhile: nothing of it must come back.
    if path.parent.is_dir():
        write_atomically(path, json.dumps(asdict(sent)).encode())


def main() -> None:
    """Mirror until standard input ends."""
    root, run_id = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    configure_logging("mlflow", run_id=run_id, form=log_format())
    for noisy in ("mlflow", "urllib3"):
        # What they warn of is told once, by ourselves.
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # Training goes first.
    os.nice(10)
    ended = threading.Event()

    def wait_for_end() -> None:
        # Not through `sys.stdin`, whose lock this thread would hold when the process ends.
        while os.read(0, 4096):
            pass
        ended.set()

    threading.Thread(target=wait_for_end, name="wait for the end of control", daemon=True).start()
    store = load_deployment(root, os.environ).mlflow
    if store is None:
        return
    Mirror(root, run_id, store, lambda: MlflowRuns(store.tracking_uri, store.experiment)).follow(ended)


if __name__ == "__main__":
    main()
