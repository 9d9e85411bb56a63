"""Makes src/turnmill/config/reads.json: which parameters are read, in which kind of run, with which choices.

python scripts/generate_reads.py                 makes real runs of every mode and writes the table (minutes)
python scripts/generate_reads.py --keep FOLDER   and keeps what each read there: who is cut short goes on from it
python scripts/generate_reads.py --only NAME     makes one of them alone and compares; exit code 1 where it differs
python scripts/generate_reads.py --list          names them

Each run is a small one of a shipped tiny model, as users start it, in processes of its own that write down what they
read (`turnmill.config.recording`). One parameter at a time is changed from the run that all others are compared with:
so what else is read, or read no more, follows from that choice. Runs with several changes at once, in other
environments too, show what is read with all of these alone. The run of an external trainer is that of a test, on an
emulator of AWS. Needs the extras `train`, `verifiers` and `dev`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from turnmill import assets
from turnmill.config import ENVIRONMENT_PARAMETERS, describe, to_dict
from turnmill.config.reads import TABLE, Reads, reads, state_of
from turnmill.config.recording import READS, read_notes
from turnmill.records import RunKind
from turnmill.wiring.running.control import resolve

ROOT = Path(__file__).parent.parent
PACKAGES = ROOT / "custom-environments"
# Of environments that only tests have.
FIXTURES = ROOT / "tests" / "fixtures" / "custom-environments"
TIMEOUT_S = 900.0
# Small; of what is not changed below, all that a small run can do.
SMALL = {
    "max_steps": "2",
    "global_batch_size": "8",
    "number_generation": "4",
    "max_refill_rounds": "20",
    "eval_rollouts": "4",
    "baseline_rollouts": "8",
    "baseline_max_rollouts": "8",
    "ignore_baseline": "true",
    "save_steps": "1",
    # Without any, one of the precisions is refused.
    "audit_mean_tolerance": "0.02",
    "audit_max_tolerance": "1",
}
# Its proxy and its worker are processes here; its trainer is played by the test.
EXTERNAL_RUN = ("pytest", "-q", "-p", "no:cacheprovider", "tests/aws/test_conformance.py", "-k", "side_by_side")
# Parameters without choices on which it depends what else is read.
SWITCHES = {
    "kl_coeff": "0.01",
    "ent_coeff": "0.01",
    "ppo_epochs": "2",
    "ppo_minibatches": "2",
    "gradient_checkpointing": "true",
    "generation_replicas": "2",
    "val_every": "1",
    "val_temperature": "0",
    "baseline_rollouts": "0",
    "max_useless_groups": "1000",
    "budget_tokens": "100000000",
    "budget_usd": "100",
    "watchdog_s": "4000",
    "shuffle": "true",
}
EVALUATION_SWITCHES = {"val_temperature": "0", "budget_tokens": "100000000"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched:
    """One run that is made."""

    name: str
    kind: RunKind = RunKind.TRAIN
    # Beside `SMALL`: what the run is made for.
    changes: Mapping[str, str] = field(default_factory=dict)
    # What the environment needs.
    needs: Mapping[str, str] = field(default_factory=dict)
    # Of the environment, where it is none of the built-in ones.
    package: Path | None = None
    # Of the package; None: those of Wordle.
    tasks: Path | None = None
    # Of an evaluation.
    model: str = "wordle-tiny"

    @property
    def settings(self) -> dict[str, str]:
        shared = {RunKind.TRAIN: SMALL, RunKind.EVAL: {"eval_rollouts": "4"}, RunKind.EXTERNAL: {}}[self.kind]
        return {**shared, **self.needs, **self.changes}

    def values(self) -> dict[str, object]:
        """All its parameters, those of the model's recipe included."""
        return to_dict(resolve(file=None, environ={}, flags=self.settings).config)


