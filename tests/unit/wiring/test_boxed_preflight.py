"""The preflight of packages: their code runs in a box, and whatever it does there is a report."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rollout.boxes import hostile_settings, make_package
from turnmill.backends.embedded import open_run
from turnmill.environment.registry import find
from turnmill.errors import InvalidInput
from turnmill.pipeline.preparing import report_key, request_key
from turnmill.records import CheckState, EnvironmentChoice, PreflightReport, PreflightRequest, decode, encode
from turnmill.rollout.box.isolation import Settings
from turnmill.rollout.box.order import Isolation
from turnmill.wiring.running.boxed_preflight import run_boxed_preflight

RUN = "20260101-000000-00000001"
ECHO = """
from turnmill.environment.base import Environment, Outcome, opening_messages

class Echo(Environment):
    async def play(self, task, chat):
        reply = await chat.complete(opening_messages(task))
        return Outcome(reward=float(reply.content == task.metadata["answer"]))

    async def score(self, task, messages):
        from turnmill.environment.base import Score
        return Score(reward=0.0)

def load_environment():
    return Echo()
"""


async def report_of(tmp_path: Path, settings: Settings, **metadata: Any) -> PreflightReport:
    (tmp_path / "tasks.jsonl").write_bytes(
        b"\n".join(
            encode({"id": f"t{number}", "metadata": {"prompt": "Say it.", "answer": "it", **metadata}})
            for number in range(3)
        )
        + b"\n"
    )
    request = PreflightRequest(
        environment=settings.found.choice,
        data_path=str(tmp_path / "tasks.jsonl"),
        seed=1,
        max_length=1000,
        play_s=1.0,
        total_s=20.0,
    )
    ports = open_run(tmp_path / "deployment", RUN, num_replicas=0)
    try:
        await ports.blobs.put(request_key("preflight-1"), encode(request))
        await run_boxed_preflight(
            ports.blobs, "preflight-1", stop=asyncio.Event(), settings_of=lambda _: settings, grace_s=0.5
        )
        return decode(await ports.blobs.get(report_key("preflight-1")), PreflightReport)
    finally:
        ports.close()


async def test_an_environment_that_is_well_has_a_good_report(tmp_path: Path) -> None:
    make_package(tmp_path, "echo", source=ECHO)
    found = find(EnvironmentChoice(env_id="echo"), root=tmp_path)
    settings = replace(hostile_settings(tmp_path / "root", Isolation.NONE), found=found)

    report = await report_of(tmp_path, settings)

    assert [check.state for check in report.checks] == [CheckState.OK] * len(report.checks)
    assert report.mean_rewards == {"gold": 1.0, "garbage": 0.0}
    assert report.tasks == ("t0", "t1", "t2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "check", "text"),
    [
        ("fail", "play", "KeyError: 'play'"),
        ("block", "limits", "hostile_env.py"),
        ("hang", "limits", "no end after 1 s"),
        ("refuse_to_end", "limits", "no end after"),
        ("crash", "limits", "its process ended"),
        ("exit_at_once", "limits", "its process ended"),
        ("score", "reward", "LookupError: score"),
    ],
)
async def test_what_an_environment_does_wrong_is_in_the_report(
    tmp_path: Path, does: str, check: str, text: str
) -> None:
    report = await report_of(tmp_path, hostile_settings(tmp_path / "root", Isolation.NONE), task=does)

    failed = {check.name: check.detail for check in report.failed}
    assert text in failed[check]


async def test_an_environment_that_does_not_load_is_in_the_report(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.NONE, env_args={"fault": "raise"})
    report = await report_of(tmp_path, settings)

    assert [(check.name, "KeyError: 'load'" in check.detail) for check in report.failed] == [("loads", True)]


async def test_a_package_that_is_not_there_is_in_the_report(tmp_path: Path) -> None:
    settings = hostile_settings(tmp_path / "root", Isolation.NONE)

    def settings_of(_: EnvironmentChoice) -> Settings:
        raise InvalidInput("env: there is no environment 'gone'")

    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "metadata": {"prompt": "x"}}\n')
    request = PreflightRequest(
        environment=settings.found.choice,
        data_path=str(tmp_path / "tasks.jsonl"),
        seed=1,
        max_length=1000,
        play_s=1.0,
        total_s=20.0,
    )
    ports = open_run(tmp_path / "deployment", RUN, num_replicas=0)
    try:
        await ports.blobs.put(request_key("preflight-1"), encode(request))
        await run_boxed_preflight(ports.blobs, "preflight-1", stop=asyncio.Event(), settings_of=settings_of)
        report = decode(await ports.blobs.get(report_key("preflight-1")), PreflightReport)
    finally:
        ports.close()
    assert [(check.name, check.detail) for check in report.failed] == [("loads", "env: there is no environment 'gone'")]
