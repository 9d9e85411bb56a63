"""The rules of the doctor, on snapshots."""

import time
from dataclasses import replace
from typing import Any

import pytest

from turnmill.health.diagnosis import BUDGET, DATA, DISK, ENVIRONMENT, examine
from turnmill.health.report import Diagnosis, Verdict
from turnmill.health.snapshot import (
    CONTROL,
    TRAINER,
    ProcessState,
    ProcessView,
    QueueView,
    SamplesView,
    Snapshot,
    Troubled,
)
from turnmill.records import ErrorClass, ReplicaState, ReplicaStatus, Run, RunStatus, StageRecord, Version

LIMIT_S = 100.0
RUN = Run(
    run_id="r1",
    cause="test/r1",
    status=RunStatus.ACTIVE,
    created_at=time.time(),
    config={"worker_lease_s": 15.0},
    sources={},
    data_path="tasks.jsonl",
    pid=100,
    stages=(StageRecord(name="SubmitTraining", state="running", started_at=0.0),),
)
NAMES = (CONTROL, "replica-0", "worker-0", TRAINER)


def view(name: str, state: ProcessState = ProcessState.ALIVE) -> ProcessView:
    pid = None if state is ProcessState.GONE else 100 + NAMES.index(name)
    return ProcessView(name=name, state=state, pid=pid, cores=None if pid is None else 0.0)


def processes(**states: ProcessState) -> tuple[ProcessView, ...]:
    """All that a run needs while it trains, alive but for those named (`_` for `-`)."""
    found = {name.replace("_", "-"): state for name, state in states.items()}
    return tuple(view(name, found.get(name, ProcessState.ALIVE)) for name in NAMES)


def serving(incarnation: int, n: int, **changes: Any) -> dict[str, ReplicaStatus]:
    """What the only replica says of itself."""
    status = ReplicaStatus(
        run_id="r1",
        replica="replica-0",
        version=Version(incarnation=incarnation, n=n),
        fingerprints={},
        updated_at=0.0,
        pid=101,
    )
    return {"replica-0": replace(status, **changes)}


MOVING = Snapshot(
    run=RUN,
    root=".turnmill",
    at=0.0,
    idle_s=3.0,
    stall_after_s=LIMIT_S,
    processes=processes(),
    logs={"worker-0": tuple(f"line {number}" for number in range(20))},
    queues={
        "rollout_request": QueueView(available=3, in_flight=2, renewed_ago_s=1.0, most_received="t_0", num_receives=1),
        "generate_request-0": QueueView(in_flight=2, renewed_ago_s=1.0),
        "rollout_response": QueueView(),
    },
    samples=SamplesView(by_state={"requested": 3, "leased": 2}),
    replicas=serving(1, 4),
    current=Version(incarnation=1, n=4),
    current_age_s=50.0,
    free_bytes=10 << 30,
    free_files=100000,
)
STALLED = replace(MOVING, idle_s=LIMIT_S)


def roles(seen: Snapshot) -> list[str]:
    return [diagnosis.role for diagnosis in examine(seen).diagnoses]


def queues(**changes: QueueView) -> dict[str, QueueView]:
    """Empty ones, but for those named (`generate` is that of the first replica)."""
    names = {"generate": "generate_request-0"}
    empty = {name: QueueView() for name in MOVING.queues}
    return empty | {names.get(name, name): queue for name, queue in changes.items()}


# ---------------------------------------------------------------- no false alarms


@pytest.mark.parametrize("idle_s", [0.0, 60.0, LIMIT_S - 1])
def test_what_waits_for_less_than_the_limit_is_no_stall(idle_s: float) -> None:
    """A long rollout, call, evaluation or step: queues, leases and batches look as in a stall, only not as long."""
    report = examine(replace(MOVING, idle_s=idle_s, has_recorded_batch=True))
    assert (report.verdict, report.diagnoses) == (Verdict.PROGRESSING, ())
    assert report.verdict.is_healthy


def test_a_replica_that_still_finishes_calls_with_the_weights_before_is_not_blamed() -> None:
    replicas = serving(1, 3)
    assert roles(replace(MOVING, replicas=replicas, current_age_s=1.0, idle_s=1.0)) == []
    assert roles(replace(MOVING, replicas=replicas, idle_s=1.0)) == []


