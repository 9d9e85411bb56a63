"""`turnmill dlq` and `retry`: what is refused, and how, before anything is touched."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from turnmill.cli.commands import turnmill
from turnmill.errors import InvalidInput, NotFound


def test_a_deployment_without_dead_letters_says_so(tmp_path: Path) -> None:
    root = ["--root", str(tmp_path / "root")]
    for command in (["list"], ["redrive", "--all"], ["purge", "--all"]):
        done = CliRunner().invoke(turnmill, ["dlq", *command, *root])
        assert (done.exit_code, done.output) == (0, f"no dead letters in {tmp_path / 'root'}\n")
    listed = CliRunner().invoke(turnmill, ["dlq", "list", "--json", *root])
    assert json.loads(listed.output) == []
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("command", ["redrive", "purge"])
def test_one_letter_or_all_must_be_named(tmp_path: Path, command: str) -> None:
    for arguments in ([], ["trigger/x", "--all"]):
        done = CliRunner().invoke(turnmill, ["dlq", command, *arguments, "--root", str(tmp_path)])
        assert isinstance(done.exception, InvalidInput) and "or --all, and not both" in str(done.exception)


@pytest.mark.parametrize("command", ["redrive", "purge", "show"])
def test_an_unknown_letter_is_refused(tmp_path: Path, command: str) -> None:
    done = CliRunner().invoke(turnmill, ["dlq", command, "trigger/x", "--root", str(tmp_path)])
    assert isinstance(done.exception, NotFound) and "turnmill dlq list" in str(done.exception)


def test_letters_of_an_unknown_run_and_its_retry_are_refused(tmp_path: Path) -> None:
    for arguments in (["dlq", "list", "--run", "nobody"], ["retry", "nobody"]):
        done = CliRunner().invoke(turnmill, [*arguments, "--root", str(tmp_path)])
        assert isinstance(done.exception, NotFound) and "there is no run 'nobody'" in str(done.exception)
