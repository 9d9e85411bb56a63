"""The folder that people copy uploads into: each version of a finished file is told once."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from turnmill.backends.embedded import FolderBucket
from turnmill.errors import Conflict, InvalidInput, NotFound
from turnmill.records import Upload

ROW = b'{"id": "a", "metadata": {"prompt": "go"}}\n'


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    found = FolderBucket(tmp_path / "bucket", settle_s=0.05)
    found.folder.mkdir(parents=True)
    return found


def look_until_quiet(bucket: FolderBucket) -> list[Upload]:
    """Everything that is told until nothing is being written any more."""
    told: list[Upload] = []
    for _ in range(200):
        finished, is_waiting = bucket.look()
        told += finished
        if not is_waiting:
            return told
        time.sleep(0.01)
    raise AssertionError("files are still being written")


def test_a_file_is_told_once_and_again_when_it_changed(bucket: FolderBucket) -> None:
    path = bucket.folder / "team" / "tasks.jsonl"
    path.parent.mkdir()
    path.write_bytes(ROW)
    (first,) = look_until_quiet(bucket)
    assert (first.bucket, first.key, first.num_bytes, first.ignored) == ("bucket", "team/tasks.jsonl", len(ROW), None)
    assert look_until_quiet(bucket) == []
    path.write_bytes(2 * ROW)
    (second,) = look_until_quiet(bucket)
    assert second.key == first.key and second.cause != first.cause


def test_a_file_with_the_same_content_put_there_again_is_another_version(bucket: FolderBucket, tmp_path: Path) -> None:
    source = tmp_path / "tasks.jsonl"
    source.write_bytes(ROW)
    bucket.put(source, "tasks.jsonl")
    (first,) = look_until_quiet(bucket)
    bucket.put(source, "tasks.jsonl")
    (second,) = look_until_quiet(bucket)
    assert first.version != second.version


def test_what_was_there_before_is_told_by_a_bucket_that_is_opened_anew(bucket: FolderBucket, tmp_path: Path) -> None:
    (bucket.folder / "tasks.jsonl").write_bytes(ROW)
    first = look_until_quiet(bucket)
    again = FolderBucket(tmp_path / "bucket", settle_s=0.05)
    assert look_until_quiet(again) == first, "the same cause: whoever made a run of it knows"


@pytest.mark.parametrize(
    "name",
    [
        *(".tasks.jsonl", "tasks.jsonl~", "#tasks.jsonl#", ".tasks.jsonl.swp", "tasks.jsonl.tmp", "4913"),
        *("tasks.jsonl.part", "tasks.jsonl.crdownload", "tasks.config.toml", ".hidden/tasks.jsonl"),
    ],
)
def test_temporary_files_and_sidecars_are_not_told(bucket: FolderBucket, name: str) -> None:
    path = bucket.folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ROW)
    assert look_until_quiet(bucket) == []


@pytest.mark.parametrize(
    ("name", "why"), [("tasks.json", "only .jsonl"), ("tasks.jsonl.gz", "only .jsonl"), ("TASKS.JSONL", "only .jsonl")]
)
def test_other_files_are_told_as_ignored_with_the_reason(bucket: FolderBucket, name: str, why: str) -> None:
    (bucket.folder / name).write_bytes(ROW)
    (found,) = look_until_quiet(bucket)
    assert found.ignored is not None and why in found.ignored


def test_links_pipes_and_names_that_are_no_text_are_ignored_with_the_reason(
    bucket: FolderBucket, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.jsonl").write_bytes(ROW)
    (bucket.folder / "folder").symlink_to(tmp_path / "elsewhere")
    (bucket.folder / "link.jsonl").symlink_to(tmp_path / "elsewhere" / "a.jsonl")
    os.mkfifo(bucket.folder / "pipe.jsonl")
    (bucket.folder / os.fsdecode(b"caf\xe9.jsonl")).write_bytes(ROW)
    found = {upload.key: upload.ignored or "" for upload in look_until_quiet(bucket)}
    assert set(found) == {"folder", "link.jsonl", "pipe.jsonl", "caf\\xe9.jsonl"}
    assert "links" in found["folder"] and "links" in found["link.jsonl"]
    assert "no regular file" in found["pipe.jsonl"] and "UTF-8" in found["caf\\xe9.jsonl"]


def test_a_name_beyond_ascii_is_a_name(bucket: FolderBucket) -> None:
    (bucket.folder / "Aufgaben für März.jsonl").write_bytes(ROW)
    (found,) = look_until_quiet(bucket)
    assert found.key == "Aufgaben für März.jsonl" and found.ignored is None


WRITER = """
import sys, time
with open(sys.argv[1], "ab", buffering=0) as file:
    file.write(b"half")
    print("begun", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells who writes a file")
def test_a_file_that_another_process_still_writes_is_waited_for(bucket: FolderBucket) -> None:
    path = bucket.folder / "tasks.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        assert writer.stdout.readline() == "begun\n"
        time.sleep(0.15)
        assert bucket.look() == ([], True)
        time.sleep(0.15)
        assert bucket.look() == ([], True), "quiet for longer than it takes, but open"
        writer.stdin.write("\n")
    (found,) = look_until_quiet(bucket)
    assert found.num_bytes == 4


def test_thousands_at_once_are_all_told(bucket: FolderBucket) -> None:
    for number in range(2000):
        (bucket.folder / f"{number}.jsonl").write_bytes(ROW)
    assert len({upload.cause for upload in look_until_quiet(bucket)}) == 2000


async def test_watching_tells_what_is_there_and_what_comes(bucket: FolderBucket, tmp_path: Path) -> None:
    (bucket.folder / "before.jsonl").write_bytes(ROW)
    source = tmp_path / "source.jsonl"
    source.write_bytes(ROW)
    stop = asyncio.Event()
    keys: list[str] = []
    async with asyncio.timeout(20):
        async for uploads in bucket.watch(stop):
            keys += [upload.key for upload in uploads]
            if keys == ["before.jsonl"]:
                await asyncio.to_thread(bucket.put, source, "folder/after.jsonl")
            if len(keys) == 2:
                stop.set()
    assert keys == ["before.jsonl", "folder/after.jsonl"]


# ---------------------------------------------------------------- content


def test_the_content_is_fetched_as_it_was_told(bucket: FolderBucket, tmp_path: Path) -> None:
    path = bucket.folder / "tasks.jsonl"
    path.write_bytes(ROW)
    (upload,) = look_until_quiet(bucket)
    bucket.fetch(upload, tmp_path / "run" / "tasks.jsonl")
    assert (tmp_path / "run" / "tasks.jsonl").read_bytes() == ROW
    path.write_bytes(3 * ROW)
    with pytest.raises(Conflict, match="changed"):
        bucket.fetch(upload, tmp_path / "other.jsonl")
    path.unlink()
    with pytest.raises(NotFound):
        bucket.fetch(upload, tmp_path / "other.jsonl")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bucket", "run"], "nothing half done is left"


def test_a_sidecar_is_the_one_beside_the_upload(bucket: FolderBucket, tmp_path: Path) -> None:
    source, sidecar = tmp_path / "a.jsonl", tmp_path / "mine.toml"
    source.write_bytes(ROW)
    sidecar.write_text("lr = 1e-4\n")
    bucket.put(source, "team/a.jsonl", sidecar=sidecar)
    bucket.put(source, "b.jsonl")
    found = {upload.key: bucket.sidecar_of(upload) for upload in look_until_quiet(bucket)}
    assert found == {"team/a.jsonl": bucket.folder / "team" / "a.config.toml", "b.jsonl": None}


@pytest.mark.parametrize(
    "key",
    [
        "tasks.json",
        "../tasks.jsonl",
        "/tasks.jsonl",
        "a//b.jsonl",
        ".a.jsonl",
        "a/./b.jsonl",
        os.fsdecode(b"\xe9.jsonl"),
    ],
)
def test_uploads_with_names_that_would_not_be_found_are_refused(bucket: FolderBucket, tmp_path: Path, key: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(ROW)
    with pytest.raises(InvalidInput):
        bucket.put(source, key)
    assert list(bucket.folder.rglob("*")) == []


def test_a_folder_or_a_missing_file_can_not_be_uploaded(bucket: FolderBucket, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="folder"):
        bucket.put(tmp_path, "a.jsonl")
    with pytest.raises(NotFound):
        bucket.put(tmp_path / "missing.jsonl", "a.jsonl")


def test_a_name_that_leaves_no_room_for_a_sidecar_has_none(bucket: FolderBucket) -> None:
    (bucket.folder / f"{'x' * 249}.jsonl").write_bytes(ROW)
    (found,) = look_until_quiet(bucket)
    assert bucket.sidecar_of(found) is None


LOOKER = """
import os, sys
from pathlib import Path
from turnmill.backends.embedded.bucket import FolderBucket
if os.getuid() == 0:
    os.setuid(65534)  # permissions don't bind root
bucket = FolderBucket(Path(sys.argv[1]), settle_s=0)
print([upload.key for _ in range(2) for upload in bucket.look()[0]])
"""


def test_folders_that_can_not_be_looked_at_are_warned_about_once_and_hide_nothing_else() -> None:
    # Not in `tmp_path`: nobody else may enter that.
    with tempfile.TemporaryDirectory() as place:
        training = Path(place) / "training-data"
        locked = {training / "unlisted": 0o300, training / "unentered": 0o444}
        for folder in (training, *locked):
            folder.mkdir()
            (folder / "tasks.jsonl").write_bytes(ROW)
        if os.getuid() == 0:
            for path in (Path(place), *Path(place).rglob("*")):
                os.chown(path, 65534, -1)
        for folder, mode in locked.items():
            folder.chmod(mode)
        done = subprocess.run([sys.executable, "-c", LOOKER, place], capture_output=True, text=True, check=False)
        for folder in locked:
            folder.chmod(0o700)
    assert done.stdout == "['tasks.jsonl']\n", done.stderr
    warnings = sorted(done.stderr.splitlines())
    assert [line.split(" can't be looked at: ")[0] for line in warnings] == [
        str(training / "unentered" / "tasks.jsonl"),
        str(training / "unlisted"),
    ]
