"""Runs whose environment is a package of verifiers, as users start them: in its box, found by `vf_env_id`."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.processes import start_run, start_turnmill
from tests.unit.environment.verifiers_house import PACKAGES, needs_verifiers

pytestmark = [needs_verifiers, pytest.mark.slow, pytest.mark.timeout(300)]


def deployment(tmp_path: Path, package: str) -> Path:
    """A deployment with the package, and tasks for it beside; the file of tasks."""
    root = tmp_path / "deployment"
    shutil.copytree(PACKAGES / package, root / "custom-environments" / package)
    tasks = tmp_path / "tasks.jsonl"
    answers = [json.dumps({"endpoint": f"/users/{number}", "params": {"limit": number}}) for number in range(8)]
    tasks.write_text(
        "".join(
            json.dumps({"id": f"call-{number}", "metadata": {"prompt": "Write the call.", "answer": answer}}) + "\n"
            for number, answer in enumerate(answers)
        )
    )
    return tasks


def variables(package: str) -> dict[str, str]:
    # Also where nothing can close a box.
    return {"TURNMILL_UNSAFE_ENV": "1", "TURNMILL_VF_ENV_ID": package}


def test_a_reward_that_swallows_its_error_stops_the_run_before_anything_is_trained(tmp_path: Path) -> None:
    tasks = deployment(tmp_path, "always-zero")
    with start_run(tmp_path / "deployment", data=tasks, env=variables("always-zero")) as running:
        _, said = running.process.communicate(timeout=280)
    assert running.process.returncode != 0
    assert "call_reward weighs most, and gives 0 for each gold answer" in " ".join(said.split())
    assert "stage StartGeneration" not in said


def test_mended_it_is_played_with_the_model_to_its_end(tmp_path: Path) -> None:
    root, tasks = tmp_path / "deployment", deployment(tmp_path, "always-zero-mended")
    command = ["eval", "wordle-tiny", "--json", "--root", str(root), "--data", str(tasks)]
    command += ["--max-length", "700", "--eval-rollouts", "4"]
    with start_turnmill(root, command, variables("always-zero-mended")) as running:
        figures = running.finish(patience_s=280)
    # Such a small model writes no call: only a part of the format earns something, and it is valid all the same.
    found = figures["evaluations"]["eval"]
    assert (figures["status"], found["num_valid"], found["num_invalid"]) == ("succeeded", 8, 0)
    assert found["metrics"].keys() == {"call_reward", "format_reward_func", "num_turns"}
    assert 0.0 < found["reward_mean"] < 0.3
