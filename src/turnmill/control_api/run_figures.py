"""The figures of single runs: what is looked at, and the families of Prometheus that it becomes."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.core import Metric as Family

from turnmill.backends.embedded import look_at_restarts
from turnmill.control_api.sparing import Sparing
from turnmill.records import Metric, Purpose, ReplicaStatus, Run, RunStatus, SampleState
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.figures import max_steps_of
from turnmill.wiring.reading.queues import QueueStatus, read_queues
from turnmill.wiring.reading.runs import SeenSteps, look_at_replicas

# Counting the samples reads all of them; see `Sparing`.
_SAMPLES_FRESH_S, _SAMPLES_SHARE = 1.0, 0.01
_REPLICA = ["run", "replica"]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What was seen of one run."""

    # Of all steps that count, by step.
    metrics: list[Metric]
    # Empty for a run that does not go on.
    queues: Mapping[str, QueueStatus]
    samples: Mapping[tuple[Purpose, SampleState], int]
    # By role.
    restarts: Mapping[str, int]
    # None of a run that does not go on.
    replicas: Sequence[ReplicaStatus]


class RunView:
    """Looks at one run again and again, and at what did not change only once."""

    def __init__(self, root: Path, run_id: str) -> None:
        self._root = root
        self._reader = backend_of(root).reader(run_id)
        self._samples = Sparing(self._reader.samples, fresh_s=_SAMPLES_FRESH_S, share=_SAMPLES_SHARE)
        self._steps = SeenSteps(root, run_id)
        self._final: Figures | None = None

    def look(self, run: Run) -> Figures:
        """Raises `TurnmillError` for what can't be read."""
        if self._final is not None and run.status.is_final:
            return self._final
        figures = Figures(
            metrics=self._steps.look(),
            queues=read_queues(self._root, run).queues if run.status is RunStatus.ACTIVE else {},
            samples=self._reader.samples() if run.status.is_final else self._samples(),
            restarts=look_at_restarts(self._root, run.run_id),
            replicas=look_at_replicas(self._root, run.run_id) if run.status is RunStatus.ACTIVE else (),
        )
        # Nobody writes it any more, until it is resumed: then it is not final.
        self._final = figures if run.status.is_final else None
        return figures


