"""What every store of whole folders keeps."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.published import weights_in
from turnmill.errors import NotFound
from turnmill.ports import FolderStore

Open = Callable[[], FolderStore]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def fetched(store: FolderStore, name: str, folder: Path) -> dict[str, bytes]:
    await asyncio.to_thread(folder.mkdir)
    await store.fetch(name, folder)
    return contents(folder)


async def test_a_folder_comes_back_as_it_was_put(open_folders: Open, tmp_path: Path) -> None:
    source = weights_in(tmp_path / "source")
    await open_folders().put("step-1", source)
    assert await open_folders().names() == ["step-1"]
    assert await fetched(open_folders(), "step-1", tmp_path / "fetched") == contents(source)
    assert await open_folders().read("step-1", "model.safetensors") == b"weights"
    assert await open_folders().read("step-1", "tokenizer/vocab.json") == b"[]"


async def test_a_second_put_replaces_the_first_as_a_whole(open_folders: Open, tmp_path: Path) -> None:
    store = open_folders()
    await store.put("a", weights_in(tmp_path / "one", b"one"))
    other = weights_in(tmp_path / "two", b"two")
    (other / "config.json").unlink()
    for _ in range(2):
        await store.put("a", other)
        assert await store.names() == ["a"]
    assert await fetched(store, "a", tmp_path / "fetched") == contents(other)


async def test_what_is_not_there_is_not_found(open_folders: Open, tmp_path: Path) -> None:
    store = open_folders()
    assert await store.names() == []
    with pytest.raises(NotFound):
        await store.read("a", "config.json")
    with pytest.raises(NotFound):
        await fetched(store, "a", tmp_path / "fetched")
    with pytest.raises(NotFound):
        await store.put("a", tmp_path / "absent")
    await store.put("a", weights_in(tmp_path / "source"))
    with pytest.raises(NotFound):
        await store.read("a", "absent")


async def test_what_was_removed_is_gone_and_the_others_stay(open_folders: Open, tmp_path: Path) -> None:
    store = open_folders()
    source = weights_in(tmp_path / "source")
    for name in ("step-10", "step-1", "step-1-v2"):
        await store.put(name, source)
    assert await store.names() == ["step-1", "step-1-v2", "step-10"]
    for _ in range(2):
        await store.remove("step-1")
    assert await store.names() == ["step-1-v2", "step-10"]
    assert await fetched(store, "step-10", tmp_path / "fetched") == contents(source)


async def test_folders_are_put_at_the_same_time(open_folders: Open, tmp_path: Path) -> None:
    store = open_folders()
    sources = {f"step-{n}": weights_in(tmp_path / f"source-{n}", str(n).encode()) for n in range(5)}
    await asyncio.gather(*(store.put(name, source) for name, source in sources.items()))
    for name, source in sources.items():
        assert await fetched(store, name, tmp_path / name) == contents(source)
