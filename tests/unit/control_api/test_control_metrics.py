"""`/metrics` is what Prometheus can read, its figures are those of the records, and it costs little to ask."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.unit.control_api.conftest import made_run, made_sample, play, served, store
from turnmill.backends.embedded import open_root_records, open_run
from turnmill.backends.embedded.restarts import note_restart
from turnmill.control_api.exposition import MOST_OPEN, NUM_ENDED, Exposition
from turnmill.control_api.sparing import Sparing
from turnmill.ports import Message, Write
from turnmill.records import (
    Alert,
    AlertKind,
    Cause,
    Metric,
    Purpose,
    ReplicaState,
    ReplicaStatus,
    RunStatus,
    SampleState,
    Severity,
    Version,
    encode,
    replica_key,
)
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import began

LIVING: dict[str, Any] = {"pid": os.getpid(), "pid_began": began(os.getpid())}


class Scrape:
    """The samples of a text, as Prometheus' own parser reads it."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        (found,) = [sample.value for sample in self.samples if (sample.name, sample.labels) == (name, labels)]
        return found

    def labelled(self, name: str) -> Iterator[dict[str, str]]:
        yield from (sample.labels for sample in self.samples if sample.name == name)


def scrape(root: Path) -> Scrape:
    return Scrape(Exposition(root).text().decode())


