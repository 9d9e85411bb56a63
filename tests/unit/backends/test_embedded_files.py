"""What the folders hold, and what happens when it was damaged."""

import asyncio
import os
import sqlite3
import subprocess
from pathlib import Path

import pytest

from turnmill.backends.embedded.blobs import FolderBlobStore
from turnmill.backends.embedded.files import write_atomically
from turnmill.backends.embedded.metrics import JsonlMetricSink
from turnmill.backends.embedded.queue import SqliteQueue
from turnmill.backends.embedded.weights import FolderWeightStore
from turnmill.errors import BackendUnavailable, InvalidInput, RecordCorrupt
from turnmill.ports import Message
from turnmill.records import Metric, Version

ONE = Version(incarnation=1, n=1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def damage(path: Path, position: int) -> None:
    """Flip one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("position", [0, 10, 71, 72, -1])
async def test_a_damaged_blob_is_refused(tmp_path: Path, position: int) -> None:
    blobs = FolderBlobStore(tmp_path)
    await blobs.put("a/b", b"content")
    damage(tmp_path / "a" / "b.blob", position)
    with pytest.raises(RecordCorrupt, match="digest"):
        await blobs.get("a/b")


async def test_a_blob_cut_short_is_refused(tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path)
    await blobs.put("a", b"content")
    for size in (75, 40, 0):
        os.truncate(tmp_path / "a.blob", size)
        with pytest.raises(RecordCorrupt, match="digest"):
            await blobs.get("a")
    with pytest.raises(RecordCorrupt, match="digest"):
        await blobs.list()


async def test_a_write_that_a_crash_cut_short_shows_nowhere(tmp_path: Path) -> None:
    blobs = FolderBlobStore(tmp_path)
    await blobs.put("a", b"content")
    (tmp_path / ".0123.tmp").write_bytes(b"half")
    assert [info.key for info in await blobs.list()] == ["a"]


async def test_a_blob_key_may_not_pass_through_a_blobs_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="only the last segment"):
        await FolderBlobStore(tmp_path).put("a.blob/b", b"")


def test_a_failed_write_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "a", b"new", "no bytes")  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == b"old"
    assert files(tmp_path) == ["a"]


async def test_a_folder_in_the_way_makes_the_backend_unavailable(tmp_path: Path) -> None:
    (tmp_path / "a.blob").mkdir()
    with pytest.raises(BackendUnavailable, match=r"a\.blob can't be used"):
        await FolderBlobStore(tmp_path).put("a", b"")
    assert files(tmp_path) == []


def dead_pid() -> int:
    with subprocess.Popen(["true"]) as process:
        return process.pid


async def test_a_copy_that_a_crash_cut_short_is_no_version(tmp_path: Path, source: Path) -> None:
    weights = FolderWeightStore(tmp_path / "weights")
    await weights.publish(ONE, source, "d")
    dead = dead_pid()
    cut_short = tmp_path / "weights" / "versions" / f".{dead}-01.tmp"
    under_way = tmp_path / "weights" / "versions" / f".{os.getpid()}-23.tmp"
    for folder in (cut_short, under_way):
        folder.mkdir()
    (tmp_path / "weights" / f".{dead}-45.tmp").write_bytes(b"half a pointer")
    await weights.point(ONE)
    await weights.prune([])
    assert under_way.exists() and not cut_short.exists()
    under_way.rmdir()
    assert files(tmp_path / "weights") == ["current.json", "versions/1.1/meta.json", "versions/1.1/model.safetensors"]


async def test_of_publishers_at_once_one_wins_and_nothing_is_left_over(tmp_path: Path, source: Path) -> None:
    stores = [FolderWeightStore(tmp_path / "weights") for _ in range(8)]
    published = await asyncio.gather(*(store.publish(ONE, source, "d") for store in stores))
    assert {weights.digest for weights in published} == {"d"}
    assert files(tmp_path / "weights") == ["versions/1.1/meta.json", "versions/1.1/model.safetensors"]


async def test_a_damaged_pointer_is_called_corrupt(tmp_path: Path, source: Path) -> None:
    weights = FolderWeightStore(tmp_path / "weights")
    await weights.publish(ONE, source, "d")
    await weights.point(ONE)
    (tmp_path / "weights" / "current.json").write_text("{")
    with pytest.raises(RecordCorrupt, match=r"current\.json"):
        await weights.current()


async def test_a_moved_weight_folder_still_serves(tmp_path: Path, source: Path) -> None:
    weights = FolderWeightStore(tmp_path / "weights")
    await weights.publish(ONE, source, "d")
    await weights.point(ONE)
    (tmp_path / "weights").rename(tmp_path / "moved")
    current = await FolderWeightStore(tmp_path / "moved").current()
    assert current is not None
    assert current.location == str(tmp_path / "moved" / "versions" / "1.1")


async def test_a_torn_line_of_metrics_costs_only_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlMetricSink(path)
    one, two = (Metric(run_id="r", step=step, time=0.0, values={"a": 1.0}) for step in (1, 2))
    await sink.write(one)
    path.write_bytes(path.read_bytes() + b'{"run_id":"r","st')
    assert await sink.read("r") == [one]
    assert caplog.records == []
    await sink.write(two)
    assert await sink.read("r") == [one, two]
    assert "line 2 is torn" in caplog.text


async def test_a_lease_looks_only_at_what_it_takes(tmp_path: Path) -> None:
    """Counted in the instructions of SQLite's machine: 1 000 a tick."""
    queue = SqliteQueue(tmp_path / "q.db")
    many = [Message(body=b"x", group=f"g{n % 5000}", dedup_id=str(n)) for n in range(20_000)]
    await queue.send([Message(body=b"x", group="one", dedup_id=f"one{n}") for n in range(10_000)] + many)
    await queue.lease(max_messages=2000, lease_s=1000)
    ticks: list[int] = []

    def tick() -> int:
        ticks.append(1)
        return 0

    database = queue._db

    def count(connection: sqlite3.Connection) -> None:
        connection.set_progress_handler(tick, 1000)

    await database.write(count)
    leased = await queue.lease(max_messages=64, lease_s=1000)
    assert len(leased) == 64
    assert len(await queue.lease(max_messages=0, lease_s=1000)) == 0
    assert len(ticks) <= 20
    await queue.ack([message.receipt for message in leased])
    assert len(ticks) <= 40
    queue.close()
