"""What must hold of a run when it is over, whatever was done to it: counted from its files by query."""

import json
import re
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.processes import read_records
from tests.faults.victim import Defect, Victim, listens, processes_of
from turnmill.backends.embedded import open_run
from turnmill.records import DeadSample, InvalidReason, Purpose, SampleState, dead_letter_key, decode
from turnmill.training.history import scan_all
from turnmill.weights import WEIGHTS_FILE, fingerprint
from turnmill.wiring.event_loop import run_loop

_ACCOUNTING = """
SELECT json_extract(cast(value AS text), '$.state'),
       json_extract(cast(value AS text), '$.drop_reason'),
       json_extract(cast(value AS text), '$.reason'),
       count(*)
FROM records WHERE key LIKE 'samples/%/train/%' GROUP BY 1, 2, 3
"""
_INFRA = f"{SampleState.INVALID}:{InvalidReason.INFRA}"
_TORCH_NAMES = {np.dtype(np.float32): "torch.float32", np.dtype(np.int64): "torch.int64"}


def accounting_of(folder: Path) -> dict[str, int]:
    """How many requests for training ended how, e.g. `dropped:no_signal`: one query on the run's samples."""
    connection = sqlite3.connect(f"file:{folder}/records/samples.db?mode=ro", uri=True)
    try:
        rows = connection.execute(_ACCOUNTING).fetchall()
    finally:
        connection.close()
    return {state if not (dropped or why) else f"{state}:{dropped or why}": num for state, dropped, why, num in rows}


def judge(victim: Victim, figures: dict[str, Any]) -> dict[str, int]:
    """The accounting of a run that succeeded; raises `Defect` with the first thing that does not hold."""
    if figures["status"] != "succeeded" or figures["steps"] != int(victim.parameters["max_steps"]):
        raise Defect(f"the run ended {figures['status']} after {figures['steps']} steps: {figures['error']}")
    counts = accounting_of(victim.folder)
    try:
        check_accounting(victim.root, figures)
        check_steps(victim.root, figures)
    except AssertionError as error:
        raise Defect(f"the accounting of run {victim.run_id} does not hold ({counts}): {error}") from error
    _check_requests(victim, figures, counts)
    _check_weights(victim, figures)
    check_gone(victim)
    return _with_dead_letters(victim, counts)


def _with_dead_letters(victim: Victim, counts: dict[str, int]) -> dict[str, int]:
    """The same counts, the samples apart that no attempt could end; raises `Defect` for a letter about another one."""
    samples, _ = read_records(victim.root, victim.run_id)
    failed = {sample.sample_id for sample in samples if sample.reason is InvalidReason.INFRA}
    letters = {letter.sample_id for letter in run_loop(_dead_letters(victim)) if letter.purpose is Purpose.TRAIN}
    if strangers := letters - failed:
        raise Defect(f"there are dead letters about samples that ended otherwise: {sorted(strangers)}")
    if letters:
        counts = {**counts, _INFRA: counts[_INFRA] - len(letters), f"{_INFRA}, dead letter": len(letters)}
    return {name: num for name, num in counts.items() if num}


async def _dead_letters(victim: Victim) -> list[DeadSample]:
    ports = open_run(victim.root, victim.run_id, num_replicas=1)
    try:
        prefix = dead_letter_key(victim.run_id, "")
        return [decode(item.value, DeadSample) for item in await scan_all(ports.records, prefix)]
    finally:
        ports.close()


def _check_requests(victim: Victim, figures: dict[str, Any], counts: dict[str, int]) -> None:
    """No request vanished: the numbers that a task's samples bear are gapless; none is open."""
    samples, _ = read_records(victim.root, figures["run_id"])
    numbers: dict[str, list[int]] = defaultdict(list)
    for sample in samples:
        numbers[sample.task_id].append(int(sample.sample_id.rpartition("_")[2]))
    gaps = {task: found for task, found in numbers.items() if sorted(found) != list(range(len(found)))}
    if gaps:
        raise Defect(f"samples are missing: {gaps}")
    ended = sum(num for name, num in counts.items() if name.partition(":")[0] in ("trained", "dropped", "invalid"))
    if ended != sum(counts.values()) or ended != len(samples):
        raise Defect(f"{len(samples)} samples were requested, but {ended} ended: {counts}")


def _check_weights(victim: Victim, figures: dict[str, Any]) -> None:
    """The final checkpoint holds the weights that the last batch was recorded with, and so does the pointer."""
    _, batches = read_records(victim.root, figures["run_id"])
    tensors = load_file(Path(figures["checkpoint"]) / WEIGHTS_FILE)
    found = fingerprint(
        (name, _TORCH_NAMES[array.dtype], tuple(array.shape), array.tobytes()) for name, array in tensors.items()
    )
    if found != batches[-1].digest:
        raise Defect(f"the final checkpoint holds {found}, the last batch made {batches[-1].digest}")
    if victim.version() != batches[-1].version:
        raise Defect(f"weights {victim.version()} are current, the last batch made {batches[-1].version}")
    metrics = [json.loads(line) for line in (victim.folder / "metrics.jsonl").read_text().splitlines()]
    if sorted({metric["step"] for metric in metrics}) != [batch.step for batch in batches]:
        raise Defect(f"{len(batches)} steps were made, but there are metrics of {len(metrics)}")


def check_gone(victim: Victim) -> None:
    """No process, port, pipe or temporary file of the run is left; raises `Defect`."""
    if alive := processes_of(victim.root):
        raise Defect(f"processes of the run are left: {alive}")
    if held := [port for port in victim.ports if listens(port)]:
        raise Defect(f"ports of the run are still served: {held}")
    left = [
        path.relative_to(victim.root)
        for path in victim.root.rglob("*")
        if path.is_fifo() or path.is_socket() or re.match(r"\..+|.*\.tmp$", path.name)
    ]
    if left:
        raise Defect(f"files are left: {', '.join(map(str, left))}")
