"""The figures of a deployment for Prometheus, read from its records when they are asked for.

    scrape -> Exposition.text (as it was a moment ago | made anew) -> look at the deployment, and at each shown run

Shown one by one are the runs that go on or wait, the newest of them, and the last that ended: so many series there are,
however many runs there were. What takes long is looked at less often (`Sparing`), so that no scraper slows training.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from turnmill import __version__
from turnmill.backends.embedded import open_bucket
from turnmill.control_api.run_figures import RunFigures, RunView
from turnmill.control_api.sparing import Sparing
from turnmill.errors import TurnmillError
from turnmill.records import AlertKind, Cause, Run, RunStatus, Severity, cause_prefix, decode
from turnmill.wiring.backend import backend_of
from turnmill.wiring.reading.runs import look_at_runs
from turnmill.wiring.watching.alarms import look_at_alerts

logger = logging.getLogger(__name__)

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# Runs that are shown one by one: at most so many that have not ended, and the last ones that have.
MOST_OPEN, NUM_ENDED = 16, 4
# How old figures may be, and which part of a core's time looking may take: with both, a thousand scrapers cost as one.
_FRESH_S, _SHARE = 1.0, 0.1


class Exposition:
    """Figures of the deployment in `root`, and of this process."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._bucket = open_bucket(root).name
        # By run id, of those that are shown.
        self._views: dict[str, RunView] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.text = Sparing(lambda: generate_latest(self._registry), fresh_s=_FRESH_S, share=_SHARE)

    def describe(self) -> Iterable[Metric]:
        """Nothing is read before the first scrape."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families. Raises `TurnmillError` where the deployment's own records can't be read."""
        yield InfoMetricFamily("turnmill_build", "The version that runs.", {"version": __version__})
        runs = look_at_runs(self._root)
        yield _by_status(runs)
        yield self._uploads()
        yield self._alerts()
        yield from self._shown(runs)

    def _uploads(self) -> Metric:
        family = CounterMetricFamily("turnmill_uploads", "Uploads, by what became of them.", labels=["outcome"])
        found = backend_of(self._root).look_at_records(cause_prefix(self._bucket))
        causes = [decode(item.value, Cause) for item in found]
        num_ignored = sum(cause.run_id is None for cause in causes)
        family.add_metric(["ignored"], num_ignored)
        family.add_metric(["taken"], len(causes) - num_ignored)
        return family

    def _alerts(self) -> Metric:
        name, text = "turnmill_alerts", "Recorded alerts, by whether they are over."
        family = GaugeMetricFamily(name, text, labels=["kind", "severity", "state"])
        found: Counter[tuple[AlertKind, Severity, str]] = Counter()
        for alert in look_at_alerts(self._root):
            found[alert.kind, alert.severity, "open" if alert.resolved_at is None else "resolved"] += 1
        for labels, number in sorted(found.items()):
            family.add_metric(list(labels), number)
        return family

    def _shown(self, runs: list[Run]) -> Iterator[Metric]:
        shown = _to_show(runs)
        self._views = {run.run_id: self._views.get(run.run_id) or RunView(self._root, run.run_id) for run in shown}
        figures = RunFigures()
        for run in shown:
            try:
                figures.add(run, self._views[run.run_id].look(run))
            except TurnmillError as error:
                # One run whose files are damaged must not hide the others; that it does is a figure itself.
                logger.warning("the figures of run %s can't be read: %s", run.run_id, error, extra={"at": run.run_id})
                figures.add_unreadable(run)
        yield from figures.families()


def _by_status(runs: list[Run]) -> Metric:
    family = GaugeMetricFamily("turnmill_runs", "Runs, by status.", labels=["status"])
    found = Counter(run.status for run in runs)
    for status in RunStatus:
        family.add_metric([status], found[status])
    return family


def _to_show(runs: list[Run]) -> list[Run]:
    """Those of the deployment's runs that have series of their own, oldest first."""
    is_open = [run for run in runs if not run.status.is_final or run.status is RunStatus.INTERRUPTED]
    ended = [run for run in runs if run.status.is_final and run.status is not RunStatus.INTERRUPTED]
    # Those that are active before those that wait, which may be thousands.
    first = sorted(is_open, key=lambda run: (run.status is RunStatus.ACTIVE, run.created_at))[-MOST_OPEN:]
    last = sorted(ended, key=lambda run: run.created_at if run.ended_at is None else run.ended_at)[-NUM_ENDED:]
    return sorted([*first, *last], key=lambda run: run.created_at)
