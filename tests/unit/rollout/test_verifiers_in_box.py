"""Packages of verifiers in their box, through the relay, with the client and the checks of every other package."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.environment.verifiers_house import PACKAGES, needs_verifiers
from tests.unit.rollout.boxes import Run, boxed_worker, python_for
from turnmill.environment.registry import find
from turnmill.records import EnvironmentChoice, EnvironmentOrigin
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.box.order import Isolation, Limits

# Its libraries alone take seconds to load.
pytestmark = [needs_verifiers, pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(params=[Isolation.NAMESPACES, Isolation.UID, Isolation.BWRAP, Isolation.NONE])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    kind: Isolation = request.param
    return kind


def settings_of(tmp_path: Path, isolation: Isolation, package: str) -> Settings:
    root = tmp_path / "deployment"
    if not root.exists():
        root.mkdir(mode=0o700)
        shutil.copytree(PACKAGES / package, root / "custom-environments" / package)
    choice = EnvironmentChoice(env_id=package, origin=EnvironmentOrigin.VERIFIERS)
    return Settings(
        found=find(choice, root=root),
        isolation=isolation,
        hidden=[root],
        log=tmp_path / "environment.log",
        # Its libraries alone take more than 256 MiB.
        limits=Limits(memory_mb=1024, temp_mb=32, num_processes=64),
        call_timeout_s=60.0,
        load_s=60.0,
        block_s=5.0,
        python=python_for(isolation),
    )


async def test_a_package_of_verifiers_plays_in_its_box(tmp_path: Path, isolation: Isolation) -> None:
    async with boxed_worker(settings_of(tmp_path, isolation, "number-guess")) as run:
        run.proxy.reply = "7"
        for number in range(6):
            run.proxy.add(f"s_{number}", prompt="Guess.", answer="7" if number % 2 else "70")
        reports = await run.reports(6)
    rewards = {name: report["aggregate_reward_score"] for name, report in reports.items()}
    assert rewards == {f"s_{number}": float(number % 2) for number in range(6)}
    assert {report["stop_reason"] for name, report in reports.items() if rewards[name]} == {"end_of_conversation"}


async def played(run: Run, **data: Any) -> dict[str, Any]:
    run.proxy.add("s_0", prompt="Guess.", answer="7", **data)
    return (await run.reports(1))["s_0"]


async def test_missing_tokens_are_infra_from_the_box_as_in_the_worker_s_own_process(tmp_path: Path) -> None:
    async with boxed_worker(settings_of(tmp_path, Isolation.NONE, "number-guess")) as run:
        run.proxy.leaves_tokens_out = True
        report = await played(run)
    assert (report["aggregate_reward_score"], report["reason"]) == (None, "infra")


async def test_a_rollout_that_is_cancelled_at_its_deadline_is_infra_while_the_model_is_asked(tmp_path: Path) -> None:
    async with boxed_worker(settings_of(tmp_path, Isolation.NONE, "number-guess")) as run:
        run.proxy.may_chat.clear()
        run.proxy.add("s_0", prompt="Guess.", answer="7", limit_s=2.0)
        report = (await run.reports(1))["s_0"]
        assert (report["aggregate_reward_score"], report["reason"]) == (None, "infra")
        # The box goes on.
        run.proxy.may_chat.set()
        run.proxy.reply = "7"
        run.proxy.add("s_1", prompt="Guess.", answer="7")
        assert (await run.reports(2))["s_1"]["aggregate_reward_score"] == 1.0
