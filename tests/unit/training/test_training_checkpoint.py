from pathlib import Path

import pytest

from turnmill.records import Version, decode
from turnmill.training.checkpoint import Manifest, export

MANIFEST = Manifest(run_id="run-1", step=3, version=Version(incarnation=1, n=3), digest="d", position=24)


def save_text(text: str, folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "weights").write_text(text, encoding="utf-8")


def test_a_checkpoint_holds_what_was_saved_and_says_what_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "final"
    export(folder, MANIFEST, lambda path: save_text("one", path))
    assert (folder / "sub" / "weights").read_text(encoding="utf-8") == "one"
    assert decode((folder / "checkpoint.json").read_bytes(), Manifest) == MANIFEST


def test_an_older_checkpoint_is_replaced_as_a_whole(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "left over").touch()
    export(folder, MANIFEST, lambda path: save_text("two", path))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "sub"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_save_that_fails_leaves_the_older_checkpoint_and_no_rest(tmp_path: Path) -> None:
    folder = tmp_path / "final"
    export(folder, MANIFEST, lambda path: save_text("one", path))

    def fail(path: Path) -> None:
        save_text("half", path)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        export(folder, MANIFEST, fail)
    assert (folder / "sub" / "weights").read_text(encoding="utf-8") == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
