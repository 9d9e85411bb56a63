"""Which part of a run holds it up: rules over one snapshot, the most certain ones first.

    snapshot -> faults (wrong whether or not the run moves) -> suspects (only where it does not) -> verdict

What is seen directly (a stopped process, a full disk) comes before what is concluded from it: everything behind a
stopped worker waits too, and each of those would look like a cause of its own.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import replace

from turnmill.health.remedies import Remedy, remedies_of
from turnmill.health.report import Diagnosis, Report, Verdict
from turnmill.health.snapshot import CONTROL, PROXY, TRAINER, ProcessState, QueueView, Snapshot
from turnmill.records import RunStatus

DISK, ENVIRONMENT, STORE, DATA, BUDGET = "disk", "environment", "store", "data", "budget"
# Below it SQLite, logs and checkpoints soon fail, or did already.
LOW_BYTES, LOW_FILES = 8 << 20, 16
# A replica that has to finish a call first serves the version before for so long, at most.
SWAP_S = 10.0
# How the processes are called that a stage starts and waits for.
_STARTING = {"Preflight": "preflight-", "StartGeneration": "replica-", "StartRewardWorkers": "worker-"}
_NUM_LINES = 8
# How an operation that found no space says so, in the words of the ports.
_FULL = "the disk is full"
# How a run that has used up its budget says so, with the command that goes on.
_USED_UP = re.compile(r"is used up: .*(turnmill resume .+)")
_ROLE = re.compile(r"\b(?:preflight-\d+|worker-\d+|replica-\d+|trainer|proxy|environment)\b")


def examine(seen: Snapshot) -> Report:
    """The verdict on a run and the causes of what is wrong with it."""
    run = seen.run
    if run.status is RunStatus.QUEUED:
        waits = Report(verdict=Verdict.WAITING, summary="waits for one of the slots of `turnmill up`")
        return waits if seen.is_served else replace(waits, verdict=Verdict.FAULTY, diagnoses=(_unserved(seen),))
    if run.status is RunStatus.ACTIVE or run.status is RunStatus.INTERRUPTED:
        found = tuple(_unique(_faults(seen)))
        if seen.is_stalled:
            found = found or _suspects(seen)
        verdict = Verdict.STALLED if seen.is_stalled else Verdict.FAULTY if found else Verdict.PROGRESSING
        return Report(verdict=verdict, summary=_where(seen), diagnoses=found)
    if run.status is RunStatus.FAILED:
        return Report(verdict=Verdict.ENDED_BADLY, summary=_ending(seen), diagnoses=(_failure(seen),))
    return Report(verdict=Verdict.ENDED_WELL, summary=_ending(seen))


def _unserved(seen: Snapshot) -> Diagnosis:
    return Diagnosis(
        role=CONTROL,
        summary="no `turnmill up` serves this deployment: no run that waits is begun",
        commands=(f"turnmill up{_at(seen)}",),
    )


def _where(seen: Snapshot) -> str:
    stage = f"in {seen.stage}" if seen.stage else "between two stages"
    return f"{stage}; last progress {seen.idle_s:.0f} s ago (a stall after {seen.stall_after_s:g} s)"


def _ending(seen: Snapshot) -> str:
    run = seen.run
    if run.duplicate_of:
        return f"{run.status}: run {run.duplicate_of} has the same content"
    return f"{run.status}" + (f": {run.error}" if run.error else "")


def _unique(found: Iterator[Diagnosis]) -> Iterator[Diagnosis]:
    """One a role: the first, which is the most direct."""
    roles: set[str] = set()
    for diagnosis in found:
        if diagnosis.role not in roles:
            roles.add(diagnosis.role)
            yield diagnosis


# ---------------------------------------------------------------- faults


def _faults(seen: Snapshot) -> Iterator[Diagnosis]:
    yield from _full_disk(seen)
    yield from _unreadable(seen)
    yield from _dead_control(seen)
    yield from _stopped(seen)
    yield from _unproved(seen)
    yield from _refusing(seen)
    yield from _poison(seen)
    yield from _gone(seen)


def _full_disk(seen: Snapshot) -> Iterator[Diagnosis]:
    """No space is left; or there was none a moment ago, and a process ended for it and gave some of it back."""
    facts = [
        f"{left} {what} are left, and with less than {low} nothing can be written for long"
        for what, left, low in (("bytes", seen.free_bytes, LOW_BYTES), ("files", seen.free_files, LOW_FILES))
        if left is not None and left < low
    ]
    gone = [process.name for process in seen.processes if process.state is ProcessState.GONE]
    if seen.run.status is RunStatus.INTERRUPTED and CONTROL not in gone:
        # It ended between two parts of this look.
        gone.append(CONTROL)
    lines = tuple(line for name in gone for line in _last(seen, name) if _FULL in line)
    if facts or lines:
        yield Diagnosis(
            role=DISK,
            summary=f"the disk of {seen.root} is full" if facts else f"the disk of {seen.root} was full",
            evidence=(*facts, *(f"{name} is gone, and this was the last that was said" for name in gone if lines)),
            commands=(
                f"df -h {shlex.quote(seen.root)}",
                f"du -sh {shlex.quote(seen.root)}/runs/* | sort -h",
                f"turnmill resume {seen.run.run_id}{_at(seen)}  # once there is space, if the run has ended",
            ),
            log_lines=lines[-_NUM_LINES:],
        )


def _unreadable(seen: Snapshot) -> Iterator[Diagnosis]:
    if seen.unreadable:
        yield Diagnosis(
            role=STORE,
            summary="some of the run's files can't be read",
            evidence=seen.unreadable,
            commands=(f"ls -l {shlex.quote(seen.root)}/runs/{seen.run.run_id}/records",),
        )


def _dead_control(seen: Snapshot) -> Iterator[Diagnosis]:
    if seen.run.status is not RunStatus.INTERRUPTED:
        return
    yield Diagnosis(
        role=CONTROL,
        summary=f"the control process {seen.run.pid}{_also(seen)} is gone; the run has not ended",
        evidence=(
            "the record of the run says that it is active, and no process has the pid that it names",
            "its other processes end by themselves when they notice",
        ),
        commands=(f"turnmill resume {seen.run.run_id}{_at(seen)}",),
        log_lines=_last(seen, CONTROL),
    )


def _stopped(seen: Snapshot) -> Iterator[Diagnosis]:
    for process in seen.processes:
        if process.state is ProcessState.STOPPED:
            also = _also(seen) if process.name == CONTROL else ""
            yield Diagnosis(
                role=process.name,
                summary=f"{process.name}{also} is stopped (pid {process.pid}): by SIGSTOP or a debugger",
                evidence=("the system says so of the process (state T); it does nothing until it is continued",),
                commands=(f"kill -CONT {process.pid}",),
                log_lines=_last(seen, process.name),
            )


def _unproved(seen: Snapshot) -> Iterator[Diagnosis]:
    """A replica whose memory was not what was published, and that has not proved to hold it since."""
    for name, status in seen.replicas.items():
        if status.num_refusals and status.error is not None:
            yield Diagnosis(
                role=name,
                summary=f"{name} serves nothing: {status.error}",
                evidence=(
                    f"found {status.num_refusals} times in a row; no call was answered with these weights",
                    "the file was altered after it was published, or the memory or disk of the machine fails",
                ),
                commands=(
                    f"turnmill logs {seen.run.run_id}{_at(seen)} --role {name}",
                    f"turnmill resume {seen.run.run_id}{_at(seen)}  # once the run has ended; makes the weights anew",
                ),
                log_lines=_last(seen, name),
            )


def _refusing(seen: Snapshot) -> Iterator[Diagnosis]:
    """A replica that can't load what is published ends, is started again with the base weights, and meets it again."""
    if seen.current is None or (seen.current_age_s or 0.0) < SWAP_S:
        return
    for name, status in seen.replicas.items():
        version = status.version
        named = re.compile(rf"(?<![\d.]){re.escape(str(seen.current))}(?!\.?\d)")
        errors = [line for line in _last(seen, name) if named.search(line)]
        is_idle = seen.idle_s >= SWAP_S
        if version != seen.current and is_idle and (errors or seen.is_stalled):
            yield Diagnosis(
                role=name,
                summary=f"{name} serves weights {version} and does not take {seen.current}",
                evidence=(
                    f"{seen.current} was published {seen.current_age_s or 0.0:.0f} s ago",
                    *(f"it said: {line}" for line in errors[-2:]),
                ),
                commands=(
                    f"turnmill logs {seen.run.run_id}{_at(seen)} --role {name}",
                    f"turnmill cancel {seen.run.run_id}{_at(seen)}",
                    f"turnmill resume {seen.run.run_id}{_at(seen)}  # makes the weights of that step anew",
                ),
                log_lines=_last(seen, name),
            )