def test_messages_that_came_twice_are_no_poison() -> None:
    assert roles(replace(MOVING, queues=queues(generate=QueueView(available=1, num_receives=2)))) == []


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("name", NAMES)
def test_a_stopped_process_is_named_first_whatever_waits_behind_it(name: str) -> None:
    for seen in (MOVING, STALLED):
        states = {name.replace("-", "_"): ProcessState.STOPPED}
        found = examine(replace(seen, processes=processes(**states)))
        assert found.diagnoses[0].role == name
        assert found.diagnoses[0].commands == (f"kill -CONT {100 + NAMES.index(name)}",)
        assert not found.verdict.is_healthy


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_process_that_is_gone_is_named_with_its_last_lines(name: str) -> None:
    states = {name.replace("-", "_"): ProcessState.GONE}
    (found,) = examine(replace(MOVING, processes=processes(**states))).diagnoses
    assert found.role == name
    assert name != "worker-0" or found.log_lines[:8] == MOVING.logs["worker-0"][-8:]


def test_the_processes_of_a_control_that_is_gone_are_not_blamed_for_ending() -> None:
    run = replace(RUN, status=RunStatus.INTERRUPTED)
    gone = tuple(view(name, ProcessState.GONE) for name in NAMES)
    report = examine(replace(MOVING, run=run, processes=gone))
    assert [diagnosis.role for diagnosis in report.diagnoses] == [CONTROL]
    assert report.diagnoses[0].commands == ("turnmill resume r1 --root .turnmill",)


def test_a_full_disk_comes_before_all_that_it_brings_down() -> None:
    assert roles(replace(MOVING, free_bytes=4096, processes=processes(trainer=ProcessState.GONE)))[0] == DISK
    assert roles(replace(MOVING, free_files=0)) == [DISK]


def test_a_disk_that_was_full_when_control_ended_is_named_before_control() -> None:
    run = replace(RUN, status=RunStatus.INTERRUPTED)
    gone = tuple(view(name, ProcessState.GONE) for name in NAMES)
    logs = {CONTROL: ("ERROR runs.db can't grow: the disk is full; free some space and try again",)}
    assert roles(replace(MOVING, run=run, processes=gone, logs=logs)) == [DISK, CONTROL]
    # It ended between the look at processes and that at the record.
    assert roles(replace(MOVING, run=run, logs=logs)) == [DISK, CONTROL]
    assert roles(replace(MOVING, logs=logs)) == []


def test_a_message_that_nobody_survives_is_named_by_its_id() -> None:
    poison = QueueView(available=1, most_received="t_7", num_receives=3, num_often=1)
    gone = processes(worker_0=ProcessState.GONE)
    assert roles(replace(MOVING, queues=queues(rollout_request=poison), processes=gone))[0] == "message t_7"


def test_messages_that_share_the_deaths_of_their_consumer_are_not_blamed_for_them() -> None:
    shared = QueueView(available=9, most_received="t_7", num_receives=5, num_often=9)
    gone = processes(worker_0=ProcessState.GONE)
    assert roles(replace(MOVING, queues=queues(rollout_request=shared), processes=gone)) == ["worker-0"]


def test_a_replica_that_says_that_it_refuses_the_current_weights_is_named() -> None:
    logs = {"replica-0": ("ERROR weights/versions/1.4/model.safetensors is damaged",)}
    seen = replace(MOVING, replicas=serving(0, 0), logs=logs, idle_s=20.0)
    (found,) = examine(seen).diagnoses
    assert found.role == "replica-0" and "does not take 1.4" in found.summary


def test_a_replica_whose_memory_is_not_what_was_published_is_named_with_what_it_found() -> None:
    error = "its memory does not hold version 1.4: the fingerprint is aa, published was bb (weights/1.4)"
    refused = serving(0, 0, state=ReplicaState.STOPPED, error=error, num_refusals=1)
    for seen in (MOVING, replace(MOVING, replicas=refused), replace(MOVING, replicas=serving(1, 4, error=None))):
        found = examine(seen).diagnoses
        assert [diagnosis.role for diagnosis in found] == (["replica-0"] if seen.replicas is refused else [])
    assert error in examine(replace(MOVING, replicas=refused)).diagnoses[0].summary


# ---------------------------------------------------------------- suspects of a stall


def test_a_stall_with_live_leases_and_no_call_is_the_environment_s() -> None:
    troubled = Troubled(key="samples/r1/train/t_1", sample_id="t_1", reason="env_error", detail="not done after 8 s")
    seen = replace(
        STALLED,
        queues=queues(rollout_request=QueueView(in_flight=4, renewed_ago_s=2.0)),
        samples=SamplesView(by_state={"leased": 4}, invalid=troubled),
    )
    (found,) = examine(seen).diagnoses
    assert (found.role, found.conversation) == (ENVIRONMENT, troubled.key)
    assert any("not done after 8 s" in fact for fact in found.evidence)


def test_a_worker_that_neither_is_stopped_nor_renews_its_leases_is_blocked_by_its_environment() -> None:
    waiting = queues(rollout_request=QueueView(available=4))
    (found,) = examine(replace(STALLED, queues=waiting, samples=SamplesView(by_state={"leased": 4}))).diagnoses
    assert found.role == ENVIRONMENT and "blocks its event loop" in found.summary


