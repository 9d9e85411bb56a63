"""Where refused uploads lie: with all that came with them, whatever their names, and back again whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from turnmill.backends.embedded import FolderBucket, open_bucket, open_quarantine
from turnmill.backends.embedded.quarantine import Quarantine
from turnmill.errors import InvalidInput
from turnmill.records import Upload

ROW = b'{"id": "a"}\n'
REPORTS = {"report.json": b"{}", "report.md": b"# no"}


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    found = open_bucket(tmp_path)
    found.folder.mkdir(parents=True)
    return found


@pytest.fixture
def quarantine(tmp_path: Path) -> Quarantine:
    return open_quarantine(tmp_path)


def upload_of(bucket: FolderBucket, key: str) -> Upload:
    return {upload.key: upload for upload in FolderBucket(bucket.folder.parent, settle_s=0.0).look()[0]}[key]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def hold(bucket: FolderBucket, quarantine: Quarantine, key: str, copy: Path, held_out: Path | None = None) -> str:
    return quarantine.hold("r1", upload_of(bucket, key), copy, REPORTS, held_out=held_out)


def test_an_upload_is_held_and_put_back_with_all_that_came_with_it(
    tmp_path: Path, bucket: FolderBucket, quarantine: Quarantine
) -> None:
    came = {"a.jsonl": ROW, "a.config.toml": b"seed = 3\n", "a.eval.jsonl": 2 * ROW}
    for name, data in came.items():
        (bucket.folder / name).write_bytes(data)
    (tmp_path / "copy.jsonl").write_bytes(ROW)
    upload = upload_of(bucket, "a.jsonl")
    place = quarantine.hold("r1", upload, tmp_path / "copy.jsonl", REPORTS, held_out=bucket.folder / "a.eval.jsonl")
    assert content(quarantine.folder_of(place)) == {**came, **REPORTS} and content(bucket.folder) == {}
    # A kill before anybody heard of it: done again it changes nothing.
    (tmp_path / "tasks.jsonl").write_bytes(b"of the run")
    quarantine.hold("r1", upload, tmp_path / "copy.jsonl", REPORTS, held_out=tmp_path / "tasks.jsonl")
    assert content(quarantine.folder_of(place)) == {**came, **REPORTS}
    quarantine.put_back(place, "a.jsonl")
    assert content(bucket.folder) == came and not quarantine.folder_of(place).exists()
    assert upload_of(bucket, "a.jsonl").version != upload.version


def test_of_an_upload_that_was_replaced_meanwhile_the_copies_are_held(
    tmp_path: Path, bucket: FolderBucket, quarantine: Quarantine
) -> None:
    (bucket.folder / "a.jsonl").write_bytes(ROW)
    upload = upload_of(bucket, "a.jsonl")
    now = {"a.jsonl": b"new\n", "a.config.toml": b"seed = 4\n", "a.eval.jsonl": b"new tasks\n"}
    for name, data in now.items():
        (bucket.folder / name).write_bytes(data)
    (tmp_path / "copy.jsonl").write_bytes(ROW)
    (tmp_path / "tasks.jsonl").write_bytes(2 * ROW)
    place = quarantine.hold("r1", upload, tmp_path / "copy.jsonl", REPORTS, held_out=tmp_path / "tasks.jsonl")
    assert content(quarantine.folder_of(place)) == {"a.jsonl": ROW, "a.eval.jsonl": 2 * ROW, **REPORTS}
    assert content(bucket.folder) == now


@pytest.mark.parametrize("num_bytes", [255, 249, 246, 243])
def test_a_name_may_be_as_long_as_the_file_system_allows(
    tmp_path: Path, bucket: FolderBucket, quarantine: Quarantine, num_bytes: int
) -> None:
    """Its sidecar and its held-out tasks could not have one that long."""
    key = "x" * (num_bytes - len(".jsonl")) + ".jsonl"
    (bucket.folder / key).write_bytes(ROW)
    (tmp_path / "copy.jsonl").write_bytes(ROW)
    place = hold(bucket, quarantine, key, tmp_path / "copy.jsonl")
    assert content(quarantine.folder_of(place)) == {key: ROW, **REPORTS} and content(bucket.folder) == {}
    quarantine.put_back(place, key)
    assert content(bucket.folder) == {key: ROW}


def test_what_can_not_be_put_back_leaves_no_parameters_for_the_file_that_is_there(
    tmp_path: Path, bucket: FolderBucket, quarantine: Quarantine
) -> None:
    (bucket.folder / "a.config.toml").write_bytes(b"lr = 5\n")
    (bucket.folder / "a.jsonl").write_bytes(ROW)
    (tmp_path / "copy.jsonl").write_bytes(ROW)
    place = hold(bucket, quarantine, "a.jsonl", tmp_path / "copy.jsonl")
    (bucket.folder / "a.jsonl").write_bytes(b"corrected\n")
    held = content(quarantine.folder_of(place))
    with pytest.raises(InvalidInput, match=r"a\.jsonl is there already"):
        quarantine.put_back(place, "a.jsonl")
    assert content(bucket.folder) == {"a.jsonl": b"corrected\n"}
    assert content(quarantine.folder_of(place)) == held


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system here")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def test_uploads_may_lie_on_a_file_system_of_their_own(tmp_path: Path, elsewhere: Path) -> None:
    (tmp_path / "bucket").mkdir()
    os.symlink(elsewhere, tmp_path / "bucket" / "training-data")
    bucket, quarantine = open_bucket(tmp_path), open_quarantine(tmp_path)
    came = {"a.jsonl": ROW, "a.config.toml": b"seed = 3\n", "a.eval.jsonl": 2 * ROW}
    for name, data in came.items():
        (bucket.folder / name).write_bytes(data)
    (tmp_path / "copy.jsonl").write_bytes(ROW)
    place = hold(bucket, quarantine, "a.jsonl", tmp_path / "copy.jsonl")
    assert content(quarantine.folder_of(place)) == {**came, **REPORTS} and content(bucket.folder) == {}
    (bucket.folder / "a.jsonl").write_bytes(b"corrected\n")
    with pytest.raises(InvalidInput, match="is there already"):
        quarantine.put_back(place, "a.jsonl")
    (bucket.folder / "a.jsonl").unlink()
    quarantine.put_back(place, "a.jsonl")
    assert content(bucket.folder) == came and not quarantine.folder_of(place).exists()
