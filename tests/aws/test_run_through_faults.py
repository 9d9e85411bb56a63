"""A whole run behind a proxy that throttles, refuses, loses answers, doubles deliveries and ends leases.

It takes its time: the emulator knows no attempt ids of receives, by which SQS gives the messages of a lost answer
again, so that each of them is hidden until its lease ends.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator
from tests.aws.service_proxy import Faults, running_proxy
from tests.aws.test_run_on_aws import root as root  # the deployment that those runs have
from tests.aws.test_run_on_aws import started
from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.house import accounted
from tests.e2e.processes import read_records
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.emf import REWARD_MEAN
from turnmill.backends.aws.metrics import read_emf
from turnmill.backends.aws.settings import AwsSettings
from turnmill.records import InvalidReason
from turnmill.wiring.backend import backend_of

FAULTS = Faults(
    throttle=0.005,
    throughput=0.01,
    refuse=0.005,
    lose=0.01,
    slow=0.005,
    slow_s=2.0,
    expire=0.002,
    undelete=0.03,
    end_lease=0.15,
    seed=7,
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_exact_whatever_the_services_do(
    root: Path,
    emulator: Emulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    with running_proxy(emulator.url, tmp_path / "proxy", FAULTS) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with started(root, "run", max_steps="4", worker_lease_s="4", baseline_rollouts="16") as running:
            figures = running.finish(patience_s=600.0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", emulator.url)
    counts = proxy.counts()
    made = ", ".join(f"{name} {number}" for name, number in sorted(counts.faults.items()))
    record_property("figure", f"{counts.faults.total()} faults in {counts.requests.total()} requests: {made}")
    kinds = {"throttle", "throughput", "refuse", "lose", "slow", "expire", "undelete", "end_lease"}
    assert kinds == counts.faults.keys()
    assert figures["steps"] == 4
    check_accounting(root, figures)
    check_steps(root, figures)
    ends = accounted(read_records(root, figures["run_id"])[0])
    record_property("figure", f"ends of rollouts: {ends}")
    num_lost = ends.get(f"invalid:{InvalidReason.INFRA}", 0)
    assert num_lost <= sum(ends.values()) / 10, "most rollouts survive the faults"
    # The log of metrics may tell twice what was recorded once, and never anything else.
    recorded = {
        metric.step: metric.values[REWARD_MEAN] for metric in backend_of(root).reader(figures["run_id"]).metrics()
    }
    settings = AwsSettings(name=_name_of(root), region="us-east-1")
    clients = AwsClients(settings)
    points = asyncio.run(read_emf(clients, settings.log_group, figures["run_id"]))
    told = {point.properties["step"]: point.value for point in points if point.name == REWARD_MEAN}
    clients.close()
    assert told == recorded


def _name_of(root: Path) -> str:
    return (root / "turnmill.toml").read_text().partition('name = "')[2].partition('"')[0]