class RunFigures:
    """Families with one series a run, or some."""

    def __init__(self) -> None:
        run, gauge = ["run"], GaugeMetricFamily
        self._info = InfoMetricFamily("turnmill_run", "What a run is.", labels=run)
        self._unreadable = gauge("turnmill_run_unreadable", "1 if the files of the run can't be read.", labels=run)
        self._stage = gauge("turnmill_run_stage", "1 for the stage where the run is.", labels=["run", "stage", "state"])
        self._stage_s = gauge(
            "turnmill_run_stage_seconds", "How long it has been in that stage.", labels=["run", "stage"]
        )
        self._step = gauge("turnmill_run_step", "The last optimizer step.", labels=run)
        self._max_steps = gauge("turnmill_run_max_steps", "How many optimizer steps it makes.", labels=run)
        self._reward = gauge(
            "turnmill_run_reward_mean", "Mean reward of all valid rollouts of the last step.", labels=run
        )
        self._solved = gauge("turnmill_run_solve_ratio", "Share of them that reached the threshold.", labels=run)
        self._held_out = gauge(
            "turnmill_run_held_out_solve_ratio",
            "Share of held-out rollouts that reached the threshold in the last evaluation while it trained.",
            labels=run,
        )
        self._held_out_reward = gauge(
            "turnmill_run_held_out_reward_mean", "Mean reward of that evaluation.", labels=run
        )
        self._held_out_step = gauge("turnmill_run_held_out_step", "After which optimizer step it was.", labels=run)
        self._step_time = gauge(
            "turnmill_run_last_step_timestamp_seconds", "When the last step was made, Unix time.", labels=run
        )
        self._rollouts = CounterMetricFamily(
            "turnmill_run_rollouts",
            "Rollouts that were played for steps, by whether they count.",
            labels=["run", "outcome"],
        )
        self._tokens = CounterMetricFamily(
            "turnmill_run_generated_tokens", "Tokens that the model sampled in the valid rollouts of steps.", labels=run
        )
        self._samples = gauge(
            "turnmill_run_samples", "Samples, by purpose and state.", labels=["run", "purpose", "state"]
        )
        self._restarts = CounterMetricFamily(
            "turnmill_run_role_restarts", "How often a role died and was started again.", labels=["run", "role"]
        )
        self._replica = gauge(
            "turnmill_replica",
            "1 for what a replica does, and the weights it has.",
            labels=[*_REPLICA, "state", "version"],
        )
        self._heard = gauge(
            "turnmill_replica_heard_timestamp_seconds", "Its last sign of life, Unix time.", labels=_REPLICA
        )
        queue = ["run", "queue"]
        self._messages = gauge("turnmill_queue_messages", "Messages in a queue.", labels=[*queue, "state"])
        self._oldest_s = gauge("turnmill_queue_oldest_message_age_seconds", "Age of its oldest message.", labels=queue)
        self._sent = CounterMetricFamily("turnmill_queue_sent_messages", "Messages sent to it.", labels=queue)

    def families(self) -> Iterator[Family]:
        """All of them, also those without a series."""
        yield from (family for family in vars(self).values() if isinstance(family, Family))

    def add_unreadable(self, run: Run) -> None:
        """The run is there, and what is known of it without its files."""
        self._add_record(run)
        self._unreadable.add_metric([run.run_id], 1)

    def add(self, run: Run, seen: Figures) -> None:
        """One run."""
        self._add_record(run)
        self._unreadable.add_metric([run.run_id], 0)
        self._add_steps(run, seen.metrics)
        for (purpose, state), number in sorted(seen.samples.items()):
            self._samples.add_metric([run.run_id, purpose, state], number)
        for role, number in sorted(seen.restarts.items()):
            self._restarts.add_metric([run.run_id, role], number)
        for status in seen.replicas:
            labels = [run.run_id, status.replica]
            self._replica.add_metric([*labels, status.state, str(status.version)], 1)
            self._heard.add_metric(labels, status.updated_at)
        for name, queue in seen.queues.items():
            self._add_queue([run.run_id, name], queue)

    def _add_record(self, run: Run) -> None:
        about = {"kind": run.kind, "status": run.status, "upload": run.upload or ""}
        self._info.add_metric([run.run_id], {**about, "base_model": str(run.config.get("base_model", ""))})
        if run.current_stages:
            stage = run.current_stages[-1]
            self._stage.add_metric([run.run_id, stage.name, stage.state], 1)
            if not run.status.is_final:
                self._stage_s.add_metric([run.run_id, stage.name], max(0.0, time.time() - stage.started_at))

    def _add_steps(self, run: Run, metrics: list[Metric]) -> None:
        label = [run.run_id]
        if max_steps := max_steps_of(run):
            self._max_steps.add_metric(label, max_steps)
            self._step.add_metric(label, metrics[-1].step if metrics else 0)
            generated = [
                (m.values.get("num_generated", 0.0), m.values.get("response_length_mean", 0.0)) for m in metrics
            ]
            self._rollouts.add_metric([run.run_id, "valid"], sum(number for number, _ in generated))
            num_invalid = sum(metric.values.get("num_invalid", 0.0) for metric in metrics)
            self._rollouts.add_metric([run.run_id, "invalid"], num_invalid)
            self._tokens.add_metric(label, sum(round(number * length) for number, length in generated))
        if metrics:
            self._step_time.add_metric(label, metrics[-1].time)
            for family, name in ((self._reward, "reward_mean"), (self._solved, "solved")):
                if name in metrics[-1].values:
                    family.add_metric(label, metrics[-1].values[name])

        evaluated = next((metric for metric in reversed(metrics) if "val_solved" in metric.values), None)
        if evaluated is not None:
            self._held_out.add_metric(label, evaluated.values["val_solved"])
            self._held_out_reward.add_metric(label, evaluated.values["val_reward_mean"])
            self._held_out_step.add_metric(label, evaluated.step)

    def _add_queue(self, labels: list[str], queue: QueueStatus) -> None:
        states = {"available": queue.available, "in_flight": queue.in_flight, "delayed": queue.delayed}
        for state, number in {**states, "dead": queue.dead_letters}.items():
            self._messages.add_metric([*labels, state], number)
        if queue.oldest_age_s is not None:
            self._oldest_s.add_metric(labels, queue.oldest_age_s)
        if queue.num_sent is not None:
            self._sent.add_metric(labels, queue.num_sent)
