"""What every store of published models keeps."""

import asyncio
import hashlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.contracts.published import MODEL, weights_in
from turnmill.errors import NotFound, VersionConflict
from turnmill.failpoints import VARIABLE
from turnmill.ports import ModelStore
from turnmill.records import ModelFile, Version

Open = Callable[[], ModelStore]
Child = Callable[..., list[str]]
DOCUMENTS = {"README.md": b"a card", "lineage.json": b"{}"}


def described(content: bytes) -> ModelFile:
    return ModelFile(sha256=hashlib.sha256(content).hexdigest(), num_bytes=len(content))


async def test_a_model_is_found_as_it_was_published_with_the_digest_of_each_file(
    open_models: Open, tmp_path: Path
) -> None:
    published = await open_models().publish(MODEL, weights_in(tmp_path / "source"), DOCUMENTS)
    assert replace(published.model, files={}) == MODEL
    assert published.model.files == {
        "README.md": described(b"a card"),
        "config.json": described(b"{}"),
        "lineage.json": described(b"{}"),
        "model.safetensors": described(b"weights"),
        "tokenizer/vocab.json": described(b"[]"),
    }
    assert published.location
    assert await open_models().find("r1", MODEL.version) == published


async def test_what_was_not_published_is_not_found(open_models: Open, tmp_path: Path) -> None:
    models = open_models()
    assert await models.find("r1", MODEL.version) is None
    await models.publish(MODEL, weights_in(tmp_path / "source"), {})
    assert await models.find("r1", Version(incarnation=2, n=7)) is None
    assert await models.find("r2", MODEL.version) is None


async def test_a_document_takes_the_place_of_a_file_of_its_name(open_models: Open, tmp_path: Path) -> None:
    stored = await open_models().publish(MODEL, weights_in(tmp_path / "source"), {"config.json": b"other"})
    assert stored.model.files["config.json"] == described(b"other")


async def test_the_first_publication_stands(open_models: Open, tmp_path: Path) -> None:
    models = open_models()
    first = await models.publish(MODEL, weights_in(tmp_path / "source"), DOCUMENTS)
    later = replace(MODEL, published_at=9.0)
    assert await models.publish(later, weights_in(tmp_path / "again", b"other"), {"README.md": b"new"}) == first
    assert await models.find("r1", MODEL.version) == first


async def test_other_weights_under_the_same_version_are_a_conflict(open_models: Open, tmp_path: Path) -> None:
    models = open_models()
    first = await models.publish(MODEL, weights_in(tmp_path / "source"), DOCUMENTS)
    with pytest.raises(VersionConflict, match=r"r1/1\.7 .*dddd"):
        await models.publish(replace(MODEL, digest="e" * 32), weights_in(tmp_path / "again", b"other"), {})
    assert await models.find("r1", MODEL.version) == first


async def test_versions_and_runs_do_not_touch_each_other(open_models: Open, tmp_path: Path) -> None:
    models = open_models()
    others = [replace(MODEL, version=Version(incarnation=1, n=70)), replace(MODEL, run_id="r10")]
    source = weights_in(tmp_path / "source")
    stored = await asyncio.gather(*(models.publish(model, source, DOCUMENTS) for model in (MODEL, *others)))
    for model, one in zip((MODEL, *others), stored, strict=True):
        assert await models.find(model.run_id, model.version) == one
    assert len({one.location for one in stored}) == 3


async def test_a_source_that_is_not_there_is_no_model(open_models: Open, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        await open_models().publish(MODEL, tmp_path / "absent", DOCUMENTS)
    assert await open_models().find("r1", MODEL.version) is None


async def test_of_two_processes_that_publish_at_once_one_stands_for_both(
    open_models: Open, child: Child, tmp_path: Path
) -> None:
    """Each with documents of its own, so that the files of the one are not those of the other."""
    source = weights_in(tmp_path / "source", b"w" * 3_000_000)
    commands = [child("publish", source, published_at, MODEL.digest) for published_at in ("1.0", "2.0", "3.0")]
    run = partial(subprocess.run, stdout=subprocess.PIPE, text=True)
    ended = await asyncio.gather(*(asyncio.to_thread(run, command) for command in commands))
    assert [process.returncode for process in ended] == [0, 0, 0]
    assert len({process.stdout for process in ended}) == 1
    stored = await open_models().find("r1", MODEL.version)
    assert stored is not None and f"{stored.model.published_at}\n" == ended[0].stdout
    assert stored.model.files["README.md"] == described(str(stored.model.published_at).encode())


async def test_a_publication_that_was_killed_is_no_model_and_is_done_again(
    open_models: Open, child: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, armed = weights_in(tmp_path / "source"), tmp_path / "armed"
    armed.mkdir()
    (armed / "model-copied").touch()
    monkeypatch.setenv(VARIABLE, str(armed))
    command = child("publish", source, "1.0", MODEL.digest)
    killed = await asyncio.to_thread(subprocess.run, command)
    assert killed.returncode == -9
    assert await open_models().find("r1", MODEL.version) is None
    again = await open_models().publish(replace(MODEL, published_at=2.0), source, DOCUMENTS)
    assert again.model.published_at == 2.0
    assert await open_models().find("r1", MODEL.version) == again
