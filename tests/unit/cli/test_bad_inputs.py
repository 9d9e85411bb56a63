"""Bad inputs, one a row: each ends with exit code 2, the message that says what, where and what to do, no traceback.

All are found before anything is made: no folder, no record, no process.
"""

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from turnmill import assets
from turnmill.backends.embedded import open_root_records
from turnmill.cli.commands import turnmill
from turnmill.cli.errors import run_cli
from turnmill.ports import Write
from turnmill.records import Run, RunKind, RunStatus, encode

GOOD = '{"id": "a", "metadata": {"prompt": "Guess the five-letter word.", "answer": "crane"}}\n'
TRAIN = str(assets.wordle_data("train"))
# Paths below are relative to the test's own folder.
RUN = ["run", "--data", "good.jsonl"]
VALIDATE = ["data", "validate", "tasks.jsonl"]


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One bad input."""

    name: str
    argv: list[str]
    # Parts of the message, on standard error, or output where the command prints a report.
    says: list[str]
    files: dict[str, str | bytes] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)


def toml(name: str, text: str | bytes, *says: str) -> Bad:
    return Bad(name=name, argv=[*RUN, "--config", "run.toml"], files={"run.toml": text}, says=list(says))


def flags(name: str, argv: list[str], *says: str) -> Bad:
    return Bad(name=name, argv=[*RUN, *argv], says=list(says))


def variable(name: str, key: str, value: str, *says: str) -> Bad:
    return Bad(name=name, argv=RUN, environ={key: value}, says=list(says))


def rows(name: str, content: str | bytes, *says: str) -> Bad:
    return Bad(name=name, argv=VALIDATE, files={"tasks.jsonl": content}, says=list(says))


CONFIGURATIONS = [
    toml("an unknown key", "max_stepz = 3\n", "max_stepz = 3 (run.toml:1)", "no such parameter", "max_steps?"),
    toml(
        "a key that nothing reads",
        "curriculum_low = 0.2\n",
        "curriculum_low = 0.2 (run.toml:1) would do nothing: it is read with curriculum = pass_rate alone",
        "files of their own",
    ),
    flags(
        "a flag that nothing reads",
        ["--age-tolerance", "1"],
        "age_tolerance = 1 (--age-tolerance) would do nothing: it is read with rollout_strategy = off_policy_async",
    ),
    toml("a key far from any", "zzz = 1\n", "zzz = 1 (run.toml:1): no such parameter; `turnmill run --help` lists"),
    toml(
        "text for a number",
        '\nlr = "high"\n',
        'lr = "high" (run.toml:2): must be a number greater than 0 and at most 1',
    ),
    toml(
        "a fraction for an integer", "max_steps = 2.5\n", "max_steps = 2.5 (run.toml:1): must be an integer at least 1"
    ),
    toml("a truth for an integer", "seed = true\n", "seed = true (run.toml:1): must be an integer at least 0"),
    toml("NaN", "temperature = nan\n", "temperature = NaN (run.toml:1): must be a finite number"),
    toml(
        "beyond the range", "max_steps = 0\n", "max_steps = 0 (run.toml:1): must be an integer at least 1 and at most"
    ),
    toml("a bad choice", 'lr_schedule = "cosin"\n', "one of constant, linear, cosine; did you mean cosine?"),
    toml("a table for text", "[env]\nx = 1\n", 'env = {"x": 1} (run.toml:1): must be text'),
    toml("no TOML", "max_steps: 3\n", "run.toml:1:10: not valid TOML: Expected '='"),
    toml("a key given twice", "seed = 1\nseed = 2\n", "run.toml:2:9: not valid TOML: Cannot overwrite a value"),
    toml("a file in Latin-1", b"# caf\xe9\n", "run.toml: not valid TOML: not UTF-8 at byte 5"),
    toml(
        "several problems at once",
        'max_stepz = 3\nlr = "x"\n',
        "2 problems in the configuration",
        "max_stepz = 3 (run.toml:1)",
        'lr = "x" (run.toml:2)',
    ),
    flags("a missing configuration file", ["--config", "none.toml"], "none.toml: can't read", "no such file"),
    flags("a folder as the configuration file", ["--config", "folder"], "folder: can't read", "is a directory"),
    flags("text for an integer flag", ["--max-steps", "ten"], 'max_steps = "ten" (--max-steps): must be an integer'),
    flags(
        "a flag out of range", ["--temperature", "0"], "temperature = 0 (--temperature)", "at least 0.01 and at most 2"
    ),
    flags(
        "an unknown environment",
        ["--env", "wordl"],
        "env: there is no environment 'wordl'",
        "did you mean 'wordle'",
    ),
    flags("two environments", ["--vf-env-id", "x", "--env", "y"], "(--env) and vf_env_id", "each name an environment"),
    flags(
        "a custom environment that is not there",
        ["--use-custom-env", "--custom-env-id", "none"],
        "custom_env_id: there is no environment 'none'",
    ),
    flags(
        "a judge that the deployment has not",
        ["--judges", "strict"],
        "turnmill.toml has no judge 'strict'; it has none",
    ),
    flags("arguments that are no JSON", ["--env-args", "{x"], 'env_args = "{x" (--env-args): must be a JSON object'),
    flags("arguments that are a list", ["--env-args", "[1]"], "env_args = [1] (--env-args): must be a JSON object"),
    flags("an argument that the environment lacks", ["--env-args", '{"max_turn": 1}'], "'max_turn'", "'max_turns'?"),
    flags("an argument that it refuses", ["--env-args", '{"max_turns": 0}'], "max_turns", "at least 1, not 0"),
    flags(
        "an unknown base model",
        ["--base-model", "wordle-tin"],
        'base_model = "wordle-tin" (--base-model)',
        "did you mean wordle-tiny?",
    ),
    flags("a folder without a model", ["--base-model", "./folder"], "base_model", "folder", "config.json"),
    flags("this folder without a model", ["--base-model", "."], 'base_model = "." (--base-model)', "config.json"),
    flags("an unknown flag", ["--max-step", "3"], "No such option '--max-step'", "--max-steps"),
    flags("a flag without its value", ["--max-steps"], "'--max-steps' requires an argument"),
    variable("an unknown variable", "TURNMILL_MAX_STEP", "3", 'TURNMILL_MAX_STEP = "3"', "mean TURNMILL_MAX_STEPS?"),
    variable("a bad variable", "TURNMILL_LR", "fast", 'lr = "fast" (TURNMILL_LR): must be a number greater than 0'),
    variable("a variable that is no truth", "TURNMILL_SHUFFLE", "maybe", "must be one of true, false, 1, 0, yes, no"),
]

COMBINATIONS = [
    flags(
        "a batch of broken groups",
        ["--global-batch-size", "20"],
        "global_batch_size = 20 (--global-batch-size) must be a multiple of number_generation = 8 (",
        "set number_generation to a divisor of 20",
    ),
    flags(
        "a call longer than the conversation",
        ["--max-length", "512", "--max-new-tokens", "512"],
        "max_new_tokens = 512 (--max-new-tokens) must be less than max_length = 512 (--max-length)",
    ),
    flags(
        "a conversation longer than a pass",
        ["--max-length", "1000000"],
        "max_length = 1000000 (--max-length) must not exceed micro_batch_tokens = ",
        "set micro_batch_tokens to at least 1000000",
    ),
    flags(
        "min_lr over lr", ["--lr", "1e-5", "--min-lr", "1e-4"], "min_lr = 0.0001 (--min-lr) must not exceed lr = 1e-05"
    ),
    flags(
        "a warm-up longer than the run", ["--max-steps", "3", "--warmup-steps", "4"], "must not exceed max_steps = 3"
    ),
    flags(
        "a call longer than its rollout",
        ["--call-timeout-s", "60", "--training-timeout", "30"],
        "call_timeout_s = 60 (--call-timeout-s) must be less than training_timeout = 30 (--training-timeout)",
    ),
    flags(
        "a rollout longer than the run", ["--max-runtime-s", "10"], "must be less than max_runtime_s = 10 (--max-run"
    ),
    Bad(
        name="a combination of a file and a variable",
        argv=[*RUN, "--config", "run.toml"],
        files={"run.toml": "audit_mean_tolerance = 0.5\n"},
        environ={"TURNMILL_AUDIT_MAX_TOLERANCE": "0.25"},
        says=["audit_mean_tolerance = 0.5 (run.toml:1)", "audit_max_tolerance = 0.25 (TURNMILL_AUDIT_MAX_TOLERANCE)"],
    ),
]

DATA = [
    rows("no object", "[1]\n", "tasks.jsonl:1:1: a row must be an object", "[object]"),
    rows("no JSON", GOOD + "{'id': 1}\n", "tasks.jsonl:2:2: not valid JSON", "[json]"),
    rows(
        "a stray key",
        GOOD.replace('"prompt"', '"level": 3, "prompt"'),
        "tasks.jsonl:1:26: metadata.level",
        "metadata.info",
    ),
    rows("a misspelled key", GOOD.replace("answer", "anwser"), "metadata.anwser: unknown key", "did you mean answer?"),
    rows("no prompt", '{"id": "a", "metadata": {}}\n', "tasks.jsonl:1: metadata.prompt: is missing [required]"),
    rows(
        "a number for an answer", GOOD.replace('"crane"', "7"), "metadata.answer: must be a string, not a number [type]"
    ),
    rows("an id given twice", GOOD + GOOD, 'tasks.jsonl:2: id: "a" is the id of line 1 already', "[duplicate_id]"),
    rows("a key given twice in a row", '{"id": "a", "id": "b"}\n', 'tasks.jsonl:1:13: id: the key "id" is given twice'),
    rows("NaN in a row", GOOD.replace('"crane"', "NaN"), "tasks.jsonl:1:", "NaN is not JSON", "[finite_number]"),
    rows("a cut-off last line", GOOD + GOOD[:40], "tasks.jsonl:2:", "the last line is cut off [truncated]"),
    rows("3 000 levels", '{"x":' * 3000 + "1" + "}" * 3000 + "\n", "nested deeper than 64 levels [nesting]"),
    rows(
        "an answer in some rows",
        GOOD + '{"id": "b", "metadata": {"prompt": "p"}}\n',
        "jsonl:2: metadata.answer: is missing",
    ),
    rows("UTF-16", GOOD.encode("utf-16"), "tasks.jsonl:1: the file is UTF-16 (bytes ff fe", "not UTF-8", "[encoding]"),
    rows("Latin-1", GOOD.replace("crane", "café").encode("latin-1"), "tasks.jsonl:1:", "byte 0xE9 at byte", '"é"'),
    rows("an empty file", "", "tasks.jsonl: the file is empty", "[empty_file]"),
    rows(
        "a bad role", '{"id": "a", "metadata": {"prompt": [{"role": "usr"}]}}\n', "prompt[0].role", "did you mean user?"
    ),
    Bad(name="no such file", argv=VALIDATE, says=["tasks.jsonl: no such file or directory [missing_file]"]),
    Bad(name="a folder", argv=["data", "validate", "folder"], says=["folder: is a folder", "[not_a_file]"]),
    Bad(name="another file name", argv=["data", "validate", "x.json"], files={"x.json": GOOD}, says=["end in .jsonl"]),
    Bad(
        name="training data that is not there",
        argv=["run", "--data", "none.jsonl"],
        says=["none.jsonl", "no such file"],
    ),
    Bad(
        name="bad training data",
        argv=["run", "--data", "bad.jsonl"],
        files={"bad.jsonl": GOOD + "nonsense\n"},
        says=["bad.jsonl:2:1: not valid JSON", "[json]"],
    ),
    Bad(
        name="a task that the environment can't play",
        argv=["run", "--data", "bad.jsonl"],
        files={"bad.jsonl": GOOD.replace("crane", "cranes")},
        says=["bad.jsonl: task a: metadata.answer must be five letters a-z, not 'cranes'"],
    ),
    Bad(
        name="bad held-out data",
        argv=[*RUN, "--eval-data", "bad.jsonl"],
        files={"bad.jsonl": GOOD + GOOD},
        says=["bad.jsonl:2: id: ", "[duplicate_id]"],
    ),
    Bad(
        name="bad data to evaluate on",
        argv=["eval", "wordle-tiny", "--data", "bad.jsonl"],
        files={"bad.jsonl": "{}\n"},
        says=["bad.jsonl:1: id: is missing [required]"],
    ),
]

COMMANDS = [
    Bad(name="an unknown command", argv=["statsu"], says=["No such command 'statsu'; did you mean status?"]),
    Bad(
        name="an unknown data command",
        argv=["data", "validat"],
        says=["No such command 'validat'; did you mean validate?"],
    ),
    Bad(name="run without data", argv=["run"], says=["Missing option '--data'"]),
    Bad(name="an argument too many", argv=[*RUN, "more"], says=["unexpected extra argument (more)"]),
    Bad(name="validate without a file", argv=["data", "validate"], says=["Missing argument 'FILE'"]),
    Bad(name="status of a run where none is", argv=["status", "run-1"], says=["there is no run 'run-1'"]),
    Bad(name="a model folder that is not there", argv=["eval", "./none", "--data", "good.jsonl"], says=["./none"]),
    Bad(
        name="a step of what is no run",
        argv=["eval", "wordle-tiny", "--step", "3", "--data", "good.jsonl"],
        says=["--step is for a run", "wordle-tiny"],
    ),
    Bad(name="neither a run nor a model", argv=["eval", "wordle-tin", "--data", "good.jsonl"], says=["wordle-tiny"]),
    Bad(
        name="a deployment's folder that can't be made",
        argv=[*RUN, "--root", "good.jsonl/root"],
        says=["--root good.jsonl/root: can't write there: not a directory"],
    ),
    Bad(
        name="a parameter that an evaluation has no use for",
        argv=["eval", "wordle-tiny", "--data", "good.jsonl", "--lr", "0.1"],
        says=["No such option '--lr'"],
    ),
    Bad(
        name="a model for an evaluation that names one already",
        argv=["eval", "wordle-tiny", "--data", "good.jsonl", "--base-model", "other"],
        says=["No such option '--base-model'"],
    ),
    Bad(name="a file for the deployment's folder", argv=["runs", "--root", "good.jsonl"], says=["--root", "is a file"]),
]

TABLE = [*CONFIGURATIONS, *COMBINATIONS, *DATA, *COMMANDS]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an environment without parameters."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("TURNMILL_"):
            monkeypatch.delenv(name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "good.jsonl").write_text(GOOD)
    return tmp_path


def write_files(place: Path, files: dict[str, str | bytes]) -> None:
    for name, content in files.items():
        (place / name).write_bytes(content.encode() if isinstance(content, str) else content)


@pytest.mark.parametrize("bad", TABLE, ids=[bad.name for bad in TABLE])
def test_a_bad_input_is_refused_with_its_message(
    bad: Bad, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_files(place, bad.files)
    for name, value in bad.environ.items():
        monkeypatch.setenv(name, value)
    before = sorted(place.iterdir())
    assert run_cli(turnmill, bad.argv) == 2
    captured = capsys.readouterr()
    text = captured.out if bad.argv[:2] == ["data", "validate"] and not captured.err else captured.err
    for fragment in bad.says:
        assert fragment in text
    assert "Traceback" not in captured.out + captured.err
    assert sorted(place.iterdir()) == before, "nothing may be made for a bad input"


# One of each kind: whichever way it is started, the command ends the same.
IN_A_PROCESS = [CONFIGURATIONS[0], CONFIGURATIONS[-1], COMBINATIONS[0], DATA[0], DATA[-1], COMMANDS[0]]


@pytest.mark.parametrize("bad", IN_A_PROCESS, ids=[bad.name for bad in IN_A_PROCESS])
def test_the_command_itself_refuses_it_too(bad: Bad, place: Path) -> None:
    write_files(place, bad.files)
    done = subprocess.run(
        [sys.executable, "-m", "turnmill", *bad.argv],
        env={**os.environ, **bad.environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    for fragment in bad.says:
        assert fragment in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def deployment_with_runs(root: Path, *run_ids: str) -> None:
    """The records of runs that have ended."""
    records = open_root_records(root)
    runs = [
        Run(
            run_id=run_id,
            cause="test",
            kind=RunKind.TRAIN,
            status=RunStatus.SUCCEEDED,
            created_at=time.time(),
            config={},
            sources={},
            data_path=TRAIN,
        )
        for run_id in run_ids
    ]
    try:
        asyncio.run(records.write([Write(key=run.key, value=encode(run), expected=0) for run in runs]))
    finally:
        records.close()


@pytest.mark.parametrize(
    "argv",
    [
        ["status", "20250101-1200-abce"],
        ["watch", "20250101-1200-abce"],
        ["eval", "20250101-1200-abce", "--data", TRAIN],
    ],
)
def test_an_unknown_run_names_the_closest_ones(
    argv: list[str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment_with_runs(place / "root", "20250101-1200-abcd", "zzz")
    assert run_cli(turnmill, [*argv, "--root", "root"]) == 2
    error = capsys.readouterr().err
    assert "there is no run '20250101-1200-abce' in root; did you mean 20250101-1200-abcd" in error
    assert "zzz" not in error and "Traceback" not in error


def test_the_table_is_large_enough_and_its_names_are_unique() -> None:
    assert len(TABLE) >= 30
    assert len({bad.name for bad in TABLE}) == len(TABLE)
