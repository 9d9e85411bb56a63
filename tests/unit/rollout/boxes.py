"""Packages and boxes for tests."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.unit.rollout.small_proxy import TOKEN, SmallProxy, small_proxy
from turnmill.config import Config
from turnmill.environment.registry import PACKAGES, find
from turnmill.records import EnvironmentChoice
from turnmill.rollout.box.isolation import Settings, probe
from turnmill.rollout.box.order import Isolation, Limits
from turnmill.rollout.worker import run_worker

HOSTILE = "hostile-env"
# Boxes by another uid need an interpreter that every user may execute.
_PYTHONS = (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}")


def python_for(isolation: Isolation) -> str:
    """An interpreter with which such boxes work here; skips the test without one."""
    if isolation is Isolation.BWRAP and os.geteuid() == 0:
        pytest.skip("boxes by bwrap are for users who are not root")
    if isolation.has_uid and os.geteuid() != 0:
        pytest.skip("boxes of another uid are for root")
    troubles = []
    for python in _PYTHONS:
        if not Path(python).exists():
            continue
        trouble = probe(isolation, python)
        if trouble is None:
            return python
        troubles.append(f"{python}: {trouble}")
    pytest.skip(f"no boxes by {isolation} here: {'; '.join(troubles)}")


def make_package(root: Path, env_id: str, *, source: str, pyproject: str = "") -> Path:
    """The package `env_id` of the deployment at `root`."""
    folder = root / PACKAGES / env_id
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(pyproject or f'[project]\nname = "{env_id}"\nversion = "1.0"\n')
    (folder / f"{env_id.replace('-', '_')}.py").write_text(source)
    return folder


def hostile_settings(root: Path, isolation: Isolation, **changes: Any) -> Settings:
    """Boxes of the hostile environment, in a deployment with secrets at `root`."""
    if not root.exists():
        root.mkdir(mode=0o700)
        make_package(root, HOSTILE, source=(Path(__file__).with_name("hostile_env.py")).read_text())
        (root / "control.token").write_text("controltoken0123456789abcdef0123456789abcdef")
        (root / "control.token").chmod(0o600)
    choice = EnvironmentChoice(env_id=HOSTILE, env_args=changes.pop("env_args", {}))
    settings = Settings(
        found=find(choice, root=root),
        isolation=isolation,
        hidden=[root],
        log=root.parent / "environment.log",
        limits=Limits(memory_mb=512, temp_mb=32, num_processes=32),
        call_timeout_s=60.0,
        load_s=60.0,
        block_s=2.0,
        python=python_for(isolation),
    )
    return replace(settings, **changes)


@dataclass
class Run:
    """A worker whose environment is in boxes."""

    proxy: SmallProxy
    settings: Settings
    worker: asyncio.Task[None]
    _stop: asyncio.Event

    async def stop(self) -> None:
        """End the worker, and with it its boxes."""
        self._stop.set()
        await self.worker

    async def reports(self, count: int) -> dict[str, dict[str, Any]]:
        """The first so many reports, by sample id."""
        await self.proxy.until(lambda: len(self.proxy.reports) >= count)
        return {report["id"]: report for report in self.proxy.reports}

    async def report_of(self, does: str, *, limit_s: float = 60.0, **data: Any) -> dict[str, Any]:
        """How a rollout ends that does that."""
        self.proxy.add("bad_0", limit_s=limit_s, do=does, **data)
        await self.proxy.until(lambda: any(report["id"] == "bad_0" for report in self.proxy.reports))
        return next(report for report in self.proxy.reports if report["id"] == "bad_0")


@asynccontextmanager
async def boxed_worker(settings: Settings, *, num_slots: int = 4) -> AsyncIterator[Run]:
    """It stops at the end, must, and leaves no process."""
    before = set(psutil.Process().children(recursive=True))
    stop = asyncio.Event()
    async with small_proxy() as proxy:
        config = Config(max_concurrent_rollouts=num_slots, worker_lease_s=1.0)
        worker = asyncio.create_task(
            run_worker(
                proxy_url=proxy.url, worker_token=TOKEN, name="w", config=config, environment=settings, stop=stop
            )
        )
        again = asyncio.create_task(proxy.lease_again())
        try:
            yield Run(proxy, settings, worker, stop)
        finally:
            again.cancel()
            stop.set()
            await worker
    assert set(psutil.Process().children(recursive=True)) <= before


def marked(mark: str) -> list[int]:
    """Processes, wherever they are, that are called `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
