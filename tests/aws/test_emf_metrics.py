"""Metrics as CloudWatch reads them: the document, the log stream, and reading back what was emitted."""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aws.emulator import Emulator
from tests.contracts.aws_objects import name_of, open_metrics
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.emf import NAMES, NAMESPACE, REWARD_MEAN, line_of, points_of
from turnmill.backends.aws.metrics import EmfMetricSink, read_emf
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.embedded.records import SqliteRecordStore
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt
from turnmill.records import Metric


@pytest.fixture
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    opened = AwsClients(emulator.settings("metrics"))
    yield opened
    opened.close()


@pytest.fixture
def records(tmp_path: Path) -> Iterator[SqliteRecordStore]:
    store = SqliteRecordStore(tmp_path / "records")
    yield store
    store.close()


@pytest.fixture
def sink(clients: AwsClients, records: SqliteRecordStore, tmp_path: Path) -> EmfMetricSink:
    return open_metrics(clients, tmp_path, records)


def metric(step: int, *, run_id: str = "r1", **values: float) -> Metric:
    return Metric(run_id=run_id, step=step, time=1_700_000_000.5, values=values)


def document(item: Metric) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(line_of(item))
    return parsed


def group_of(folder: Path) -> str:
    return AwsSettings(name=name_of(folder)).log_group


async def test_the_mean_reward_is_read_back_from_what_was_emitted(
    clients: AwsClients, sink: EmfMetricSink, tmp_path: Path
) -> None:
    for step in range(1, 4):
        await sink.write(metric(step, reward_mean=step / 10, train_s=2.0))
    await sink.write(metric(1, run_id="r10", reward_mean=9.0))
    points = await read_emf(clients, group_of(tmp_path), "r1")
    assert [(point.properties["step"], point.value) for point in points] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert {(point.namespace, point.name, point.unit, point.time) for point in points} == {
        (NAMESPACE, REWARD_MEAN, "None", 1_700_000_000.5)
    }
    assert all(point.dimensions == {"run": "r1"} and point.properties["train_s"] == 2.0 for point in points)


async def test_reading_goes_over_all_pages(clients: AwsClients, tmp_path: Path) -> None:
    group = group_of(tmp_path)
    await clients.call("logs", "create_log_group", logGroupName=group)
    await clients.call("logs", "create_log_stream", logGroupName=group, logStreamName="r1")
    line = line_of(metric(1, reward_mean=0.5)).decode()
    # Within the service's limits: 1 MB a batch, not more than two weeks ago.
    events = [{"timestamp": int(time.time() * 1000), "message": line}] * 3500
    for _ in range(3):
        await clients.call("logs", "put_log_events", logGroupName=group, logStreamName="r1", logEvents=events)
    assert len(await read_emf(clients, group, "r1")) == 10_500


async def test_many_sinks_that_begin_at_once_share_group_and_stream(
    clients: AwsClients, sink: EmfMetricSink, tmp_path: Path
) -> None:
    await asyncio.gather(*(sink.write(metric(step, reward_mean=1.0)) for step in range(20)))
    points = await read_emf(clients, group_of(tmp_path), "r1")
    assert sorted(point.properties["step"] for point in points) == list(range(20))


async def test_a_step_whose_line_can_not_be_sent_has_no_record(emulator: Emulator, records: SqliteRecordStore) -> None:
    away = AwsClients(AwsSettings(region="us-east-1", endpoint_url="http://127.0.0.1:9"), max_tries=1)
    sink = EmfMetricSink(away, records, log_group="/turnmill/away")
    with pytest.raises(BackendUnavailable, match="AWS logs put_log_events failed"):
        await sink.write(metric(1, reward_mean=1.0))
    assert await sink.read("r1") == []
    away.close()


async def test_a_run_without_metrics_is_not_found_in_the_log(clients: AwsClients, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="run r1 has written no metric"):
        await read_emf(clients, group_of(tmp_path), "r1")


async def test_a_run_of_any_name_has_a_stream(clients: AwsClients, sink: EmfMetricSink, tmp_path: Path) -> None:
    for run_id in ("a:b*c", "ü" * 300, "x" * 2000):
        await sink.write(metric(1, run_id=run_id, reward_mean=1.0))
        assert [point.value for point in await read_emf(clients, group_of(tmp_path), run_id)] == [1.0]


def test_a_document_keeps_the_specification() -> None:
    values = dict.fromkeys(NAMES, 1.0) | {f"other_{number}": 2.0 for number in range(200)}
    made = document(replace(metric(7), values=values))
    assert made["_aws"]["Timestamp"] == 1_700_000_000_500
    [directive] = made["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "Turnmill" and directive["Dimensions"] == [["run"]]
    assert [item["Name"] for item in directive["Metrics"]] == list(NAMES)
    assert all(isinstance(made[item["Name"]], float) for item in directive["Metrics"])
    assert made["run"] == "r1" and made["step"] == 7 and made["other_199"] == 2.0
    assert [point.name for point in points_of(json.dumps(made))] == list(NAMES)


def test_a_step_without_rollouts_is_a_line_without_metrics() -> None:
    made = document(metric(7, train_s=1.0))
    assert made["_aws"]["CloudWatchMetrics"] == []
    assert points_of(json.dumps(made)) == []


@pytest.mark.parametrize("name", ["run", "step", "_aws", "incarnation"])
def test_a_value_may_not_take_the_place_of_another_member(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"'{name}' of step 7"):
        line_of(replace(metric(7), values={name: 1.0}))


@pytest.mark.parametrize(
    "change",
    [
        {"_aws": {}},
        {"run": 1},
        {"reward_mean": "0.5"},
        {"reward_mean": True},
        {"reward_mean": [1.0] * 101},
        {
            "_aws": {
                "Timestamp": 1,
                "CloudWatchMetrics": [{"Namespace": "T", "Dimensions": [["absent"]], "Metrics": []}],
            }
        },
    ],
)
def test_a_line_out_of_which_nothing_would_be_read_is_refused(change: dict[str, Any]) -> None:
    made = document(metric(7, reward_mean=0.5)) | change
    with pytest.raises(RecordCorrupt, match="no embedded metric"):
        points_of(json.dumps(made))
    with pytest.raises(RecordCorrupt):
        points_of("no JSON")
