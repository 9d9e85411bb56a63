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