def _gone(seen: Snapshot) -> Iterator[Diagnosis]:
    """Where control is gone, or stopped, nobody starts the others again: no fault of theirs."""
    control = seen.process(CONTROL)
    if control is None or control.state is not ProcessState.ALIVE:
        return
    for process in seen.processes:
        if process.state is ProcessState.GONE:
            yield Diagnosis(
                role=process.name,
                summary=f"{process.name} is gone: no process of the run has this name",
                evidence=(
                    f"{seen.stage or 'the run'} needs it; control starts one again that died, while it can",
                    *_queue_of(seen, process.name),
                ),
                commands=(
                    f"turnmill logs {seen.run.run_id}{_at(seen)} --role {process.name} --role control",
                    f"turnmill resume {seen.run.run_id}{_at(seen)}  # if the run ends for it",
                ),
                log_lines=_last(seen, process.name) + _last(seen, CONTROL)[-2:],
            )


def _poison(seen: Snapshot) -> Iterator[Diagnosis]:
    """A message that comes back again and again: it fails or kills whoever takes it.

    Where several do, their consumer dies of something else, and they have it in common.
    """
    for name, queue in seen.queues.items():
        if queue.num_often == 1 and queue.most_received is not None:
            consumer = _consumer(seen, name)
            yield Diagnosis(
                role=f"message {queue.most_received}",
                summary=f"message {queue.most_received} in {name} fails whoever takes it",
                evidence=(
                    f"it was received {queue.num_receives} times and never done",
                    f"{consumer} takes it; after the queue's limit it becomes a dead letter",
                ),
                commands=(
                    f"turnmill logs {seen.run.run_id}{_at(seen)} --role {consumer}",
                    f"turnmill queues {seen.run.run_id}{_at(seen)}",
                ),
                log_lines=_last(seen, consumer),
            )


