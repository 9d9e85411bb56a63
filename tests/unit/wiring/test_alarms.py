"""Who delivers the alerts of a deployment: one process at a time, and when it has ended another one."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.unit.alerts.receivers import Receiver, receiver
from turnmill.alerts import Dispatcher, new_alert
from turnmill.errors import ConfigError
from turnmill.records import AlertKind
from turnmill.wiring.watching.alarms import look_at_alerts, open_alarms

SECRET = "a secret of twenty characters"


def configure(root: Path, there: Receiver) -> None:
    (root / "turnmill.toml").write_text(f'[[alerts]]\ntype = "webhook"\nurl = "{there.url}"\nsecret = "{SECRET}"\n')


async def raise_one(dispatcher: Dispatcher, run_id: str) -> None:
    await dispatcher.raise_alert(new_alert(AlertKind.RUN_FAILED, "failed", command="turnmill runs", run_id=run_id))


async def test_of_several_one_delivers_what_all_of_them_raise_and_nothing_comes_twice(tmp_path: Path) -> None:
    with receiver() as there:
        configure(tmp_path, there)
        async with open_alarms(tmp_path) as first, open_alarms(tmp_path) as second:
            await raise_one(first, "r1")
            await raise_one(second, "r2")
            await asyncio.to_thread(there.wait_for, 2)
        runs = [got.json["alert"]["run_id"] for got in there.received]
    assert sorted(runs) == ["r1", "r2"]
    states = [delivery.state for alert in look_at_alerts(tmp_path) for delivery in alert.deliveries]
    assert states == ["delivered"] * 4, "each to the log and to the receiver"
    assert (tmp_path / "locks" / "alerts.lock").read_text() == f"{os.getpid()}\n"


async def test_when_the_one_that_delivers_has_ended_the_next_one_does(tmp_path: Path) -> None:
    with receiver() as there:
        configure(tmp_path, there)
        async with open_alarms(tmp_path) as first:
            second = open_alarms(tmp_path)
            waiting = await second.__aenter__()
            await raise_one(first, "r1")
        try:
            await raise_one(waiting, "r2")
            await asyncio.to_thread(there.wait_for, 2)
        finally:
            await second.__aexit__(None, None, None)
        assert [json.loads(got.body)["alert"]["run_id"] for got in there.received] == ["r1", "r2"]


async def test_a_bad_turnmill_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text('[[alerts]]\ntype = "carrier pigeon"\n')
    with pytest.raises(ConfigError, match="carrier pigeon"):
        async with open_alarms(tmp_path):
            pass
