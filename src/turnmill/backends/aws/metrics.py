"""Metrics as records, which are read back, and as lines of CloudWatch's embedded metric format (see `emf`).

    Metric -> line -> log stream of the run -> CloudWatch metric `reward_mean` of namespace Turnmill ...
           -> record metrics/<run>/<step>

The line comes first: a step that has a record has been told to CloudWatch, and one whose writer died in between is
written again. So CloudWatch may hear of a step twice, with the same values; the record counts once.
"""

import re
import time
from typing import Any

import msgspec

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.emf import Point, line_of, points_of
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt
from turnmill.ports import RecordStore, Stored, Write
from turnmill.records import Metric, decode, digest_of, encode, metric_key, metric_prefix

_PAGE = 1000
# What a stream may be called (`:` and `*` are no part of a name), which a run's id mostly is.
_STREAM_NAME = re.compile(r"[^:*]{1,512}")
# Bytes: PutLogEvents takes at most 1 048 576 in all, 26 of them for each event.
_MOST_LINE = 1_048_576 - 26
_ABSENT, _EXISTS = "ResourceNotFoundException", "ResourceAlreadyExistsException"


class EmfMetricSink:
    """Implements `ports.MetricSink`; group and streams of the log are made when they are not there."""

    def __init__(self, clients: AwsClients, records: RecordStore, *, log_group: str) -> None:
        self._clients = clients
        self._records = records
        self._log_group = log_group

    async def write(self, metric: Metric) -> None:
        """See `ports.MetricSink.write`; raises `InvalidInput` for a value that JSON can't hold (NaN, infinity)."""
        line = line_of(metric)
        if len(line) > _MOST_LINE:
            raise InvalidInput(f"metric of step {metric.step} of run {metric.run_id} has {len(metric.values)} values")
        try:
            await self._put(metric.run_id, line)
        except Refused as error:
            raise _named(error) from error
        await self._records.write(
            [Write(key=metric_key(metric.run_id, metric.step), value=encode(metric), expected=None)]
        )

    async def read(self, run_id: str) -> list[Metric]:
        """See `ports.MetricSink.read`."""
        found: list[Metric] = []
        after = ""
        while page := await self._records.scan(metric_prefix(run_id), after=after, limit=_PAGE):
            after = page[-1].key
            found.extend(metric_of(stored) for stored in page)
        return found

    async def _put(self, run_id: str, line: bytes) -> None:
        stream = stream_of(run_id)
        try:
            await self._send(stream, line)
        except Refused as error:
            if error.code != _ABSENT:
                raise
            await self._make("create_log_group", logGroupName=self._log_group)
            await self._make("create_log_stream", logGroupName=self._log_group, logStreamName=stream)
            await self._send(stream, line)

    async def _send(self, stream: str, line: bytes) -> None:
        # The time of the event is that of sending it: the service drops what is older than two weeks.
        event = {"timestamp": int(time.time() * 1000), "message": line.decode()}
        answer = await self._clients.call(
            "logs", "put_log_events", logGroupName=self._log_group, logStreamName=stream, logEvents=[event]
        )
        rejected = answer.get("rejectedLogEventsInfo") or answer.get("rejectedEntityInfo")
        if rejected:
            raise BackendUnavailable(
                f"CloudWatch Logs dropped a metric of {stream}: {rejected}; is this machine's clock right?"
            )

    async def _make(self, operation: str, **names: str) -> None:
        try:
            await self._clients.call("logs", operation, **names)
        except Refused as error:
            if error.code != _EXISTS:
                raise


def metric_of(stored: Stored) -> Metric:
    """What a record below `metric_prefix` holds; raises `RecordCorrupt`."""
    try:
        return decode(stored.value, Metric)
    except msgspec.DecodeError as error:
        raise RecordCorrupt(f"{stored.key} holds no metric: {error}") from error


def stream_of(run_id: str) -> str:
    """The log stream of a run."""
    return run_id if _STREAM_NAME.fullmatch(run_id) else digest_of(run_id.encode())


async def read_emf(clients: AwsClients, log_group: str, run_id: str) -> list[Point]:
    """What CloudWatch reads out of the lines of a run, oldest first; a step written twice is there twice.

    Raises `NotFound` where the run has no stream, `RecordCorrupt` for a line that breaks the specification.
    """
    found: list[Point] = []
    request: dict[str, Any] = {"logGroupName": log_group, "logStreamName": stream_of(run_id), "startFromHead": True}
    token: str | None = None
    while True:
        try:
            page = await clients.call("logs", "get_log_events", **request, **({"nextToken": token} if token else {}))
        except Refused as error:
            if error.code == _ABSENT:
                raise NotFound(f"run {run_id} has written no metric to {log_group}") from None
            raise _named(error) from error
        for event in page["events"]:
            found.extend(points_of(event["message"]))
        # A page may be empty before the end; at the end the token stays as it is.
        if page["nextForwardToken"] == token:
            return found
        token = page["nextForwardToken"]


def _named(error: Refused) -> InvalidInput:
    return InvalidInput(f"{error}; check the log group, and what the credentials in use may do")