# Several changes at once. They only add to the table: what else they read.
COMBINED = (
    Watched(
        name="adapter beside rollouts",
        changes={"training_method": "RFT_MULTITURN_LORA", "rollout_strategy": "off_policy_async"},
    ),
    Watched(
        name="sequences beside rollouts",
        changes={
            "rollout_strategy": "off_policy_async",
            "loss_fn": "gspo",
            "mismatch_correction": "sequence_mask",
            "ppo_minibatches": "2",
        },
    ),
    Watched(name="reference that is renewed", changes={"kl_coeff": "0.01", "kl_refresh_steps": "1"}),
    Watched(
        name="rewards per group",
        changes={"use_custom_env": "true", "group_rewards": "true"},
        needs={"custom_env_id": "other-openings"},
        package=FIXTURES / "other-openings",
    ),
    Watched(
        name="eval custom environment",
        kind=RunKind.EVAL,
        changes={"use_custom_env": "true"},
        needs={"max_length": "1024"},
        package=PACKAGES / "my-custom-env",
        tasks=PACKAGES / "my-custom-env" / "data" / "eval.jsonl",
        model="sql-tiny",
    ),
    Watched(
        name="eval verifiers",
        kind=RunKind.EVAL,
        changes={"vf_env_id": "always-zero-mended"},
        needs={"max_length": "700"},
        package=FIXTURES / "always-zero-mended",
        tasks=FIXTURES / "always-zero-mended" / "tasks.jsonl",
    ),
)


def all_runs() -> list[Watched]:
    """The plain ones, one for each choice that something may depend on, and those that are combined."""
    found = [Watched(name=kind.value, kind=kind) for kind in RunKind]
    plain = found[0].values()
    for parameter in describe():
        for choice in parameter.choices:
            if choice != plain[parameter.name]:
                changes = {parameter.name: choice}
                found.append(Watched(name=f"{parameter.name}={choice}", changes=changes))
    found += [Watched(name=f"{name}={value}", changes={name: value}) for name, value in SWITCHES.items()]
    found += [
        Watched(name=f"eval {name}={value}", kind=RunKind.EVAL, changes={name: value})
        for name, value in EVALUATION_SWITCHES.items()
    ]
    return [*found, *COMBINED]


