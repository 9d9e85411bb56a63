"""`turnmill alerts`: what there is, what of it is open, and how one says that it is over."""

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from turnmill.alerts import Dispatcher, Feed, new_alert
from turnmill.alerts.log import LogChannel
from turnmill.alerts.policy import Channel
from turnmill.backends.embedded import open_root_records
from turnmill.cli.commands import turnmill
from turnmill.errors import InvalidInput
from turnmill.records import AlertKind


def run(root: Path, *arguments: str) -> Result:
    return CliRunner().invoke(turnmill, ["alerts", *arguments, "--root", str(root)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With an open alert, one that is over, and one that replaces an earlier one about the same."""

    async def fill() -> None:
        records = open_root_records(tmp_path)
        dispatcher = Dispatcher(Feed(records), [Channel(notifier=LogChannel())])
        await dispatcher.start()
        conversation = "samples/r1/train/7_2"
        for kind, now in (
            (AlertKind.STAGE_SLOW, 1000.0),
            (AlertKind.REWARD_COLLAPSE, 1001.0),
            (AlertKind.CRASH_LOOP, 1002.0),
            (AlertKind.CRASH_LOOP, 9000.0),
        ):
            alert = new_alert(kind, f"{kind}", command="turnmill runs", run_id="r1", conversation=conversation, now=now)
            await dispatcher.raise_alert(alert)
        await dispatcher.resolve(AlertKind.STAGE_SLOW, run_id="r1")
        await dispatcher.close()
        records.close()

    asyncio.run(fill())
    return tmp_path


def test_alerts_are_filtered_by_kind_and_by_whether_they_are_open(root: Path) -> None:
    kinds = [alert["kind"] for alert in json.loads(run(root, "--json").stdout)]
    assert kinds == ["stage_slow", "reward_collapse", "crash_loop", "crash_loop"]
    still = [alert["kind"] for alert in json.loads(run(root, "--json", "--open").stdout)]
    assert still == ["reward_collapse", "crash_loop", "crash_loop"]
    shown = run(root, "--kind", "stage_slow", "--kind", "reward_collapse").stdout
    assert "over since 1970" in shown or "over since 2" in shown
    assert ": open" in shown and shown.count("conversation: samples/r1/train/7_2") == 2 and "crash" not in shown
    assert run(root, "--kind", "stage_slow", "--open").stdout == f"no open alerts of kind stage_slow in {root}\n"
    assert run(root, "--kind", "nonsense").exit_code == 2


def test_one_says_that_an_alert_is_over_and_those_who_were_told_are_told_so(root: Path) -> None:
    listed = {alert["kind"]: alert for alert in json.loads(run(root, "--json").stdout)}
    done = run(root, "--resolve", listed["reward_collapse"]["alert_id"], "--json")
    (alert,) = json.loads(done.stdout)
    assert alert["resolved_at"] is not None
    (kept,) = json.loads(run(root, "--kind", "reward_collapse", "--json").stdout)
    assert [(one["action"], one["state"]) for one in kept["deliveries"]] == [
        ("trigger", "delivered"),
        ("resolve", "delivered"),
    ]


def test_what_can_not_be_resolved_is_refused_with_a_reason(root: Path) -> None:
    slow, _, earlier, later = [alert["alert_id"] for alert in json.loads(run(root, "--json").stdout)]
    assert "is over already" in str(run(root, "--resolve", slow).exception)
    assert f"a later one about the same: {later}" in str(run(root, "--resolve", earlier).exception)
    assert "there is no alert 'x'" in str(run(root, "--resolve", "x").exception)
    assert "leave out RUN" in str(run(root, "--resolve", slow, "--open").exception)
    assert all(alert["resolved_at"] is None for alert in json.loads(run(root, "--kind", "crash_loop", "--json").stdout))


def test_a_bad_turnmill_toml_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "turnmill.toml").write_text('[[alerts]]\ntype = "carrier pigeon"\n')
    done = CliRunner().invoke(turnmill, ["demo", "--root", str(tmp_path)])
    assert isinstance(done.exception, InvalidInput) and "carrier pigeon" in str(done.exception)
    assert not (tmp_path / "runs").exists() and not (tmp_path / "records").exists()
