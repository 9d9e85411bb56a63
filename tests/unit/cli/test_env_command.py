"""`turnmill env`: a package from its first file to a run, and each way in which one may be wrong."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.unit.environment.verifiers_house import PACKAGES as FIXTURES
from tests.unit.environment.verifiers_house import needs_verifiers
from tests.unit.rollout.boxes import make_package
from turnmill.cli.commands import turnmill
from turnmill.cli.errors import run_cli
from turnmill.records import encode

REPOSITORY = Path(__file__).parents[3]
ZERO = """
from turnmill.environment import Environment, Outcome, opening_messages, reward

def right(rollout):
    try:
        return float(rollout.turns[-1].reply["content"] == rollout.task.metadata["answer"])
    except Exception:
        return 0.0

class Zero(Environment):
    rewards = (reward(right),)

    async def play(self, task, chat):
        await chat.complete(opening_messages(task))
        return Outcome()

def load_environment():
    return Zero()
"""


@pytest.fixture(autouse=True)
def boxes_are_made_as_they_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also on a machine that can close none; and what is looked for is not what lies in this repository."""
    monkeypatch.setenv("TURNMILL_UNSAFE_ENV", "1")
    monkeypatch.chdir(tmp_path)


def env(*arguments: str | Path) -> int:
    return run_cli(turnmill, ["env", *map(str, arguments)])


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was printed as JSON."""
    return json.loads(capsys.readouterr().out)


def write_tasks(path: Path, *answers: str) -> Path:
    rows = [{"id": f"t{n}", "metadata": {"prompt": "Say it.", "answer": answer}} for n, answer in enumerate(answers)]
    path.write_bytes(b"".join(encode(row) + b"\n" for row in rows))
    return path


# ---------------------------------------------------------------- from new to preflight


@pytest.mark.parametrize("style", ["agent", "game"])
def test_what_new_makes_is_valid_passes_preflight_and_is_listed(
    style: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "deployment"
    assert env("new", "my-first", "--style", style, "--root", root) == 0
    out = capsys.readouterr().out
    folder = root / "custom-environments" / "my-first"
    assert out.startswith(f"made {folder}: README.md, ") and f"turnmill env validate my-first --root {root}" in out

    assert env("validate", "my-first", "--root", root, "--json") == 0
    report = told(capsys)
    assert report["ok"] and [check["name"] for check in report["checks"]] == ["package", "requirements", "loads"]

    for data in ("train.jsonl", "eval.jsonl"):
        assert env("preflight", "my-first", "--data", folder / "data" / data, "--root", root, "--json") == 0
        report = told(capsys)
        assert {check["state"] for check in report["checks"]} == {"ok"}
        assert report["mean_rewards"] == {"gold": 1.0, "garbage": 0.0}

    assert env("list", "--root", root, "--json") == 0
    (built_in, listed) = told(capsys)
    assert (built_in["env_id"], built_in["kind"]) == ("wordle", "built_in")
    assert (listed["env_id"], listed["kind"], listed["problem"]) == ("my-first", "package", None)
    assert len(listed["digest"]) == 64


@pytest.mark.slow
def test_what_new_makes_is_trained_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "deployment"
    assert env("new", "my-first", "--style", "game", "--root", root) == 0
    data = root / "custom-environments" / "my-first" / "data" / "train.jsonl"
    options = "--use-custom-env --custom-env-id my-first --max-steps 1 --global-batch-size 8 --number-generation 4"
    more = "--baseline-rollouts 8 --baseline-max-rollouts 8 --ignore-baseline --json"
    capsys.readouterr()
    given = ["run", "--data", str(data), "--root", str(root), *options.split(), *more.split()]
    assert run_cli(turnmill, given) == 0
    figures = told(capsys)
    assert (figures["status"], figures["steps"]) == ("succeeded", 1)


@pytest.mark.slow
def test_an_agent_that_new_makes_is_played_with_a_model_that_calls_tools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "deployment"
    assert env("new", "my-first", "--root", root) == 0
    data = root / "custom-environments" / "my-first" / "data" / "eval.jsonl"
    capsys.readouterr()
    options = "--use-custom-env --custom-env-id my-first --json"
    assert run_cli(turnmill, ["eval", "sql-tiny", "--data", str(data), "--root", str(root), *options.split()]) == 0
    figures = told(capsys)
    assert figures["status"] == "succeeded" and figures["evaluations"], figures
    assert all(each["num_invalid"] == 0 for each in figures["evaluations"].values()), figures


@needs_verifiers
def test_a_new_environment_of_verifiers_passes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert env("new", "my-sums", "--style", "verifiers", "--into", tmp_path) == 0
    assert env("validate", tmp_path / "my-sums") == 0
    capsys.readouterr()
    assert (
        env("preflight", tmp_path / "my-sums", "--data", tmp_path / "my-sums" / "data" / "train.jsonl", "--json") == 0
    )
    assert told(capsys)["mean_rewards"]["gold"] == pytest.approx(1.0)


# ---------------------------------------------------------------- preflight


def test_a_reward_that_swallows_its_error_is_stopped_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defect 42: always 0."""
    make_package(tmp_path, "zero-env", source=ZERO)
    data = write_tasks(tmp_path / "tasks.jsonl", "yes", "no")
    assert env("preflight", "zero-env", "--data", data, "--root", tmp_path) == 1
    out = capsys.readouterr().out
    assert "failed      gold " in out and "right weighs most, and gives 0 for each gold answer" in out
    assert "failed      varies" in out and "2 of 10 checks failed" in out


