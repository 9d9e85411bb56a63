"""`turnmill data validate`."""

import json
from pathlib import Path

import pytest

from turnmill import assets
from turnmill.cli.data import data
from turnmill.cli.errors import run_cli


def test_a_good_file_ends_with_0_and_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    path = assets.wordle_data("train")
    assert run_cli(data, ["validate", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"valid: {path}: ")
    assert ": 150 rows, 1 different prompt, 150 different answers, " in out and "SHA-256" in out


def test_a_bad_file_ends_with_2_and_one_line_a_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "metadata": {"prompt": "p", "anwser": "x"}}\r\nnonsense\r\n')
    assert run_cli(data, ["validate", str(path)]) == 2
    assert capsys.readouterr().out.splitlines() == [
        f"{path}: 2 problems in the data:",
        f"  {path}:1:41: metadata.anwser: unknown key: metadata has only prompt, answer, task, info; "
        "custom fields belong into metadata.info; did you mean answer? [unknown_key]",
        f"  {path}:2:1: not valid JSON: Expecting value [json]",
        "note: 2 of 2 lines end in CRLF (accepted)",
    ]


def test_json_gives_the_whole_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "a", "metadata": {}}\n' * 3)
    assert run_cli(data, ["validate", str(path), "--json", "--max-problems", "2"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["num_rows"], report["num_problems"]) == (False, 3, 5)
    assert report["problems"] == [
        {"line": 1, "column": None, "field": "metadata.prompt", "rule": "required", "message": "is missing"},
        {"line": 2, "column": None, "field": "metadata.prompt", "rule": "required", "message": "is missing"},
    ]


def test_a_terminal_gets_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What rich reads of its surroundings.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    path = tmp_path / "tasks.jsonl"
    path.write_text("nonsense\n" * 3)
    assert run_cli(data, ["validate", str(path), "--max-problems", "2"]) == 2
    out = capsys.readouterr().out
    assert "tasks.jsonl:2:1" in out and "not valid JSON" in out
    assert "and 1 more" in out
