"""Held-out tasks that lie beside an upload: placed first, no upload of their own, copied when they are finished."""

from pathlib import Path

import pytest

from turnmill.backends.embedded import FolderBucket
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound
from turnmill.records import Upload

ROW = b'{"id": "a", "metadata": {"prompt": "go"}}\n'


@pytest.fixture
def bucket(tmp_path: Path) -> FolderBucket:
    found = FolderBucket(tmp_path / "bucket", settle_s=0.0)
    found.folder.mkdir(parents=True)
    return found


def told(bucket: FolderBucket) -> dict[str, Upload]:
    return {upload.key: upload for upload in bucket.look()[0]}


def ignored(uploads: dict[str, Upload]) -> dict[str, str]:
    return {key: upload.ignored for key, upload in uploads.items() if upload.ignored}


def test_held_out_tasks_lie_beside_their_upload_and_are_none_themselves(bucket: FolderBucket, tmp_path: Path) -> None:
    data, held_out = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    data.write_bytes(ROW)
    held_out.write_bytes(2 * ROW)
    bucket.put(data, "team/tasks.jsonl", held_out=held_out)
    assert (bucket.folder / "team" / "tasks.eval.jsonl").read_bytes() == 2 * ROW
    bucket.put(data, "without.jsonl")
    uploads = told(bucket)
    assert sorted(uploads) == ["team/tasks.jsonl", "without.jsonl"]
    target = tmp_path / "run" / "tasks.eval.jsonl"
    assert bucket.fetch_held_out(uploads["team/tasks.jsonl"], target) and target.read_bytes() == 2 * ROW
    assert not bucket.fetch_held_out(uploads["without.jsonl"], tmp_path / "none.jsonl")
    assert not (tmp_path / "none.jsonl").exists()


def test_held_out_tasks_that_are_being_written_are_waited_for(bucket: FolderBucket, tmp_path: Path) -> None:
    (bucket.folder / "a.jsonl").write_bytes(ROW)
    upload = told(bucket)["a.jsonl"]
    target = tmp_path / "run" / "a.eval.jsonl"
    with (bucket.folder / "a.eval.jsonl").open("wb") as file:
        file.write(ROW[:10])
        file.flush()
        with pytest.raises(BackendUnavailable, match=r"a\.eval\.jsonl is being written"):
            bucket.fetch_held_out(upload, target)
        assert not target.exists()
        file.write(ROW[10:])
    assert bucket.fetch_held_out(upload, target) and target.read_bytes() == ROW


def test_all_files_of_an_upload_are_there_or_nothing_is_placed(bucket: FolderBucket, tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_bytes(ROW)
    with pytest.raises(NotFound, match=r"missing\.jsonl"):
        bucket.put(data, "a.jsonl", sidecar=data, held_out=tmp_path / "missing.jsonl")
    with pytest.raises(InvalidInput, match="is a folder; give a file"):
        bucket.put(data, "a.jsonl", held_out=tmp_path)
    with pytest.raises(InvalidInput, match=r"held-out tasks of a\.jsonl: upload them with it \(--eval-data\)"):
        bucket.put(data, "a.eval.jsonl")
    assert list(bucket.folder.iterdir()) == []


def test_what_can_not_come_with_an_upload_is_told_once(bucket: FolderBucket) -> None:
    """No silence: parameters that nobody reads, and tasks that nobody trains on."""
    for name in (
        "a.jsonl",
        "a.eval.jsonl",
        "a.config.toml",
        "b.jsonl.config.toml",
        "b.eval.jsonl",
        "later.config.toml",
    ):
        (bucket.folder / name).write_bytes(ROW)
    misnamed = {"b.jsonl.config.toml": "what comes with b.jsonl is found as b.config.toml"}
    assert ignored(told(bucket)) == misnamed, "the data of b.eval.jsonl may come any moment"
    impatient = FolderBucket(bucket.folder.parent, settle_s=0.0, alone_s=0.0)
    alone = "it is taken for the held-out tasks of b.jsonl, which is not there; to train on it, rename it"
    assert ignored(told(impatient)) == {**misnamed, "b.eval.jsonl": alone}
    assert told(impatient) == {}


def test_a_name_of_several_lines_is_no_name(bucket: FolderBucket, tmp_path: Path) -> None:
    (bucket.folder / "a\x1b[2J\nb.jsonl").write_bytes(ROW)
    (bucket.folder / "schnee ☃ 👩‍🔬.jsonl").write_bytes(ROW)
    found = told(bucket)
    assert list(found) == ["a\\x1b[2J\\nb.jsonl", "schnee ☃ 👩‍🔬.jsonl"]
    assert ignored(found) == {"a\\x1b[2J\\nb.jsonl": "its name has line breaks or other control characters"}
    with pytest.raises(InvalidInput, match="control characters"):
        bucket.put(bucket.folder / "schnee ☃ 👩‍🔬.jsonl", "a\nb.jsonl")


@pytest.mark.parametrize("suffix", [".config.toml", ".eval.jsonl"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_what_came_with_an_upload_and_can_not_be_read_is_not_passed_over(
    bucket: FolderBucket, tmp_path: Path, suffix: str, is_folder: bool
) -> None:
    (bucket.folder / "a.jsonl").write_bytes(ROW)
    beside = bucket.folder / f"a{suffix}"
    if is_folder:
        beside.mkdir()
    else:
        beside.symlink_to(tmp_path / "nothing")
    upload = told(bucket)["a.jsonl"]
    if suffix == ".config.toml":
        assert bucket.sidecar_of(upload) == beside
    else:
        with pytest.raises((BackendUnavailable, NotFound)):
            bucket.fetch_held_out(upload, tmp_path / "copy.jsonl")
