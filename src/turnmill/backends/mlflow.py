"""A run in an MLflow tracking store: found again by a tag, so that it is never there twice; each step logged once.

Blocks, and takes seconds and a hundred megabytes to import MLflow: for a process of its own (`wiring.mirror_process`).
Each method may raise whatever MLflow and its transports raise, and may be called again then.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnmill.records import Metric

# The tag by which a run is found again.
RUN_TAG = "turnmill.run_id"
# MLflow's limits of one request, and of texts.
_MOST_METRICS, _MOST_PARAMS, _MOST_TAGS = 1000, 100, 100
_MOST_PARAM_CHARS, _MOST_TAG_CHARS = 500, 5000


class MlflowRuns:
    """The runs of one experiment."""

    def __init__(self, tracking_uri: str, experiment: str) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric as MlflowMetric
        from mlflow.entities import Param, RunTag

        self._client: Any = MlflowClient(tracking_uri=tracking_uri)
        self._metric, self._param, self._tag = MlflowMetric, Param, RunTag
        self._experiment = experiment

    def find_or_create(self, run_id: str, started_at: float) -> str:
        """MLflow's id of the run; one that was deleted there is made anew."""
        experiment_id = self._experiment_id()
        quoted = run_id.replace("'", "")
        found = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{quoted}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {RUN_TAG: run_id}
        made = self._client.create_run(experiment_id, start_time=_ms(started_at), tags=tags, run_name=run_id)
        return str(made.info.run_id)

    def is_there(self, mlflow_id: str) -> bool:
        """Whether it is still a run of the store, and not deleted."""
        from mlflow.exceptions import MlflowException

        try:
            return bool(self._client.get_run(mlflow_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def describe(self, mlflow_id: str, *, params: Mapping[str, object], tags: Mapping[str, str]) -> None:
        """Parameters, which never change, and tags, which may; both cut to what MLflow takes."""
        given = [self._param(name, str(value)[:_MOST_PARAM_CHARS]) for name, value in params.items()]
        about = [self._tag(name, value[:_MOST_TAG_CHARS]) for name, value in tags.items()]
        for part in _parts(given, _MOST_PARAMS):
            self._client.log_batch(mlflow_id, params=part)
        for part in _parts(about, _MOST_TAGS):
            self._client.log_batch(mlflow_id, tags=part)

    def log(self, mlflow_id: str, metrics: Iterable[Metric], *, unsure: bool) -> None:
        """Log the values of steps. `unsure`: some of them may be there already, from a process that was killed."""
        left = [(metric, name) for metric in metrics for name in _names_of(metric)]
        if unsure:
            left = self._without_those_there(mlflow_id, left)
        values = [self._metric(name, metric.values[name], _ms(metric.time), metric.step) for metric, name in left]
        for part in _parts(values, _MOST_METRICS):
            self._client.log_batch(mlflow_id, metrics=part)

    def _without_those_there(self, mlflow_id: str, values: list[tuple[Metric, str]]) -> list[tuple[Metric, str]]:
        """A step's values are sent in order: without its first one none is there, with its last one all of them are.

        So two requests do, unless a store took a part of a step.
        """
        metrics = list({id(metric): metric for metric, _ in values}.values())
        ends = {name for metric in metrics for name in (_names_of(metric)[0], _names_of(metric)[-1])}
        there = self._there(mlflow_id, ends)
        whole = [metric for metric in metrics if _at(metric, _names_of(metric)[-1]) in there]
        values = [(metric, name) for metric, name in values if metric not in whole]
        partly = {name for metric, name in values if _at(metric, _names_of(metric)[0]) in there}
        there |= self._there(mlflow_id, partly - ends)
        return [(metric, name) for metric, name in values if _at(metric, name) not in there]

    def _there(self, mlflow_id: str, names: Iterable[str]) -> set[tuple[str, int, int]]:
        histories = [self._client.get_metric_history(mlflow_id, name) for name in sorted(names)]
        return {(item.key, item.timestamp, item.step) for history in histories for item in history}

    def set_status(self, mlflow_id: str, status: str, ended_at: float | None) -> None:
        """`RUNNING`, without an end, or one of `FINISHED`, `FAILED`, `KILLED`."""
        if ended_at is None:
            self._client.update_run(mlflow_id, status=status)
        else:
            self._client.set_terminated(mlflow_id, status=status, end_time=_ms(ended_at))

    def keep(self, mlflow_id: str, name: str, value: object) -> None:
        """An artifact: `value` as JSON, or a text as it is."""
        text = value if isinstance(value, str) else json.dumps(value, indent=2, default=str) + "\n"
        self._client.log_text(mlflow_id, text, name)

    def _experiment_id(self) -> str:
        """Raises an error for one that was deleted: only its owner can tell what is to be done."""
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            return str(found.experiment_id)
        return str(self._client.create_experiment(self._experiment))


def _names_of(metric: Metric) -> list[str]:
    """Of its values that are numbers, in the order in which they are sent."""
    return sorted(name for name, value in metric.values.items() if math.isfinite(value))


def _at(metric: Metric, name: str) -> tuple[str, int, int]:
    return name, _ms(metric.time), metric.step


def _parts(items: Sequence[Any], size: int) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
