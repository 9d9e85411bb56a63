"""Which runs may be done again, as what, and that there is one retry at a time."""

import filecmp
import hashlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turnmill import assets
from turnmill.backends.embedded import open_root_records
from turnmill.config import Config, to_dict
from turnmill.errors import Conflict, InvalidInput
from turnmill.ports import Write
from turnmill.records import Run, RunStatus, StageRecord, decode, encode, run_key
from turnmill.wiring.reading.runs import look_at_run
from turnmill.wiring.running.retrying import claim, plan, queue

# No packages of environments are there.
ROOT = Path("no-deployment")


def failed_run(**changes: Any) -> Run:
    """The run of an upload that failed while it trained."""
    data = assets.wordle_data("train")
    report = {"path": str(data), "rows": 1, "digest": hashlib.sha256(data.read_bytes()).hexdigest()}
    values: dict[str, Any] = {
        "run_id": "r1",
        "cause": "test",
        "upload": "team/a.jsonl",
        "upload_version": "1-2-3",
        "status": RunStatus.FAILED,
        "created_at": time.time(),
        "config": to_dict(Config(lr=1e-3, max_steps=7)),
        "sources": {**dict.fromkeys(to_dict(Config()), "default"), "lr": "sidecar a.config.toml"},
        "data_path": str(data),
        "stages": (StageRecord(name="ValidateData", state="done", started_at=1.0, result={"data": report}),),
    }
    return Run(**{**values, **changes})


async def store(root: Path, run: Run) -> None:
    records = open_root_records(root)
    await records.write([Write(key=run.key, value=encode(run), expected=None)])
    records.close()


async def set_status(root: Path, run_id: str, status: RunStatus) -> None:
    records = open_root_records(root)
    (stored,) = await records.get([run_key(run_id)])
    assert stored is not None
    run = replace(decode(stored.value, Run), status=status)
    await records.write([Write(key=run.key, value=encode(run), expected=stored.version)])
    records.close()


def test_a_retry_has_the_parameters_of_the_run_but_for_those_given_anew(tmp_path: Path) -> None:
    file = tmp_path / "more.toml"
    file.write_text("seed = 5\n")
    order = plan(ROOT, failed_run(), file=file, flags={"max_steps": "9"})
    config, sources = order.resolved.config, order.resolved.sources
    assert (config.lr, config.max_steps, config.seed) == (1e-3, 9, 5)
    assert (sources["lr"], sources["max_steps"]) == ("sidecar a.config.toml", "--max-steps")
    assert str(order.data) == failed_run().data_path


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"status": RunStatus.QUEUED}, "waits for its turn"),
        ({"status": RunStatus.ACTIVE}, "turnmill cancel r1"),
        ({"status": RunStatus.SUCCEEDED}, "turnmill run"),
        ({"status": RunStatus.DUPLICATE, "duplicate_of": "r0"}, "duplicate of run r0"),
        ({"status": RunStatus.ACTIVE, "pid": 1, "pid_began": 0}, "turnmill resume r1"),
        ({"refused": "lr is wrong"}, "turnmill dlq redrive trigger/r1"),
    ],
)
def test_only_a_run_that_came_to_nothing_is_retried(changes: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidInput, match=hint):
        plan(ROOT, failed_run(**changes), file=None, flags={})


async def test_a_retry_beyond_a_ceiling_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text("[ceilings]\ngenerated_tokens = 5000\n")
    run = failed_run()
    await store(tmp_path, run)
    with pytest.raises(InvalidInput, match=r"budget_tokens = 5001 \(--budget-tokens\) is more than"):
        await claim(tmp_path, run, plan(ROOT, run, file=None, flags={"budget_tokens": "5001"}))
    assert look_at_run(tmp_path, "r1").retried_as is None


def test_data_that_was_changed_is_not_what_is_retried(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(assets.wordle_data("train").read_bytes()[:-1])
    report = {"path": str(data), "rows": 1, "digest": "another"}
    stages = (StageRecord(name="ValidateData", state="done", started_at=1.0, result={"data": report}),)
    with pytest.raises(InvalidInput, match="has changed since the run began"):
        plan(ROOT, failed_run(data_path=str(data), stages=stages), file=None, flags={})


async def test_a_retry_is_queued_with_a_copy_of_the_data_and_both_runs_tell_of_it(tmp_path: Path) -> None:
    run = failed_run()
    await store(tmp_path, run)
    again = await queue(tmp_path, await claim(tmp_path, run, plan(ROOT, run, file=None, flags={})))
    assert (again.status, again.retry_of, again.cause) == (RunStatus.QUEUED, "r1", "retry/r1/1")
    assert (again.upload, again.upload_version, again.config) == ("team/a.jsonl", None, run.config)
    copy = Path(str(again.data_path))
    assert copy.is_relative_to(tmp_path / "runs" / again.run_id)
    assert filecmp.cmp(copy, str(run.data_path), shallow=False)
    assert look_at_run(tmp_path, "r1").retried_as == again.run_id
    assert look_at_run(tmp_path, "r1").status is RunStatus.FAILED


async def test_there_is_one_retry_at_a_time_and_its_number_goes_up(tmp_path: Path) -> None:
    run = failed_run()
    await store(tmp_path, run)
    order = plan(ROOT, run, file=None, flags={})
    first = await queue(tmp_path, await claim(tmp_path, run, order))
    for status in (RunStatus.QUEUED, RunStatus.ACTIVE):
        await set_status(tmp_path, first.run_id, status)
        with pytest.raises(InvalidInput, match=f"is retried as {first.run_id} already"):
            await claim(tmp_path, run, order)
    await set_status(tmp_path, first.run_id, RunStatus.FAILED)
    second = await queue(tmp_path, await claim(tmp_path, run, order))
    assert second.cause == "retry/r1/2" and second.run_id != first.run_id
    await set_status(tmp_path, second.run_id, RunStatus.SUCCEEDED)
    with pytest.raises(InvalidInput, match="which has succeeded"):
        await claim(tmp_path, run, order)


async def test_a_claim_whose_run_was_never_made_is_taken_up_and_two_at_a_time_make_one_run(tmp_path: Path) -> None:
    run = failed_run()
    await store(tmp_path, run)
    order = plan(ROOT, run, file=None, flags={})
    killed, other = await claim(tmp_path, run, order), await claim(tmp_path, run, order)
    assert killed.origin == other.origin
    await queue(tmp_path, killed)
    with pytest.raises(Conflict, match="changed by another process"):
        await queue(tmp_path, other)