def watch(run: Watched) -> list[str]:
    """Make the run; the parameters that it read."""
    with tempfile.TemporaryDirectory(prefix="turnmill-reads-") as name:
        folder = Path(name)
        command = [sys.executable, "-m", *(EXTERNAL_RUN if run.kind is RunKind.EXTERNAL else _command(run, folder))]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("TURNMILL_")}
        # The environments are the repository's own: they may be played where nothing can close a box, too.
        environ |= {READS: str(folder), "PYTHONPATH": str(ROOT / "src"), "TURNMILL_UNSAFE_ENV": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if done.returncode:
            raise SystemExit(f"the run {run.name} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
        notes = read_notes(folder)
        return sorted(parameter for parameter, readers in notes.items() if any(map(_counts, readers)))


def _command(run: Watched, folder: Path) -> list[str]:
    """Of a run as users start it, in `folder`."""
    config, root = folder / "run.toml", folder / "root"
    config.write_text("".join(f"{key} = {_toml(key, value)}\n" for key, value in run.settings.items()))
    if run.package is not None:
        shutil.copytree(run.package, root / "custom-environments" / run.package.name)
    held_out = str(run.tasks or assets.wordle_data("eval"))
    if run.kind is RunKind.TRAIN:
        command = ["turnmill", "run", "--data", str(run.tasks or assets.wordle_data("train")), "--eval-data", held_out]
    else:
        command = ["turnmill", "eval", run.model, "--data", held_out]
    return [*command, "--json", "--root", str(root), "--config", str(config)]


def _counts(reader: str) -> bool:
    """Whether it does something with a parameter; commands and figures about a run only show them."""
    return not reader.startswith(("turnmill.cli.", "turnmill.wiring.reading."))


def _toml(name: str, text: str) -> str:
    kind = next(parameter.kind for parameter in describe() if parameter.name == name)
    return json.dumps(text) if kind in (str, tuple) else text


def ways_of(name: str, found: Mapping[Watched, Collection[str]]) -> list[dict[str, list[str]]]:
    """In which ways runs read the parameter; `found` are those of one kind, the plain one first.

    Read by the plain run: always but with the choices that stop it. Not read by it: with each choice that brings it.
    What is read with several choices alone comes on top, with all of them.
    """
    plain, *others = [run for run in found if run not in COMBINED]
    ways = _by_single_choices(name, plain, others, found)
    told = Reads(name=name, ways={plain.kind: ways})
    for run in found:
        if run in COMBINED and name in found[run] and not told.is_read(run.kind, run.values()):
            ways.append({changed: [state_of(changed, run.values()[changed])] for changed in run.changes})
    return ways


def _by_single_choices(
    name: str, plain: Watched, others: Sequence[Watched], found: Mapping[Watched, Collection[str]]
) -> list[dict[str, list[str]]]:
    """The ways that `others` show, each of which differs from the plain run in one choice."""
    if name in found[plain]:
        way: dict[str, list[str]] = {}
        for run in others:
            if name not in found[run]:
                (changed,) = run.changes
                way[changed] = []
        for changed in way:
            states = [
                state_of(changed, run.values()[changed])
                for run in (plain, *others)
                if name in found[run] and (run is plain or changed in run.changes)
            ]
            way[changed] = list(dict.fromkeys(states))
        return [way]
    ways: dict[str, list[str]] = {}
    for run in others:
        if name in found[run]:
            (changed,) = run.changes
            ways.setdefault(changed, []).append(state_of(changed, run.values()[changed]))
    return [{changed: list(dict.fromkeys(states))} for changed, states in ways.items()]


def table_of(found: Mapping[Watched, Collection[str]]) -> dict[str, dict[str, list[dict[str, list[str]]]]]:
    """The whole table."""
    by_kind = {kind: {run: names for run, names in found.items() if run.kind is kind} for kind in RunKind}
    return {
        parameter.name: {kind.value: ways_of(parameter.name, runs) for kind, runs in by_kind.items()}
        for parameter in describe()
        # About these there are rules of their own (`turnmill.config.combinations`).
        if parameter.name not in ENVIRONMENT_PARAMETERS
    }


def written(table: Mapping[str, Mapping[str, object]]) -> str:
    """As the file holds it: one parameter a line."""
    rows = [f"  {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in table.items()]
    return "{\n" + ",\n".join(rows) + "\n}\n"


def differences(run: Watched, names: Collection[str]) -> list[str]:
    """Where the table says something else than the run did."""
    values = run.values()
    told = {name for name, entry in reads().items() if entry.is_read(run.kind, values)}
    found = {name for name in names if name in reads()}
    return [
        *(f"{name}: read by {run.name}, and by the table it is not" for name in sorted(found - told)),
        *(f"{name}: not read by {run.name}, and by the table it is" for name in sorted(told - found)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make the table of who reads which parameter from real runs.")
    parser.add_argument("--only", metavar="NAME", help="make this run alone, and compare it with the table")
    parser.add_argument("--list", action="store_true", help="name the runs")
    parser.add_argument("--keep", metavar="FOLDER", type=Path, help="where the results are kept, and looked for first")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once [default: 2]")
    given = parser.parse_args(arguments)
    runs = {run.name: run for run in all_runs()}
    if given.list:
        print("\n".join(runs))
        return 0
    if given.only is not None:
        found = differences(runs[given.only], watch(runs[given.only]))
        print("\n".join(found) or f"{given.only}: as the table says")
        return 1 if found else 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(given.jobs) as pool:
        folder = given.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        results = list(pool.map(lambda run: _kept(run, folder), runs.values()))
    TABLE.write_text(written(table_of(dict(zip(runs.values(), results, strict=True)))), encoding="utf-8")
    return 0


def _kept(run: Watched, folder: Path) -> list[str]:
    """What the run read, as an earlier one wrote it down or from the run itself."""
    file = folder / f"{run.name}.json"
    if not file.exists():
        names = watch(run)
        print(f"{run.name}: {len(names)} parameters read", file=sys.stderr, flush=True)
        file.write_text(json.dumps(names), encoding="utf-8")
    found: list[str] = json.loads(file.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    sys.exit(main())
