"""A model that was published to S3 is served, and talked to, from a copy of it."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from tests.contracts.published import MODEL, weights_in
from turnmill.backends.aws.backend import clients_of
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.errors import NotFound
from turnmill.records import Version
from turnmill.wiring.backend import backend_of, choose
from turnmill.wiring.serving import find_model


@pytest.fixture
def root(emulator: Emulator, tmp_path: Path) -> Path:
    """The folder of a deployment that is there."""
    settings = emulator.settings(f"t-{os.urandom(4).hex()}")
    asyncio.run(deploy_deployment(clients_of(settings), settings, lambda _: None))
    folder = tmp_path / "root"
    folder.mkdir()
    (folder / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{settings.name}"\n')
    choose(folder, flag=None, is_local=True, environ={})
    return folder


def publish(root: Path, source: Path, n: int, content: bytes) -> None:
    models = backend_of(root).open_run("r1", num_replicas=1).models
    model = replace(MODEL, version=Version(incarnation=1, n=n))
    asyncio.run(models.publish(model, weights_in(source, content), {}))


def test_the_latest_version_is_downloaded_once(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="'r1' is no run in"):
        find_model(root, "r1")
    publish(root, tmp_path / "second", 2, b"of step 2")
    publish(root, tmp_path / "tenth", 10, b"of step 10")
    found = find_model(root, "r1")
    assert found.folder == root / "bucket" / "models" / "r1" / "1.10"
    assert (found.folder / "model.safetensors").read_bytes() == b"of step 10"
    assert (found.folder / "tokenizer" / "vocab.json").is_file()
    written = (found.folder / "model.safetensors").stat().st_mtime_ns
    assert (find_model(root, "r1").folder / "model.safetensors").stat().st_mtime_ns == written
    assert [path.name for path in found.folder.parent.iterdir()] == ["1.10"]


def test_a_folder_with_a_model_comes_before_what_was_published(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(root, tmp_path / "source", 2, b"published")
    weights_in(tmp_path / "r1", b"of mine")
    monkeypatch.chdir(tmp_path)
    assert find_model(root, "r1").folder == tmp_path / "r1"
    assert not (root / "bucket").exists()
