"""What is uploaded through the interface trains, and its figures are those of the records."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.accounts import check_accounting
from tests.e2e.processes import PARAMETERS, PATIENCE_S, start_turnmill, wait_for
from turnmill import assets
from turnmill.wiring.backend import backend_of

pytestmark = pytest.mark.slow


def ask(root: Path, method: str, path: str, data: bytes | None = None) -> bytes:
    url = json.loads((root / "control.json").read_text())["url"]
    token = (root / "control.token").read_text().strip()
    request = urllib.request.Request(url + path, data=data, method=method, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        body: bytes = answer.read()
    return body


def runs_of(root: Path) -> dict[str, dict[str, Any]]:
    return {run["upload"]: run for run in json.loads(ask(root, "GET", "/api/v1/runs"))["runs"]}


def test_an_upload_through_the_interface_trains_and_one_is_cancelled(tmp_path: Path) -> None:
    flags = [part for name, value in PARAMETERS.items() for part in (f"--{name}", value)]
    data = assets.wordle_data("train").read_bytes()
    with start_turnmill(tmp_path, ["up", "--root", str(tmp_path), *flags]) as running:
        wait_for("the interface", (tmp_path / "control.json").exists, running.process)
        ask(tmp_path, "PUT", "/api/v1/uploads/a.config.toml", b"max_steps = 1\n")
        ask(tmp_path, "PUT", "/api/v1/uploads/a.jsonl", data)
        wait_for("its end", lambda: runs_of(tmp_path).get("a.jsonl", {}).get("status") == "succeeded", running.process)
        run = runs_of(tmp_path)["a.jsonl"]
        text = ask(tmp_path, "GET", "/metrics").decode()
        ask(tmp_path, "PUT", "/api/v1/uploads/b.config.toml", b"seed = 5\n")
        ask(tmp_path, "PUT", "/api/v1/uploads/b.jsonl", data)
        wait_for("the other", lambda: runs_of(tmp_path).get("b.jsonl", {}).get("status") == "active", running.process)
        ask(tmp_path, "POST", f"/api/v1/runs/{runs_of(tmp_path)['b.jsonl']['run_id']}/cancel")
        wait_for("its end", lambda: runs_of(tmp_path)["b.jsonl"]["status"] == "cancelled", running.process)
        running.process.send_signal(signal.SIGINT)
        _, err = running.process.communicate(timeout=PATIENCE_S)
    assert running.process.returncode == 0, err
    check_accounting(tmp_path, run)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {
        (sample.labels["purpose"], sample.labels["state"]): sample.value
        for sample in samples
        if sample.name == "turnmill_run_samples" and sample.labels["run"] == run["run_id"]
    }
    assert found == {
        (purpose, state): number
        for (purpose, state), number in backend_of(tmp_path).reader(run["run_id"]).samples().items()
    }
    (generated,) = [sample.value for sample in samples if sample.name == "turnmill_run_rollouts_total"][:1]
    assert generated == run["num_generated"]
    log = (tmp_path / "logs" / "control.log").read_text()
    assert (tmp_path / "control.token").read_text().strip() not in log and not (tmp_path / "control.json").exists()
