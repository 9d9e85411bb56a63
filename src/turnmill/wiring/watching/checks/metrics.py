"""The metrics of a run for several checks of one look."""

import time

from turnmill.ports import RunPorts
from turnmill.records import Metric
from turnmill.wiring.reading.runs import metrics_so_far

# A read serves the other checks of the same look.
_FRESH_S = 0.5


class RecentMetrics:
    """The metrics by step, read at most twice a second."""

    def __init__(self, ports: RunPorts, run_id: str) -> None:
        self._ports = ports
        self._run_id = run_id
        self._read_at = float("-inf")
        self._metrics: list[Metric] = []

    async def read(self) -> list[Metric]:
        """As `metrics_so_far`; raises `BackendUnavailable`."""
        return [metric for metric in await self.read_all() if metric.step]

    async def read_all(self) -> list[Metric]:
        """With that of step 0: what was evaluated before the first one; raises `BackendUnavailable`."""
        if time.monotonic() - self._read_at > _FRESH_S:
            self._metrics = await metrics_so_far(self._ports, self._run_id, first=0)
            self._read_at = time.monotonic()
        return self._metrics