# ---------------------------------------------------------------- suspects


def _suspects(seen: Snapshot) -> tuple[Diagnosis, ...]:
    """Of a stalled run whose processes are all there: who has work in hand and does not bring it to its end?"""
    starting = _STARTING.get(seen.stage or "")
    if starting is not None:
        names = [process.name for process in seen.processes if process.name.startswith(starting)]
        found = [_suspect(seen, name, f"{name} was started and is not ready") for name in names]
    else:
        found = [*_waiting_calls(seen), *_waiting_samples(seen), *_waiting_trainer(seen)]
    return tuple(found) or (_suspect(seen, CONTROL, "nothing is waited for that could be seen from outside"),)


def _waiting_calls(seen: Snapshot) -> Iterator[Diagnosis]:
    for name, queue in seen.queues.items():
        if name.startswith("generate_request") and queue.num_open:
            replica = _consumer(seen, name)
            yield _suspect(seen, replica, f"{queue.num_open} calls wait for {replica}, which answers none")


def _waiting_samples(seen: Snapshot) -> Iterator[Diagnosis]:
    requests = seen.queues.get("rollout_request", QueueView())
    if not requests.num_open or any(
        name.startswith("generate") and queue.num_open for name, queue in seen.queues.items()
    ):
        return
    worker = next((process.name for process in seen.processes if process.name.startswith("worker-")), "worker-0")
    lease_s = float(seen.run.config.get("worker_lease_s", 15.0))
    leased = seen.samples.by_state.get("leased", 0)
    if requests.in_flight and requests.renewed_ago_s is None:
        why = f"{worker} holds {requests.in_flight} rollouts, and none of them calls the model"
    elif requests.in_flight and (requests.renewed_ago_s or 0.0) <= lease_s:
        why = f"{worker} plays {requests.in_flight} rollouts and renews their leases, and none of them calls the model"
    elif leased:
        why = f"{worker} is not stopped, and its leases ran out: something in it blocks its event loop"
    else:
        text = f"{requests.num_open} rollouts wait for {worker}, which takes none"
        yield _suspect(seen, worker, text)
        return
    yield _suspect(seen, ENVIRONMENT, f"the environment hangs: {why}")


def _waiting_trainer(seen: Snapshot) -> Iterator[Diagnosis]:
    responses = seen.queues.get("rollout_response", QueueView())
    if responses.num_open:
        # The baseline and the evaluations are control's.
        taker = TRAINER if seen.process(TRAINER) is not None else CONTROL
        yield _suspect(seen, taker, f"{responses.num_open} samples ended and {taker} takes none of the news")
    elif seen.process(TRAINER) is not None and not seen.samples.num_open:
        doing = "makes a step of its recorded batch" if seen.has_recorded_batch else "has asked for no sample"
        yield _suspect(seen, TRAINER, f"no sample is open, and the trainer {doing} without an end")


