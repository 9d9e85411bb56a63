from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import SafetensorError

from turnmill.errors import BackendUnavailable
from turnmill.records import Version, decode, encode
from turnmill.training.checkpoint import Checkpoints, Manifest, export

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


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("disk full")])
def test_a_save_that_fails_leaves_the_older_checkpoint_and_no_rest(tmp_path: Path, error: Exception) -> None:
    folder = tmp_path / "final"
    export(folder, MANIFEST, lambda path: save_text("one", path))

    def fail(path: Path) -> None:
        save_text("half", path)
        raise error

    with pytest.raises(BackendUnavailable, match="final can't be written: disk full"):
        export(folder, MANIFEST, fail)
    assert (folder / "sub" / "weights").read_text(encoding="utf-8") == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def full(step: int, reward: float | None = None) -> Manifest:
    return replace(MANIFEST, step=step, state_digest="s", reward_mean=reward)


def test_the_last_checkpoints_and_the_best_one_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", "run-1", keep=2)
    assert checkpoints.stable() == []
    for step, reward in ((1, 0.1), (2, 0.9), (3, 0.3), (4, None), (10, 0.4)):
        checkpoints.save(full(step, reward), lambda path: save_text("x", path))
    assert [(item.step, item.reward_mean) for item in checkpoints.stable()] == [(2, 0.9), (4, None), (10, 0.4)]
    checkpoints.save(full(11, 0.9), lambda path: save_text("x", path))
    # Of equally good ones the later one is kept.
    assert [item.step for item in checkpoints.stable()] == [10, 11]
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-10", "step-11"]


def test_what_is_not_complete_is_no_checkpoint_and_is_cleaned_up(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run-1", keep=5)
    checkpoints.save(full(1), lambda path: save_text("x", path))
    for name in (".step-2-abc", "step-3", "step-4", "step-5", "step-6", "step-7"):
        (tmp_path / name).mkdir()
        save_text("x", tmp_path / name)
    (tmp_path / "step-4" / "checkpoint.json").write_text("{", encoding="utf-8")
    # Of another run, of another step, without what training goes on with.
    for name, manifest in (
        ("step-5", replace(full(5), run_id="run-2")),
        ("step-6", full(7)),
        ("step-7", replace(full(7), state_digest=None)),
    ):
        (tmp_path / name / "checkpoint.json").write_bytes(encode(manifest))
    export(tmp_path / "final", MANIFEST, lambda path: save_text("x", path))
    (tmp_path / "notes.txt").touch()
    assert [item.step for item in checkpoints.stable()] == [1]
    checkpoints.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "notes.txt", "step-1"]
    Checkpoints(tmp_path / "nowhere", "run-1", keep=1).clean()
