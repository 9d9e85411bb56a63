"""Checkpoints that outlive the machine: stored beside the folder, pruned like it, brought back where it is lost."""

import asyncio
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.contracts.aws_objects import bucket_of, open_clients, open_folders
from tests.unit.training.loop_bench import RUN_ID, Bench, ScriptedRollouts
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.folders import S3FolderStore
from turnmill.config import Config
from turnmill.records import Batch, BatchState, Version
from turnmill.training.checkpoint import Checkpoints, Manifest
from turnmill.training.keeper import Keeper
from turnmill.training.trainer import Trainer


@pytest.fixture
def clients(request: pytest.FixtureRequest) -> Iterator[AwsClients]:
    request.getfixturevalue("emulator")
    opened = open_clients()
    yield opened
    opened.close()


@pytest.fixture
def store(clients: AwsClients, tmp_path: Path) -> S3FolderStore:
    return open_folders(clients, tmp_path)


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", RUN_ID, keep=2)


def manifest(step: int, *, reward: float | None = None, incarnation: int = 1) -> Manifest:
    version = Version(incarnation=incarnation, n=step)
    return Manifest(
        run_id=RUN_ID,
        step=step,
        version=version,
        digest=f"d{version}",
        position=step,
        state_digest="s",
        reward_mean=reward,
    )


def batch(step: int, *, incarnation: int = 1) -> Batch:
    version = Version(incarnation=incarnation, n=step)
    return Batch(run_id=RUN_ID, step=step, groups=(), state=BatchState.APPLIED, version=version, digest=f"d{version}")


def save(checkpoints: Checkpoints, item: Manifest) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_text(item.digest)

    checkpoints.save(item, write)


async def test_what_is_saved_is_stored_and_pruned_as_the_folder_is(
    store: S3FolderStore, checkpoints: Checkpoints
) -> None:
    keeper = Keeper(store, checkpoints)
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2), (4, 0.3)):
        save(checkpoints, manifest(step, reward=reward))
        keeper.look()
        await asyncio.sleep(0)
    await keeper.finish()
    assert await store.names() == ["step-1-v1.1", "step-3-v1.3", "step-4-v1.4"]


async def test_a_lost_folder_gets_the_latest_checkpoint_on_the_way_back(
    store: S3FolderStore, checkpoints: Checkpoints
) -> None:
    keeper = Keeper(store, checkpoints)
    for step in (2, 4):
        save(checkpoints, manifest(step))
    keeper.look()
    await keeper.finish()
    shutil.rmtree(checkpoints.folder)
    # Step 4 was given up, and made again by another trainer.
    applied = [batch(1), batch(2), batch(3, incarnation=2), batch(4, incarnation=2)]
    await Keeper(store, checkpoints).bring_back(applied)
    assert checkpoints.stable() == [manifest(2)]
    assert (checkpoints.path(2) / "weights").read_text() == "d1.2"
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step-2"]


async def test_after_a_loss_the_store_keeps_what_the_folder_no_longer_has(
    store: S3FolderStore, checkpoints: Checkpoints
) -> None:
    keeper = Keeper(store, checkpoints)
    for step, reward in ((1, 0.9), (2, 0.1), (3, 0.2)):
        save(checkpoints, manifest(step, reward=reward))
    keeper.look()
    await keeper.finish()
    shutil.rmtree(checkpoints.folder)
    later = Keeper(store, checkpoints)
    await later.bring_back([batch(step) for step in (1, 2, 3)])
    save(checkpoints, manifest(4, reward=0.3))
    later.look()
    await later.finish()
    assert await store.names() == ["step-1-v1.1", "step-3-v1.3", "step-4-v1.4"]


async def test_steps_that_were_given_up_leave_the_store(store: S3FolderStore, checkpoints: Checkpoints) -> None:
    keeper = Keeper(store, checkpoints)
    for step in (2, 4):
        save(checkpoints, manifest(step))
    keeper.look()
    await keeper.finish()
    checkpoints.remove(4)
    save(checkpoints, manifest(3, incarnation=2))
    keeper.look()
    await keeper.finish()
    assert await store.names() == ["step-2-v1.2", "step-3-v2.3"]


async def test_a_folder_that_has_one_as_late_fetches_nothing(store: S3FolderStore, checkpoints: Checkpoints) -> None:
    save(checkpoints, manifest(2))
    keeper = Keeper(store, checkpoints)
    keeper.look()
    await keeper.finish()
    (checkpoints.path(2) / "weights").write_text("the folder's own")
    await keeper.bring_back([batch(1), batch(2)])
    assert (checkpoints.path(2) / "weights").read_text() == "the folder's own"


async def test_a_damaged_one_in_the_store_is_told_and_an_earlier_one_is_brought_back(
    store: S3FolderStore,
    checkpoints: Checkpoints,
    clients: AwsClients,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (1, 2):
        save(checkpoints, manifest(step))
    keeper = Keeper(store, checkpoints)
    keeper.look()
    await keeper.finish()
    shutil.rmtree(checkpoints.folder)
    bucket = bucket_of(clients, tmp_path)
    for item in clients.call_now("s3", "list_objects_v2", Bucket=bucket)["Contents"]:
        if "step-2-" in item["Key"] and item["Key"].endswith("/weights"):
            clients.call_now("s3", "put_object", Bucket=bucket, Key=item["Key"], Body=b"altered")
    with caplog.at_level(logging.ERROR):
        await Keeper(store, checkpoints).bring_back([batch(1), batch(2)])
    assert checkpoints.stable() == [manifest(1)]
    assert "step-2-v1.2 can't be brought back" in caplog.text


async def test_an_upload_that_fails_is_told_and_done_again_at_the_end(
    store: S3FolderStore,
    checkpoints: Checkpoints,
    clients: AwsClients,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = bucket_of(clients, tmp_path)
    clients.call_now("s3", "delete_bucket", Bucket=bucket)
    save(checkpoints, manifest(1))
    keeper = Keeper(store, checkpoints)
    with caplog.at_level(logging.ERROR):
        keeper.look()
        await asyncio.wait_for(keeper.finish(), 30)
    assert "are not all stored" in caplog.text
    clients.call_now("s3", "create_bucket", Bucket=bucket)
    keeper.look()
    await keeper.finish()
    assert await store.names() == ["step-1-v1.1"]


async def test_a_trainer_on_a_new_machine_goes_on_from_the_stored_checkpoint_to_the_same_bits(
    bench: Bench, rollouts: ScriptedRollouts, trainer_of: Callable[[Config], Trainer], store: S3FolderStore
) -> None:
    bench.ports = replace(bench.ports, checkpoints=store)
    await bench.train(rollouts, max_steps=4, save_steps=2)
    expected = {name: value.detach().clone() for name, value in bench.trainer.policy.model.named_parameters()}
    batches = await bench.batches()
    assert [name.partition("-v")[0] for name in await store.names()] == ["step-2", "step-4"]
    shutil.rmtree(bench.folder)

    bench.trainer = trainer_of(bench.config)
    await bench.train(rollouts, max_steps=4, save_steps=2)
    found = dict(bench.trainer.policy.model.named_parameters())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert bench.trainer.num_steps == 4 and await bench.batches() == batches
    assert sorted(path.name for path in bench.folder.iterdir()) == ["final", "step-4"]