def test_requests_that_nobody_ever_took_are_the_worker_s() -> None:
    waiting = queues(rollout_request=QueueView(available=4))
    assert roles(replace(STALLED, queues=waiting, samples=SamplesView(by_state={"requested": 4}))) == ["worker-0"]


def test_a_backlog_of_calls_is_the_replica_s() -> None:
    assert roles(replace(STALLED, queues=queues(generate=QueueView(available=7)))) == ["replica-0"]


def test_a_backlog_of_ended_samples_is_the_trainer_s() -> None:
    assert roles(replace(STALLED, queues=queues(rollout_response=QueueView(available=7)))) == [TRAINER]


def test_where_nothing_is_open_the_trainer_is_to_move() -> None:
    idle = replace(STALLED, queues=queues(), samples=SamplesView())
    assert roles(idle) == [TRAINER]
    assert "recorded batch" in examine(replace(idle, has_recorded_batch=True)).diagnoses[0].summary


@pytest.mark.parametrize(("stage", "name"), [("StartGeneration", "replica-0"), ("StartRewardWorkers", "worker-0")])
def test_a_process_that_never_becomes_ready_holds_its_stage_up(stage: str, name: str) -> None:
    run = replace(RUN, stages=(StageRecord(name=stage, state="running", started_at=0.0),))
    assert roles(replace(STALLED, run=run)) == [name]


def test_every_stall_names_somebody() -> None:
    for each in (queues(), STALLED.queues, queues(generate_response=QueueView(available=1))):
        for samples in (SamplesView(), SamplesView(by_state={"leased": 1}), SamplesView(by_state={"requested": 1})):
            for there in (processes(), processes()[:3], processes()[:1]):
                report = examine(replace(STALLED, queues=each, samples=samples, processes=there))
                assert report.diagnoses and report.verdict is Verdict.STALLED


def test_nothing_is_concluded_from_leases_of_which_no_one_knows_when_they_were_renewed() -> None:
    """A queue that tells no more than counts: the worker may be stuck as well as the environment."""
    queues = {**{name: QueueView() for name in MOVING.queues}, "rollout_request": QueueView(available=1, in_flight=2)}
    seen = replace(MOVING, idle_s=2 * LIMIT_S, queues=queues, samples=SamplesView(by_state={"leased": 2}))
    (found,) = examine(seen).diagnoses
    assert found.role == ENVIRONMENT
    assert found.summary.endswith("worker-0 holds 2 rollouts, and none of them calls the model")


def test_where_the_proxy_has_a_process_control_is_not_it() -> None:
    control = replace(view(CONTROL), state=ProcessState.STOPPED)
    alone = replace(MOVING, processes=(control, *MOVING.processes[1:]))
    apart = replace(alone, processes=(*alone.processes, ProcessView(name="proxy", state=ProcessState.ALIVE, pid=200)))
    said = "control, which serves the proxy too, is stopped"
    assert said in examine(alone).diagnoses[0].summary and said not in examine(apart).diagnoses[0].summary
    answers = {"generate_response": QueueView(available=4)}
    gone = replace(
        MOVING, queues=answers, processes=(*MOVING.processes, ProcessView(name="proxy", state=ProcessState.GONE))
    )
    (found,) = examine(gone).diagnoses
    assert found.role == "proxy" and "generate_response: 4 available, 0 in flight" in found.evidence


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize(
    ("stage", "error", "role"),
    [
        (
            "SubmitTraining",
            "worker-0 ended with exit code -9 after 5 restarts; its last log lines:\n    a\n",
            "worker-0",
        ),
        ("SubmitTraining", "the trainer stopped at step 3: NoProgress: ten steps", TRAINER),
        ("SubmitTraining", "no progress for 20 s (a stall after 10 s): the environment hangs: x", ENVIRONMENT),
        ("SubmitTraining", "/x/samples.db can't grow: the disk is full; free some space", DISK),
        ("ValidateData", "tasks.jsonl:1:1: a row must be an object", DATA),
        (
            "SubmitTraining",
            "budget_tokens = 8 (--budget-tokens) is used up: 9 tokens generated; checkpoint /d/trainer/final; go on "
            "with more: turnmill resume r1 --budget-tokens 16 --root /d/trainer",
            BUDGET,
        ),
        ("Evaluate", "something else", CONTROL),
    ],
)
def test_a_run_that_failed_is_explained_by_its_own_words(stage: str, error: str, role: str) -> None:
    stages = (StageRecord(name=stage, state="failed", started_at=0.0, error=error),)
    run = replace(RUN, status=RunStatus.FAILED, error=error, stages=stages)
    report = examine(replace(MOVING, run=run, processes=(), queues=queues()))
    assert (report.verdict, report.diagnoses[0].role) == (Verdict.ENDED_BADLY, role)
    assert stage in report.diagnoses[0].summary


