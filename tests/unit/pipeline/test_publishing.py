"""Publishing: one version that never changes, whoever is killed when; a card that says where it comes from."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.pipeline.publishing_child import CONFIG, EVALUATIONS, VERSION, WORSE, opened, prepare, publish
from turnmill import failpoints
from turnmill.backends.embedded import open_root_records
from turnmill.backends.embedded.models import MANIFEST
from turnmill.errors import RecordCorrupt, VersionConflict
from turnmill.pipeline.card import card_of
from turnmill.pipeline.engine import RunRecord
from turnmill.pipeline.publishing import point_to_latest, poll_publish, start_publish
from turnmill.pipeline.stage import Running
from turnmill.records import LatestModel, PublishedModel, StageRecord, decode, latest_model_key

REPOSITORY = Path(__file__).parents[3]


async def latest(root: Path) -> LatestModel | None:
    runs = open_root_records(root)
    (stored,) = await runs.get([latest_model_key("wordle", "wordle-tiny")])
    runs.close()
    return decode(stored.value, LatestModel) if stored else None


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_a_model_is_published_whole_with_its_digests_its_card_and_its_lineage(tmp_path: Path) -> None:
    checkpoint = await prepare(tmp_path)
    result = await publish(tmp_path)
    folder = tmp_path / "bucket" / "models" / "r1" / "1.2"
    assert (result["model"], result["location"]) == ("r1/1.2", str(folder))
    assert result["promotion"]["is_published"] and result["promotion"]["difference"] == pytest.approx(0.5)
    found = content(folder)
    assert {name: found[name] for name in content(checkpoint)} == content(checkpoint)
    manifest = decode(found.pop(MANIFEST), PublishedModel)
    assert {name: file.sha256 for name, file in manifest.files.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in found.items()
    }
    assert (manifest.version, manifest.digest) == (VERSION, "fingerprint of weights")
    lineage = json.loads(found["lineage.json"])
    assert lineage["run"] == {
        "cause": "bucket/tasks.jsonl@1",
        "upload": "tasks.jsonl",
        "earlier_run": "r0",
        "content_id": None,
        "num_attempts": 1,
        "created_at": "1970-01-01T00:00:01+00:00",
    }
    assert lineage["training"] == {"steps": 2, "rewards": [[1, 0.25], [2, 0.5]]}, "without a step that was given up"
    assert lineage["evaluations"] == EVALUATIONS and lineage["parameters"]["max_steps"]["source"] == "--max-steps"
    pointer = await latest(tmp_path)
    assert pointer is not None and (pointer.run_id, pointer.digest) == ("r1", "fingerprint of weights")


async def test_the_card_holds_the_figures(tmp_path: Path) -> None:
    await prepare(tmp_path)
    card = (Path((await publish(tmp_path))["location"]) / "README.md").read_text()
    for line in (
        'base_model: "wordle-tiny"',
        "# r1/1.2",
        "| baseline, tasks of the training data | 0.125 | 0.065 to 0.228 | 0.125 | 64 | 16 |",
        "| held-out, before training | 0.200 | 0.080 to 0.320 | 0.200 | 50 | 50 |",
        "| held-out, after training | 0.700 | 0.580 to 0.820 | 0.700 | 50 | 50 |",
        "| 2 | 0.500 |",
        f"| data | tasks\\|1.jsonl | 150 | {'d' * 64} |",
        "| weights fingerprint | fingerprint of weights |",
        "| earlier run with the same content | r0 |",
        "| max_steps | 2 | --max-steps |",
    ):
        assert line in card.splitlines(), line
    assert "Published by the rule `not_worse`: better than its base on held-out tasks: +0.500 (95 % interval" in card


async def test_the_card_says_that_an_adapter_was_merged(tmp_path: Path) -> None:
    await prepare(tmp_path)
    lineage = json.loads((Path((await publish(tmp_path))["location"]) / "lineage.json").read_text())
    assert "LoRA" not in card_of(lineage)
    lineage["parameters"]["training_method"]["value"] = "RFT_MULTITURN_LORA"
    assert "a LoRA adapter of rank 32 (alpha 32): these weights are the base model's with the" in card_of(lineage)


@pytest.mark.parametrize("point", ["model-copied", "model-published", "model-pointed"])
async def test_killed_at_any_moment_and_published_again_there_is_one_version(tmp_path: Path, point: str) -> None:
    await prepare(tmp_path)
    armed = tmp_path / "failpoints"
    armed.mkdir()
    (armed / point).touch()

    def child() -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "tests.unit.pipeline.publishing_child", str(tmp_path)],
            env={**os.environ, failpoints.VARIABLE: str(armed)},
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=False,
        )

    killed = child()
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    folder = tmp_path / "bucket" / "models" / "r1"
    before = content(folder / "1.2")
    assert bool(before) is (point != "model-copied"), "never a part of it"
    again = child()
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["location"] == str(folder / "1.2")
    assert [path.name for path in folder.iterdir()] == ["1.2"], "nothing is left aside"
    if before:
        assert content(folder / "1.2") == before
    assert child().returncode == 0
    pointer = await latest(tmp_path)
    assert pointer is not None and pointer.version == VERSION


async def test_what_is_published_stays_whatever_is_measured_afterwards(tmp_path: Path) -> None:
    await prepare(tmp_path)
    first = await publish(tmp_path)
    runs = open_root_records(tmp_path)
    record = await RunRecord.open(runs, "r1")
    await record.stage(StageRecord(name="Evaluate", state="done", started_at=3.0, result=WORSE))
    runs.close()
    assert await publish(tmp_path) == first


async def test_a_model_that_got_worse_is_held(tmp_path: Path) -> None:
    await prepare(tmp_path, evaluations=WORSE)
    result = await publish(tmp_path)
    assert (result["model"], result["location"]) == (None, None)
    assert not result["promotion"]["is_published"] and result["promotion"]["reason"].startswith("worse than its base")
    assert not (tmp_path / "bucket").exists() and await latest(tmp_path) is None
    forced = await publish(tmp_path, config=replace(CONFIG, promotion="always"))
    assert forced["model"] == "r1/1.2"


async def test_the_latest_model_is_the_one_that_was_published_last(tmp_path: Path) -> None:
    await prepare(tmp_path, "r1")
    await prepare(tmp_path, "r2", content=b"others")
    await publish(tmp_path, "r1")
    await publish(tmp_path, "r2")
    # The first one's control process was killed before its run ended, and does it again.
    await publish(tmp_path, "r1")
    pointer = await latest(tmp_path)
    assert pointer is not None and pointer.run_id == "r2"
    async with opened(tmp_path, "r1") as ctx:
        stored = await ctx.ports.models.find("r1", VERSION)
        assert stored is not None
        await point_to_latest(ctx.ports.runs, replace(stored.model, base_model="another"))
    pointer = await latest(tmp_path)
    assert pointer is not None and pointer.run_id == "r2", "each base model has its own"


async def test_other_weights_are_never_published_under_the_same_name(tmp_path: Path) -> None:
    checkpoint = await prepare(tmp_path)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"digest": "of something else"}))
    with pytest.raises(RecordCorrupt, match=r"expected that of weights 1\.2, found of something else"):
        await publish(tmp_path)
    (checkpoint / "checkpoint.json").write_text("{")
    with pytest.raises(RecordCorrupt, match="does not describe the final checkpoint"):
        await publish(tmp_path)
    (checkpoint / "checkpoint.json").write_text(json.dumps({"digest": "fingerprint of weights"}))
    await publish(tmp_path)
    async with opened(tmp_path) as ctx:
        stored = await ctx.ports.models.find("r1", VERSION)
        assert stored is not None
        with pytest.raises(VersionConflict, match=r"r1/1\.2 was published before with weights fingerprint of weights"):
            await ctx.ports.models.publish(replace(stored.model, digest="other"), checkpoint, {})
    (Path(stored.location) / MANIFEST).write_text("{")
    async with opened(tmp_path) as ctx:
        with pytest.raises(RecordCorrupt, match="does not describe a model"):
            await ctx.ports.models.find("r1", VERSION)


async def test_publishing_that_is_given_up_leaves_nothing_and_publishes_nothing_later(tmp_path: Path) -> None:
    """A cancelled run must not have its model published by a thread that goes on copying."""
    await prepare(tmp_path)
    async with opened(tmp_path) as ctx:
        source = tmp_path / "runs" / "r1" / "checkpoints" / "final"
        # Larger than what is copied in a moment.
        with (source / "model.safetensors").open("ab") as file:
            file.truncate(600 * 2**20)
        await start_publish(ctx)
        polled = await poll_publish(ctx, {})
        assert isinstance(polled, Running) and polled.detail == "copying the model"
        await ctx.background.close()
        # Until the thread has ended.
        await asyncio.get_running_loop().shutdown_default_executor()
    assert list((tmp_path / "bucket" / "models" / "r1").iterdir()) == []


async def test_the_card_tells_what_several_rollouts_are_worth_and_which_tasks_went_worse(tmp_path: Path) -> None:
    estimates = {"1": {"value": 0.2, "low": 0.1, "high": 0.3}, "2": {"value": 0.4, "low": 0.25, "high": 0.5}}
    several = {"pass_at": estimates, "pass_hat": estimates}
    task = {"task_id": "t|1", "num_before": 4, "num_after": 4, "solved_before": 3, "solved_after": 0}
    comparison = {
        "reward": {"value": 0.5, "low": 0.4, "high": 0.6},
        "num_better": 40,
        "num_same": 0,
        "num_worse": 25,
        "worse": [{**task, "reward_before": 0.75, "reward_after": 0.0}],
    }
    before, after = {**EVALUATIONS["before"], **several}, {**EVALUATIONS["after"], **several, "comparison": comparison}
    await prepare(tmp_path, evaluations={"before": before, "after": after})
    folder = Path((await publish(tmp_path))["location"])
    card = (folder / "README.md").read_text()
    for line in (
        "| pass@2 | 0.400 (0.250 to 0.500) | 0.400 (0.250 to 0.500) |",
        "| pass^2 | 0.400 (0.250 to 0.500) | 0.400 (0.250 to 0.500) |",
        "25 held-out tasks went worse and 40 better; the 1 that lost most:",
        "| t\\|1 | 3 of 4 | 0 of 4 | 0.750 | 0.000 |",
    ):
        assert line in card.splitlines(), line
    assert json.loads((folder / "lineage.json").read_text())["promotion"]["worse"][0]["task_id"] == "t|1"
    manifest = decode((folder / MANIFEST).read_bytes(), PublishedModel)
    assert (manifest.promotion.num_worse, manifest.promotion.worse[0].solved_before) == (25, 3)