def _suspect(seen: Snapshot, role: str, summary: str) -> Diagnosis:
    shown = seen.process("worker-0" if role == ENVIRONMENT else role)
    troubled = seen.samples.invalid if role == ENVIRONMENT else None
    evidence = [*_queue_of(seen, role)]
    if shown is not None and shown.cores is not None:
        evidence.append(f"{shown.name} (pid {shown.pid}) keeps {shown.cores:.2f} cores busy")
    if troubled is not None:
        evidence.append(f"sample {troubled.sample_id} ended as {troubled.reason}: {troubled.detail}")
    commands = [f"turnmill logs {seen.run.run_id}{_at(seen)} --role {shown.name if shown else role}"]
    if shown is not None and shown.pid is not None:
        commands.append(f"kill -9 {shown.pid}  # control starts it again, and its work is taken up")
    return Diagnosis(
        role=role,
        summary=summary,
        evidence=tuple(evidence),
        commands=tuple(commands),
        log_lines=_last(seen, shown.name if shown else role),
        conversation=troubled.key if troubled else None,
    )


# ---------------------------------------------------------------- the end


def _failure(seen: Snapshot) -> Diagnosis:
    """Why a run failed, by its own words: the role whose end ended it is named there."""
    run = seen.run
    error = run.error or "it does not say why"
    failed = next((stage for stage in reversed(run.current_stages) if stage.state == "failed"), None)
    first = error.split("\n", 1)[0]
    if (poison := next(_poison(seen), None)) is not None:
        return poison
    named = _ROLE.search(first)
    role = named[0] if named else CONTROL
    if _FULL in error:
        role = DISK
    elif _USED_UP.search(first):
        role = BUDGET
    elif run.refused is not None or (failed is not None and failed.name == "ValidateData"):
        role = DATA
    return Diagnosis(
        role=role,
        summary=f"{failed.name if failed else 'it'} failed: {first}",
        evidence=tuple(line.strip() for line in error.split("\n")[1:]),
        commands=(f"turnmill status {run.run_id}{_at(seen)}", *_remedies(seen, role, first)),
        log_lines=_last(seen, role if seen.logs.get(role) else CONTROL),
    )


def _remedies(seen: Snapshot, role: str, error: str) -> tuple[str, ...]:
    """What may help a run that failed."""
    if (used_up := _USED_UP.search(error)) is not None:
        return (used_up[1],)
    if role == DATA and seen.run.upload is not None:
        again = f"turnmill dlq redrive trigger/{seen.run.run_id}{_at(seen)}"
        return (f"{again}  # once it is corrected in quarantine: a new run",)
    run_id, at = seen.run.run_id, _at(seen)
    commands = {
        Remedy.RESUME: f"turnmill resume {run_id}{at}",
        Remedy.RETRY: f"turnmill retry {run_id} --NAME VALUE{at}  # from its beginning, with other parameters",
    }
    return tuple(commands[remedy] for remedy in remedies_of(seen.run, has_steps=None))


# ---------------------------------------------------------------- words


def _also(seen: Snapshot) -> str:
    """What control is besides, where it is."""
    return ", which serves the proxy too," if seen.process(PROXY) is None else ""


def _consumer(seen: Snapshot, queue: str) -> str:
    """Who takes the messages of a queue."""
    proxy = PROXY if seen.process(PROXY) is not None else CONTROL
    if queue.startswith("generate_request-"):
        return f"replica-{queue.rsplit('-', 1)[1]}"
    # A queue without an index is that of a foreign generator.
    others = {"rollout_request": "worker-0", "rollout_response": TRAINER, "generate_request": "generator"}
    return others.get(queue, proxy)


def _queue_of(seen: Snapshot, role: str) -> list[str]:
    """What lies before a role."""
    consumer = "worker-0" if role == ENVIRONMENT else role
    return [
        f"{name}: {queue.available} available, {queue.in_flight} in flight"
        + (f", the oldest {queue.oldest_age_s:.0f} s old" if queue.oldest_age_s is not None else "")
        for name, queue in seen.queues.items()
        if queue.num_open and _consumer(seen, name) == consumer
    ]


def _last(seen: Snapshot, name: str) -> tuple[str, ...]:
    return seen.logs.get(name, ())[-_NUM_LINES:]


def _at(seen: Snapshot) -> str:
    return f" --root {shlex.quote(seen.root)}"