@pytest.mark.parametrize(
    ("error_class", "commands"),
    [
        # Their errors have the command; going on would fail once more.
        (ErrorClass.BUDGET, ["status"]),
        (ErrorClass.INVALID_INPUT, ["status"]),
        (ErrorClass.ROLE_FAILED, ["status", "resume"]),
        # A baseline without signal, for instance, is the same again.
        (ErrorClass.STAGE_FAILED, ["status", "resume", "retry"]),
    ],
)
def test_what_a_failed_run_is_told_to_do_can_help(error_class: ErrorClass, commands: list[str]) -> None:
    stage = StageRecord(name="SubmitTraining", state="failed", started_at=0.0, error="why", error_class=error_class)
    run = replace(RUN, status=RunStatus.FAILED, error="why", stages=(stage,))
    (diagnosis,) = examine(replace(MOVING, run=run, processes=(), queues=queues())).diagnoses
    assert [command.split()[1] for command in diagnosis.commands] == commands


@pytest.mark.parametrize("status", [RunStatus.SUCCEEDED, RunStatus.CANCELLED, RunStatus.DUPLICATE, RunStatus.QUEUED])
def test_a_run_that_ended_or_waits_as_it_should_is_healthy(status: RunStatus) -> None:
    report = examine(replace(MOVING, run=replace(RUN, status=status), free_bytes=0))
    assert report.verdict.is_healthy and not report.diagnoses


def failed(error: str, **changes: Any) -> Diagnosis:
    """What is said of a run that failed before or in its first stage."""
    run = replace(RUN, status=RunStatus.FAILED, error=error, stages=(), **changes)
    (found,) = examine(replace(MOVING, run=run, processes=(), queues=queues())).diagnoses
    return found


def test_the_command_that_is_proposed_for_a_run_that_failed_is_one_that_goes_on_with_it() -> None:
    used_up = (
        "budget_usd = 1 (default) is used up: 9 tokens generated; go on with more: turnmill resume r1 --budget-usd 2"
    )
    assert failed(used_up).commands[-1] == "turnmill resume r1 --budget-usd 2"
    held = failed("1 problem in the configuration:\n  budget_tokens = -1", refused="1 problem", upload="a.jsonl")
    assert held.role == DATA and held.commands[-1].startswith("turnmill dlq redrive trigger/r1 --root .turnmill")
    assert failed("something else").commands[-1] == "turnmill resume r1 --root .turnmill"


def test_a_run_that_waits_for_a_turnmill_up_that_is_not_there_waits_for_ever() -> None:
    report = examine(replace(MOVING, run=replace(RUN, status=RunStatus.QUEUED), is_served=False))
    assert not report.verdict.is_healthy and report.diagnoses[0].role == CONTROL
    assert report.diagnoses[0].commands == ("turnmill up --root .turnmill",)


@pytest.mark.parametrize("state", [ProcessState.STOPPED, ProcessState.GONE, ProcessState.ALIVE])
def test_a_preflight_that_hangs_is_named(state: ProcessState) -> None:
    run = replace(RUN, stages=(StageRecord(name="Preflight", state="running", started_at=0.0),))
    pid = None if state is ProcessState.GONE else 7
    there = (view(CONTROL), ProcessView(name="preflight-1", state=state, pid=pid))
    assert roles(replace(STALLED, run=run, processes=there))[0] == "preflight-1"


def test_news_that_nobody_takes_are_control_s_where_there_is_no_trainer() -> None:
    """The baseline and the evaluations are played by control."""
    waiting = replace(STALLED, queues=queues(rollout_response=QueueView(available=4)), samples=SamplesView())
    assert roles(waiting) == [TRAINER]
    assert roles(replace(waiting, processes=processes()[:3])) == [CONTROL]


@pytest.mark.parametrize("line", ["took 11.4 s", "10.1.4.2 has connected", "took 1.45 s"])
def test_a_number_that_looks_like_a_version_is_no_refusal(line: str) -> None:
    replicas = serving(1, 3)
    assert roles(replace(MOVING, replicas=replicas, idle_s=20.0, logs={"replica-0": (line,)})) == []


def test_calls_that_wait_for_a_foreign_generator_are_not_laid_to_a_process_of_ours() -> None:
    waiting = {"generate_request": QueueView(available=3)}
    found = examine(replace(STALLED, queues=waiting))
    assert [diagnosis.role for diagnosis in found.diagnoses if "calls wait" in diagnosis.summary] == ["generator"]
