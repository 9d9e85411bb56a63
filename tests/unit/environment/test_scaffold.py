"""New environments: whole, under a name that can be used, and appearing as a whole."""

import subprocess
import sys
from pathlib import Path

import pytest

from turnmill.environment.packaging import check_package
from turnmill.environment.scaffold import Style, new_package
from turnmill.errors import InvalidInput
from turnmill.intake.dataset import validate


@pytest.mark.parametrize("style", Style)
def test_each_style_is_a_whole_package_with_valid_data(tmp_path: Path, style: Style) -> None:
    folder = new_package("my-first-env", style, tmp_path / "packages")
    check_package(folder, "my-first-env")
    assert [path.name for path in (tmp_path / "packages").iterdir()] == ["my-first-env"]
    reports = [validate(folder / "data" / name) for name in ("train.jsonl", "eval.jsonl")]
    assert all(report.ok for report in reports)
    lines = [set((folder / "data" / name).read_text().splitlines()) for name in ("train.jsonl", "eval.jsonl")]
    assert not lines[0] & lines[1] and len(lines[0]) >= 12 and len(lines[1]) >= 4
    for path in folder.rglob("*"):
        assert path.is_dir() or "$" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("style", [Style.AGENT, Style.GAME])
def test_its_own_tests_pass(tmp_path: Path, style: Style) -> None:
    folder = new_package("its-own-env", style, tmp_path)
    ended = subprocess.run(
        [sys.executable, *"-m pytest -q -p no:cacheprovider -p no:xdist".split()],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0 and "6 passed" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("name", ["", "1st", "../up", "a b", "wordle", "json", "class", "turnmill", "ä", "x" * 101])
def test_a_name_that_can_not_be_used_is_refused_and_nothing_is_made(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInput):
        new_package(name, Style.AGENT, tmp_path / "packages")
    assert not (tmp_path / "packages").exists()


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    (tmp_path / "mine-env").mkdir()
    (tmp_path / "mine-env" / "work.txt").write_text("of weeks")
    with pytest.raises(InvalidInput, match="is there already"):
        new_package("mine-env", Style.GAME, tmp_path)
    assert [path.name for path in (tmp_path / "mine-env").iterdir()] == ["work.txt"]


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="can't write there"):
        new_package("some-env", Style.GAME, tmp_path / "file")
