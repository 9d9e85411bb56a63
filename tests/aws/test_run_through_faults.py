"""A whole run while every service behaves as badly as it may: the accounting is exact all the same.

It takes its time: the emulator knows no attempt ids of receives, by which SQS gives the messages of a lost answer
again, so that each of them is hidden until its lease ends.
"""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.aws.emulator import Emulator, environ_of
from tests.aws.service_proxy import Faults, running_proxy
from tests.e2e.accounts import check_accounting, check_steps
from tests.e2e.house import accounted
from tests.e2e.processes import read_records, start_turnmill
from turnmill import assets
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.deployment import deploy_deployment
from turnmill.records import InvalidReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
FAULTS = Faults(
    throttle=0.01,
    throughput=0.01,
    refuse=0.01,
    lose=0.01,
    slow=0.003,
    slow_s=2.0,
    expire=0.002,
    undelete=0.02,
    end_lease=0.05,
    seed=1,
)
PARAMETERS = {
    "max-steps": "2",
    "global-batch-size": "8",
    "number-generation": "4",
    "max-refill-rounds": "50",
    "baseline-rollouts": "0",
    # Leases run out while their rollouts are played.
    "worker-lease-s": "3",
    "max-concurrent-rollouts": "32",
}


def test_a_run_completes_exactly_through_all_faults_at_once(
    emulator: Emulator, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    name = f"t-{os.urandom(4).hex()}"
    settings = emulator.settings(name)
    clients = AwsClients(settings)
    asyncio.run(deploy_deployment(clients, settings, lambda _: None))
    clients.close()
    root = tmp_path / "root"
    root.mkdir()
    (root / "turnmill.toml").write_text(f'[backend]\ntype = "aws"\nname = "{name}"\n')
    options = [part for key, value in PARAMETERS.items() for part in (f"--{key}", value)]
    where = ["--json", "--root", str(root), "--local-compute", "--data", str(assets.wordle_data("train"))]
    with (
        running_proxy(emulator.url, tmp_path / "proxy", FAULTS) as proxy,
        start_turnmill(root, ["run", *where, *options], environ_of(proxy.url)) as running,
    ):
        out, err = running.process.communicate(timeout=450)
        assert running.process.returncode == 0, f"{out}\n{err}"
    figures = json.loads(out.splitlines()[-1])
    check_accounting(root, figures)
    check_steps(root, figures)
    counts = proxy.counts()
    wanted = ("throttle", "throughput", "refuse", "lose", "slow", "expire", "undelete", "end_lease")
    assert not [kind for kind in wanted if not counts.faults[kind]], counts.faults
    ends = accounted(read_records(root, figures["run_id"])[0])
    num_infra = ends.get(f"invalid:{InvalidReason.INFRA}", 0)
    record_property("figure", f"{sum(counts.requests.values())} requests, faults {dict(counts.faults)}")
    record_property("figure", f"ends of rollouts {ends}")
    assert num_infra <= sum(ends.values()) / 10, "most rollouts survive the faults"