async def test_an_empty_deployment_has_figures(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        answer = await client.get("/metrics")
    assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = Scrape(answer.body.decode())
    assert (
        found.value("turnmill_runs", status="active") == 0
        and found.value("turnmill_uploads_total", outcome="taken") == 0
    )
    assert found.value("process_cpu_seconds_total") > 0 and found.value("process_resident_memory_bytes") > 0


async def test_names_follow_the_conventions_and_each_family_says_what_it_is(tmp_path: Path) -> None:
    await store(tmp_path, made_run(**LIVING))
    await play(tmp_path, made_run(), num_steps=1, samples={SampleState.TRAINED: 1})
    text = Exposition(tmp_path).text().decode()
    for name, family in Scrape(text).families.items():
        assert family.documentation, name
        assert name.startswith(("turnmill_", "process_")), name
        for sample in family.samples:
            assert family.type != "counter" or sample.name.endswith("_total"), sample.name
            assert not sample.name.endswith(("_ms", "_s")), "base units, written out"


async def test_the_last_evaluation_while_a_run_trains_has_figures_of_its_own(tmp_path: Path) -> None:
    run = made_run(**LIVING)
    await store(tmp_path, run)
    await play(tmp_path, run, num_steps=2, samples={})
    assert not list(scrape(tmp_path).labelled("turnmill_run_held_out_solve_ratio"))
    ports = open_run(tmp_path, "one", num_replicas=1)
    for step, solved in ((0, 0.1), (1, 0.25)):
        values = {"val_solved": solved, "val_reward_mean": 0.5}
        await ports.metrics.write(Metric(run_id="one", step=step, time=100.0, values=values))
    ports.close()
    found = scrape(tmp_path)
    assert found.value("turnmill_run_held_out_solve_ratio", run="one") == 0.25
    assert found.value("turnmill_run_held_out_reward_mean", run="one") == 0.5
    assert found.value("turnmill_run_held_out_step", run="one") == 1
    assert found.value("turnmill_run_step", run="one") == 2


async def test_figures_of_a_run_are_those_of_its_records(tmp_path: Path) -> None:
    run = made_run(**LIVING)
    await store(tmp_path, run, made_run("waits", status=RunStatus.QUEUED, stages=()))
    await play(
        tmp_path, run, num_steps=2, samples={SampleState.TRAINED: 5, SampleState.LEASED: 2, SampleState.INVALID: 1}
    )
    ports = open_run(tmp_path, "one", num_replicas=1)
    await ports.rollout_request.send([Message(body=b"x", group=name, dedup_id=None) for name in "abc"])
    await ports.rollout_request.lease(max_messages=1, lease_s=60)
    status = ReplicaStatus(
        run_id="one",
        replica="replica-0",
        version=Version(incarnation=1, n=2),
        fingerprints={},
        updated_at=103.0,
        pid=1,
        state=ReplicaState.DRAINING,
    )
    await ports.records.write([Write(key=replica_key("one", "replica-0"), value=encode(status), expected=0)])
    ports.close()
    for role in ("replica-0", "worker-0", "replica-0"):
        note_restart(tmp_path / "runs" / "one" / "restarts.jsonl", role, -9)
    found = scrape(tmp_path)
    assert found.value("turnmill_runs", status="active") == 1 == found.value("turnmill_runs", status="queued")
    (info,) = [labels for labels in found.labelled("turnmill_run_info") if labels["run"] == "one"]
    assert (info["status"], info["kind"], info["upload"]) == ("active", "train", "one.jsonl")
    assert found.value("turnmill_run_step", run="one") == 2 and found.value("turnmill_run_max_steps", run="one") == 3
    assert found.value("turnmill_run_reward_mean", run="one") == 0.2
    assert found.value("turnmill_run_solve_ratio", run="one") == 0.1
    assert found.value("turnmill_run_last_step_timestamp_seconds", run="one") == 102.0
    assert found.value("turnmill_run_generated_tokens_total", run="one") == 2 * 8 * 2.5
    assert found.value("turnmill_run_rollouts_total", run="one", outcome="valid") == 16
    assert found.value("turnmill_run_rollouts_total", run="one", outcome="invalid") == 2
    assert found.value("turnmill_run_stage", run="one", stage="SubmitTraining", state="running") == 1
    assert found.value("turnmill_run_stage_seconds", run="one", stage="SubmitTraining") >= 7
    for (purpose, sample_state), number in backend_of(tmp_path).reader("one").samples().items():
        assert found.value("turnmill_run_samples", run="one", purpose=purpose, state=sample_state) == number
    assert found.value("turnmill_run_samples", run="one", purpose="train", state="trained") == 5
    assert found.value("turnmill_run_role_restarts_total", run="one", role="replica-0") == 2
    replica = {"run": "one", "replica": "replica-0"}
    assert found.value("turnmill_replica", **replica, state="draining", version="1.2") == 1
    assert found.value("turnmill_replica_heard_timestamp_seconds", **replica) == 103.0
    for state, number in (("available", 2), ("in_flight", 1), ("delayed", 0), ("dead", 0)):
        assert found.value("turnmill_queue_messages", run="one", queue="rollout_request", state=state) == number
    assert found.value("turnmill_queue_sent_messages_total", run="one", queue="rollout_request") == 3
    assert found.value("turnmill_queue_oldest_message_age_seconds", run="one", queue="rollout_request") >= 0
    assert "waits" not in {labels["run"] for labels in found.labelled("turnmill_queue_messages")}


async def test_uploads_and_alerts_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    alert = Alert(
        alert_id="1",
        kind=AlertKind.RUN_FAILED,
        severity=Severity.ERROR,
        created_at=1.0,
        summary="it failed",
        command="turnmill status",
    )
    alerts = [alert, replace(alert, alert_id="2"), replace(alert, alert_id="3", resolved_at=2.0)]
    causes = [
        Cause(cause=f"c{index}", bucket="bucket", created_at=1.0, run_id="r" if index else None) for index in range(4)
    ]
    records = open_root_records(tmp_path)
    await records.write([Write(key=item.key, value=encode(item), expected=0) for item in alerts])
    await records.write([Write(key=item.key, value=encode(item), expected=0) for item in causes])
    records.close()
    found = scrape(tmp_path)
    assert found.value("turnmill_alerts", kind="run_failed", severity="error", state="open") == 2
    assert found.value("turnmill_alerts", kind="run_failed", severity="error", state="resolved") == 1
    assert found.value("turnmill_uploads_total", outcome="taken") == 3
    assert found.value("turnmill_uploads_total", outcome="ignored") == 1


async def test_however_many_runs_there_were_some_have_series(tmp_path: Path) -> None:
    ended = [made_run(f"e{index:03d}", status=RunStatus.SUCCEEDED, ended_at=float(index)) for index in range(60)]
    waits = [made_run(f"w{index:03d}", status=RunStatus.QUEUED, created_at=100.0 + index) for index in range(60)]
    await store(tmp_path, *ended, *waits, made_run("now", created_at=1.0, **LIVING))
    found = scrape(tmp_path)
    shown = {labels["run"] for labels in found.labelled("turnmill_run_info")}
    assert len(shown) == MOST_OPEN + NUM_ENDED and {"now", "w059", "e059"} <= shown and "e000" not in shown
    assert found.value("turnmill_runs", status="succeeded") == 60 == found.value("turnmill_runs", status="queued")


async def test_a_run_whose_files_are_damaged_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await store(tmp_path, made_run("bad", **LIVING), made_run("good", **LIVING))
    (tmp_path / "runs" / "bad" / "records").mkdir(parents=True)
    (tmp_path / "runs" / "bad" / "records" / "samples.db").write_bytes(b"no database" * 1000)
    found = scrape(tmp_path)
    assert (
        found.value("turnmill_run_unreadable", run="bad") == 1
        and found.value("turnmill_run_unreadable", run="good") == 0
    )
    assert "the figures of run bad can't be read" in caplog.text


async def test_steps_that_come_and_that_are_given_up_change_the_figures(tmp_path: Path) -> None:
    run = made_run(**LIVING)
    await store(tmp_path, run)
    await play(tmp_path, run, num_steps=2, samples={})
    exposition = Exposition(tmp_path)
    assert Scrape(exposition.text().decode()).value("turnmill_run_step", run="one") == 2
    await play(tmp_path, run, num_steps=1, samples={})
    assert scrape(tmp_path).value("turnmill_run_step", run="one") == 1
    await asyncio.sleep(1.05)  # as long as figures count as fresh
    assert Scrape(exposition.text().decode()).value("turnmill_run_step", run="one") == 1


def test_what_takes_long_is_looked_at_less_often_and_by_one_at_a_time() -> None:
    looks: list[float] = []

    def look() -> int:
        looks.append(time.monotonic())
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return len(looks)

    sparing = Sparing(look, fresh_s=0.0, share=0.05)
    threads = [threading.Thread(target=sparing) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sparing() == 1 and len(looks) == 1
    quick = Sparing(lambda: looks.append(0.0), fresh_s=0.0, share=1e9)
    for _ in range(3):
        quick()
    assert len(looks) == 4


def test_a_look_that_failed_is_done_again() -> None:
    answers = [ValueError("now"), 7]

    def look() -> object:
        if isinstance(answer := answers.pop(0), ValueError):
            raise answer
        return answer

    sparing = Sparing(look, fresh_s=60.0, share=1.0)
    with pytest.raises(ValueError, match="now"):
        sparing()
    assert sparing() == 7 == sparing()


async def test_counted_samples_are_those_of_each_purpose(tmp_path: Path) -> None:
    ports = open_run(tmp_path, "one", num_replicas=1)
    made = [made_sample("one", f"s{index}", SampleState.REPORTED, Purpose.EVAL) for index in range(3)]
    made.append(made_sample("one", "s", SampleState.REPORTED))
    await ports.records.write([Write(key=item.key, value=encode(item), expected=0) for item in made])
    assert backend_of(tmp_path).reader("one").samples() == {
        (Purpose.EVAL, SampleState.REPORTED): 3,
        (Purpose.TRAIN, SampleState.REPORTED): 1,
    }
    ports.close()