@needs_verifiers
@pytest.mark.slow
def test_the_package_of_verifiers_that_is_always_zero_is_stopped_and_mended_it_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Defect 42: always 0 apart from the format."""
    answers = [json.dumps({"endpoint": f"/users/{n}", "params": {"limit": n}}) for n in range(3)]
    data = write_tasks(tmp_path / "calls.jsonl", *answers)
    assert env("preflight", FIXTURES / "always-zero", "--data", data) == 1
    assert "call_reward weighs most, and gives 0 for each gold answer" in capsys.readouterr().out
    assert env("preflight", FIXTURES / "always-zero-mended", "--data", data) == 0


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["my-custom-env", "sql-agent"])
def test_the_shipped_packages_pass(env_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = REPOSITORY / "custom-environments" / env_id
    assert env("preflight", folder, "--data", folder / "data" / "train.jsonl", "--json") == 0
    assert {check["state"] for check in told(capsys)["checks"]} == {"ok"}


def test_the_environment_of_the_parameters_is_played_where_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_tasks(tmp_path / "words.jsonl", "crane", "slate")
    assert env("preflight", "--data", data, "--env-args", '{"max_turns": 2}') == 0
    out = capsys.readouterr().out
    assert "ok          limits" in out and "after 2 turns at most" in out and "no check failed" in out
    # The recipe of a named model bounds the conversations, as it does in a run.
    long = tmp_path / "long.jsonl"
    long.write_bytes(encode({"id": "t", "metadata": {"prompt": "word " * 2000, "answer": "crane"}}) + b"\n")
    assert env("preflight", "--data", long) == 0
    assert env("preflight", "--data", long, "--base-model", "wordle-tiny") == 1
    assert "leaves no room in max_length = 160" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["wordle", "--data", "gone.jsonl"], "gone.jsonl: no such file"),
        (["nowhere-env", "--data", "words.jsonl"], "there is no environment 'nowhere-env'"),
        (["wordle", "--env", "wordle", "--data", "words.jsonl"], "each name an environment"),
        (["wordle", "--data", "words.jsonl", "--max-length", "many"], "max_length"),
    ],
)
def test_what_can_not_be_used_ends_with_2(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tasks(tmp_path / "words.jsonl", "crane")
    assert env("preflight", *arguments) == 2
    assert text in capsys.readouterr().err


def test_a_terminal_gets_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What rich reads of its surroundings.
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    assert env("preflight", "--data", write_tasks(tmp_path / "words.jsonl", "crane")) == 0
    out = capsys.readouterr().out
    assert "│ repeats" in out and "no check failed" in out


# ---------------------------------------------------------------- validate


@pytest.mark.parametrize(
    ("source", "pyproject", "check", "text"),
    [
        ("def load_environment(: pass", "", "package", "is no Python"),
        ("x = 1", "", "package", "has no load_environment"),
        (ZERO, "[tool]\n", "package", "has no table [project]"),
        (ZERO, '[project]\nname = "b"\ndependencies = ["!"]\n', "requirements", "pyproject.toml"),
        (ZERO, '[project]\nname = "b"\nrequires-python = "<3"\n', "requirements", "requires-python is <3"),
        ("import no_such_module_anywhere\n" + ZERO, "", "loads", "bad_env.py:1"),
        ("def load_environment(): return 3", "", "loads", "must return a turnmill.environment.Environment"),
        ("def load_environment(): raise SystemExit(3)", "", "loads", "SystemExit: 3"),
    ],
)
def test_a_package_that_is_not_whole_ends_with_2_and_the_check(
    source: str, pyproject: str, check: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, "bad-env", source=source, pyproject=pyproject)
    assert env("validate", "bad-env", "--root", tmp_path, "--json") == 2
    report = told(capsys)
    states = {each["name"]: each["state"] for each in report["checks"]}
    details = {each["name"]: each["detail"] for each in report["checks"]}
    assert not report["ok"] and states[check] == "failed" and text in details[check]
    if check != "loads":
        assert states["loads"] == "not_checked"


def test_arguments_reach_load_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = ZERO.replace("def load_environment():", "def load_environment(*, speed):\n    print('loading at', speed)")
    make_package(tmp_path, "fast-env", source=source)
    assert env("validate", "fast-env", "--root", tmp_path, "--env-args", '{"speed": 3}') == 0
    assert env("validate", "fast-env", "--root", tmp_path, "--env-args", '{"sped": 3}') == 2
    assert "did you mean 'speed'?" in capsys.readouterr().out
    assert env("validate", "fast-env", "--root", tmp_path, "--env-args", "{") == 2
    assert "--env-args {: is no JSON" in capsys.readouterr().err
    assert env("validate", "wordle", "--env-args", '{"max_turns": 0}') == 2


# ---------------------------------------------------------------- archives, list


def test_a_package_is_packed_installed_and_replaced_only_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert env("new", "my-first", "--into", tmp_path / "work") == 0
    capsys.readouterr()
    assert env("package", tmp_path / "work" / "my-first", "--json") == 0
    packed = told(capsys)
    assert env("package", tmp_path / "work" / "my-first", "-o", tmp_path / "again.tar.gz", "--json") == 0
    assert told(capsys)["sha256"] == packed["sha256"]
    archive = tmp_path / packed["file"]
    assert archive.name == "my-first.tar.gz" and archive.read_bytes() == (tmp_path / "again.tar.gz").read_bytes()

    root = tmp_path / "deployment"
    assert env("install", archive, "--root", root, "--json") == 0
    assert told(capsys)["digest"] == packed["digest"]
    installed = root / "custom-environments" / "my-first"
    (installed / "README.md").write_text("changed")
    assert env("install", archive, "--root", root) == 2
    assert "is there already" in capsys.readouterr().err and (installed / "README.md").read_text() == "changed"
    assert env("install", archive, "--root", root, "--force") == 0
    assert (installed / "README.md").read_text() != "changed"
    assert [path.name for path in installed.parent.iterdir()] == ["my-first"]


def test_an_archive_that_leads_elsewhere_is_refused_and_what_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, "evil-env", source=ZERO)
    with tarfile.open(tmp_path / "evil.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "custom-environments" / "evil-env", "evil-env")
        archive.addfile(tarfile.TarInfo("evil-env/../../outside"))
    assert env("install", tmp_path / "evil.tar.gz", "--root", tmp_path, "--force") == 2
    assert "leads elsewhere" in capsys.readouterr().err
    assert (tmp_path / "custom-environments" / "evil-env" / "evil_env.py").read_text() == ZERO


def test_what_can_not_be_packed_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert env("package", "wordle") == 2
    assert "is built in" in capsys.readouterr().err
    make_package(tmp_path, "good-env", source=ZERO)
    assert env("package", "good-env", "-o", tmp_path / "no" / "such" / "file") == 2
    assert "can't be written" in capsys.readouterr().err


def test_the_list_tells_what_is_wrong_with_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "deployment"
    make_package(root, "same-env", source=ZERO)
    make_package(tmp_path, "same-env", source=ZERO)
    make_package(root, "broken-env", source="(")
    make_package(root, "wordle", source=ZERO)
    make_package(root, "needs-env", source=ZERO, pyproject='[project]\nname = "n"\ndependencies = ["no-such-thing>=2"]')
    (root / "custom-environments" / "notes").mkdir()
    assert env("list", "--root", root, "--json") == 0
    found = {(each["env_id"], each["folder"]): each for each in told(capsys)}
    problems = {name: each["problem"] for (name, folder), each in found.items() if folder and str(root) in folder}
    assert problems["same-env"] is None and problems["needs-env"] is None
    assert "is no Python" in problems["broken-env"] and "no pyproject.toml" in problems["notes"]
    assert "a built-in environment has its name" in problems["wordle"]
    hidden = found["same-env", str(tmp_path / "custom-environments" / "same-env")]
    assert str(root) in hidden["problem"]
    assert found["needs-env", str(root / "custom-environments" / "needs-env")]["missing"] == ["no-such-thing>=2"]
    assert env("list", "--root", root) == 0
    assert "broken-env" in capsys.readouterr().out
