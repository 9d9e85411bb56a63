"""Metrics as lines of JSON: one a write, appended in one system call."""

import asyncio
import logging
import math
import os
from pathlib import Path

import msgspec

from turnmill.backends.embedded.files import disk
from turnmill.errors import InvalidInput
from turnmill.records import Metric, decode, encode

logger = logging.getLogger(__name__)


class JsonlMetricSink:
    """Implements `ports.MetricSink` in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def write(self, metric: Metric) -> None:
        """See `ports.MetricSink.write`; raises `InvalidInput` for a value that JSON can't hold (NaN, infinity)."""
        for name, value in metric.values.items():
            if not math.isfinite(value):
                raise InvalidInput(f"metric {name!r} of step {metric.step} is {value}, not a finite number")
        await asyncio.to_thread(self._write, metric)

    async def read(self, run_id: str) -> list[Metric]:
        """See `ports.MetricSink.read`; a line that a dying writer left torn is skipped with a warning."""
        return await asyncio.to_thread(self.read_now, run_id)

    def _write(self, metric: Metric) -> None:
        line = encode(metric) + b"\n"
        with disk(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(fd).st_size
                if size and os.pread(fd, 1, size - 1) != b"\n":
                    # A writer died within its line: it must not take this one with it.
                    line = b"\n" + line
                while line:
                    line = line[os.write(fd, line) :]
            finally:
                os.close(fd)

    def read_now(self, run_id: str) -> list[Metric]:
        """`read` for a thread of the caller's own."""
        if not self._path.exists():
            return []
        with disk(self._path):
            lines = self._path.read_bytes().split(b"\n")
        by_step: dict[int, Metric] = {}
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                metric = decode(line, Metric)
            except msgspec.DecodeError as error:
                # The last line may still be on its way: no warning for it.
                if number < len(lines):
                    logger.warning("%s, line %d is torn and skipped: %s", self._path, number, error)
                continue
            if metric.run_id == run_id:
                by_step[metric.step] = metric
        return [by_step[step] for step in sorted(by_step)]
