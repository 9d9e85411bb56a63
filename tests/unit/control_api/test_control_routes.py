"""What the interface says is what the records say, and what it is told is done or refused with a reason."""

import asyncio
import io
import json
import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.unit.control_api.conftest import Client, made_run, play, served, store, tree, until
from turnmill.backends.embedded import open_root_records, open_run
from turnmill.cli.commands import turnmill
from turnmill.errors import Conflict
from turnmill.ports import Message, Write
from turnmill.records import Alert, AlertKind, RunStatus, SampleState, Severity, cancel_key, encode
from turnmill.wiring.deployment import Deployment, Layers, News
from turnmill.wiring.reading.figures import summary
from turnmill.wiring.reading.runs import began, look_at_run, look_at_steps

LIVING: dict[str, Any] = {"pid": os.getpid(), "pid_began": began(os.getpid())}


async def test_runs_are_listed_newest_first_with_their_figures_and_nothing_on_disk_changes(tmp_path: Path) -> None:
    runs = [made_run(f"r{index}", created_at=float(index), status=RunStatus.CANCELLED) for index in range(3)]
    await store(tmp_path, *runs, made_run("now", created_at=9.0, **LIVING))
    await play(tmp_path, runs[1], num_steps=2, samples={SampleState.TRAINED: 2})
    before = tree(tmp_path)
    async with served(tmp_path) as client:
        found = (await client.get("/api/v1/runs")).json
        assert [run["run_id"] for run in found["runs"]] == ["now", "r2", "r1", "r0"] and found["num_left_out"] == 0
        assert found["runs"][2] == summary(runs[1], look_at_steps(tmp_path, "r1")) and found["runs"][2]["steps"] == 2
        part = (await client.get("/api/v1/runs?limit=1&status=cancelled")).json
        assert [run["run_id"] for run in part["runs"]] == ["r2"] and part["num_left_out"] == 2
        one = (await client.get("/api/v1/runs/r1")).json
        assert one["latest"]["reward_mean"] == 0.2 and one["summary"] == found["runs"][2]
        assert [stage["name"] for stage in one["stages"]] == ["ValidateData", "SubmitTraining"]
        assert "worker_token_hash" not in one and b"a hash" not in (await client.get("/api/v1/runs/r1")).body
        steps = (await client.get("/api/v1/runs/r1/metrics")).json
        assert [step["step"] for step in steps["steps"]] == [1, 2], "without the one that was given up"
        steps = (await client.get("/api/v1/runs/r1/metrics?after=0&limit=1")).json
        assert [step["step"] for step in steps["steps"]] == [1] and steps["num_left_out"] == 1
        assert steps["steps"][0]["values"]["reward_mean"] == 0.1
        await client.get("/metrics")
    assert tree(tmp_path) == before


async def test_queues_and_alerts_are_those_of_the_records(tmp_path: Path) -> None:
    await store(tmp_path, made_run(**LIVING))
    ports = open_run(tmp_path, "one", num_replicas=1)
    await ports.rollout_request.send([Message(body=b"x", group=name, dedup_id=None) for name in "abc"])
    await ports.rollout_request.lease(max_messages=1, lease_s=60)
    ports.close()
    alerts = [
        Alert(
            alert_id=f"{index:013d}",
            kind=AlertKind.RUN_FAILED,
            severity=Severity.ERROR,
            created_at=float(index),
            summary="it failed",
            command="turnmill status",
            run_id="one" if index else None,
        )
        for index in range(3)
    ]
    records = open_root_records(tmp_path)
    await records.write([Write(key=alert.key, value=encode(alert), expected=0) for alert in alerts])
    records.close()
    async with served(tmp_path) as client:
        queues = (await client.get("/api/v1/runs/one/queues")).json["queues"]
        assert (queues["rollout_request"]["available"], queues["rollout_request"]["in_flight"]) == (2, 1)
        assert len(queues["generate_request"]["replicas"]) == 1 and queues["rollout_response"]["available"] == 0
        found = (await client.get("/api/v1/alerts?run=one&limit=1")).json
        assert [alert["created_at"] for alert in found["alerts"]] == [2.0] and found["num_left_out"] == 1
        assert len((await client.get("/api/v1/alerts")).json["alerts"]) == 3


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/api/v1/runs/nobody", 404, "there is no run 'nobody'"),
        ("GET", "/api/v1/runs/..%2F..%2Fetc/metrics", 404, "there is nothing at"),
        ("GET", "/api/v1/runs/%2e%2e/metrics", 404, "there is no run '..'"),
        ("GET", "/api/v1/runs/a%00b/queues", 404, "there is no run"),
        ("GET", "/api/v1/runs/%ff/queues", 404, "there is no run"),
        ("POST", "/api/v1/runs/nobody/cancel", 404, "there is no run 'nobody'"),
        ("GET", "/api/v1/alerts?run=nobody", 404, "there is no run 'nobody'"),
        ("GET", "/api/v2/runs", 404, "there is nothing at /api/v2/runs"),
        ("GET", "/api/v1/runs/", 404, "there is nothing at"),
        ("DELETE", "/api/v1/runs", 405, "DELETE is not possible"),
        ("GET", "/api/v1/runs/one/cancel", 405, "GET is not possible"),
        ("POST", "/api/v1/uploads/a.jsonl", 405, "POST is not possible"),
        ("GET", "/api/v1/runs?limit=0", 400, "limit = 0: must be a whole number from 1 to 500"),
        ("GET", "/api/v1/runs?limit=1e9", 400, "limit = 1e9"),
        ("GET", "/api/v1/runs?limit=1&limit=2", 400, "limit: given more than once"),
        ("GET", "/api/v1/runs?status=lost", 400, "status = lost: must be one of queued, active"),
        ("GET", "/api/v1/runs?colour=red", 400, "colour: no such parameter; known are status, limit"),
        ("GET", "/api/v1/runs/one?a=b", 400, "a: no such parameter; there are none here"),
    ],
)
async def test_what_is_wrong_is_said(tmp_path: Path, method: str, path: str, status: int, text: str) -> None:
    await store(tmp_path, made_run())
    async with served(tmp_path) as client:
        answer = await client.ask(method, path)
    assert (answer.status, set(answer.json), set(answer.json["error"])) == (status, {"error"}, {"message", "type"})
    assert text in answer.json["error"]["message"], answer.json
    assert status != 405 or answer.headers["Allow"]


async def test_a_damaged_file_is_an_answer_and_no_traceback(tmp_path: Path) -> None:
    await store(tmp_path, made_run())
    (tmp_path / "records" / "alerts.db").write_bytes(b"no database" * 1000)
    async with served(tmp_path) as client:
        answer = await client.get("/api/v1/alerts")
        assert answer.status == 500 and "alerts.db" in answer.json["error"]["message"]
        assert (await client.get("/api/v1/runs")).status == 200


async def test_a_run_whose_files_are_damaged_hides_no_other_one(tmp_path: Path) -> None:
    await store(tmp_path, made_run("good"), made_run("bad"))
    await play(tmp_path, made_run("bad"), num_steps=1, samples={})
    (tmp_path / "runs" / "bad" / "metrics.jsonl").unlink()
    (tmp_path / "runs" / "bad" / "metrics.jsonl").mkdir()
    async with served(tmp_path) as client:
        found = {run["run_id"]: run for run in (await client.get("/api/v1/runs")).json["runs"]}
    assert "metrics.jsonl" in found["bad"]["unreadable"] and "unreadable" not in found["good"]
    # A command has an event loop of its own.
    listed = await asyncio.to_thread(CliRunner().invoke, turnmill, ["runs", "--json", "--root", str(tmp_path)])
    assert [run["run_id"] for run in json.loads(listed.stdout)] == ["good", "bad"]
    shown = await asyncio.to_thread(CliRunner().invoke, turnmill, ["runs", "--root", str(tmp_path)])
    assert "the figures of run bad can't be read" in shown.stderr and "good" in shown.stdout


async def test_a_run_that_nobody_has_is_cancelled_at_once_and_one_that_goes_on_is_asked(tmp_path: Path) -> None:
    await store(tmp_path, made_run("waits", status=RunStatus.QUEUED), made_run("active", **LIVING))
    async with served(tmp_path) as client:
        answer = await client.ask("POST", "/api/v1/runs/waits/cancel")
        assert (answer.status, answer.json) == (200, {"run_id": "waits", "status": "cancelled"})
        again = await client.ask("POST", "/api/v1/runs/waits/cancel")
        assert again.status == 409 and "has ended already: cancelled" in again.json["error"]["message"]
        asked = await client.ask("POST", "/api/v1/runs/active/cancel")
        assert (asked.status, asked.json) == (202, {"run_id": "active", "status": "active"})
    assert look_at_run(tmp_path, "waits").status is RunStatus.CANCELLED
    records = open_root_records(tmp_path)
    assert (await records.get([cancel_key("active")]))[0] is not None
    records.close()


# ---------------------------------------------------------------- uploads


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def files_below(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file()}


def in_bucket(root: Path) -> dict[str, bytes]:
    folder = root / "bucket" / "training-data"
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_an_upload_lies_in_the_bucket_whole_and_again_takes_its_place(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        big = os.urandom(3_000_000)
        answer = await client.ask("PUT", "/api/v1/uploads/team/b%C3%BCcher%20one.jsonl", data=io.BytesIO(big))
        assert (answer.status, answer.json) == (201, {"key": "team/b\u00fccher one.jsonl", "num_bytes": 3_000_000})
        answer = await client.ask("PUT", "/api/v1/uploads/a.config.toml", data=b"max_steps = 2\n")
        assert answer.status == 201
        answer = await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=chunks(b"one ", b"two"))
        assert answer.status == 201, "a body in chunks"
        answer = await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=b"three")
        assert answer.status == 200
    assert in_bucket(tmp_path) == {
        "team/b\u00fccher one.jsonl": big,
        "a.config.toml": b"max_steps = 2\n",
        "a.jsonl": b"three",
    }


@pytest.mark.parametrize(
    "key",
    [
        "../a.jsonl",
        "..%2F..%2Fa.jsonl",
        "%2e%2e/a.jsonl",
        "/etc/a.jsonl",
        "%2Fetc%2Fa.jsonl",
        "a/../../b.jsonl",
        "a//b.jsonl",
        "./a.jsonl",
        "a%00.jsonl",
        "%ff.jsonl",
        "a.txt",
        "",
        ".jsonl",
        ".config.toml",
        ".hidden/a.jsonl",
        "a~/x.jsonl",
        "x" * 260 + ".jsonl",
        "x/" * 600 + "a.jsonl",
        "turnmill.toml",
    ],
)
async def test_a_name_that_leads_elsewhere_or_to_nothing_is_refused(tmp_path: Path, key: str) -> None:
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    async with served(root) as client:
        answer = await client.ask("PUT", f"/api/v1/uploads/{key}", data=b"{}")
    assert answer.status == 400, answer.body
    assert re.search("can't be the name of an upload|looks like a temporary file", answer.json["error"]["message"])
    assert files_below(tmp_path) == {"control.token"}


async def test_what_is_too_large_empty_or_cut_leaves_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, max_upload_bytes=200_000) as client:
        said = await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=b"x" * 200_001)
        unsaid = await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=chunks(*[b"x" * 10_000] * 21))
        sidecar = await client.ask("PUT", "/api/v1/uploads/a.config.toml", data=b"x" * 65_537)
        empty = await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=b"")
        assert [answer.status for answer in (said, unsaid, sidecar, empty)] == [413, 413, 413, 400]
        assert said.json["error"] == {"message": "the body must not be larger than 200000 bytes", "type": "too_large"}
        other = await client.ask("POST", "/api/v1/runs/one/cancel", data=b"x" * 65_537)
        assert other.status == 413
        host, port = client.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"PUT /api/v1/uploads/cut.jsonl HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {client.token}\r\n"
        writer.write(head.encode() + b"Content-Length: 100\r\n\r\nhalf")
        folder = tmp_path / "bucket" / "training-data"
        await until(lambda: any(folder.glob(".*.tmp")))
        writer.close()
        await writer.wait_closed()
        await until(lambda: not any(folder.glob(".*.tmp")))
        assert (await client.ask("PUT", "/api/v1/uploads/a.jsonl", data=b"x" * 200_000)).status == 201
    assert list(in_bucket(tmp_path)) == ["a.jsonl"]


async def test_a_name_that_a_folder_has_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "bucket" / "training-data" / "a.jsonl" / "b").mkdir(parents=True)
    (tmp_path / "bucket" / "training-data" / "file").write_text("")
    async with served(tmp_path) as client:
        for key in ("a.jsonl", "file/a.jsonl"):
            answer = await client.ask("PUT", f"/api/v1/uploads/{key}", data=b"{}")
            assert answer.status == 409 and "a folder has that name" in answer.json["error"]["message"]
    assert list(in_bucket(tmp_path)) == ["file"]


async def test_an_upload_through_the_interface_becomes_a_run_of_the_deployment(tmp_path: Path) -> None:
    stop, told = asyncio.Event(), list[News]()
    ready = asyncio.Event()
    # No such model: the run fails before any process is started.
    layers = Layers(file=None, environ={}, flags={"base_model": "/nowhere/model"})
    deployment = Deployment(tmp_path, layers, max_parallel_runs=1, tell=told.append)
    found: list[Client] = []

    async def use() -> None:
        await ready.wait()
        async with asyncio.timeout(30):
            await found[0].ask("PUT", "/api/v1/uploads/team/a.jsonl", data=b'{"id": "a"}\n')
            await until(lambda: any(news.run is not None and news.run.status is RunStatus.FAILED for news in told))
            runs = (await found[0].get("/api/v1/runs?status=failed")).json["runs"]
        assert [run["upload"] for run in runs] == ["team/a.jsonl"] and "/nowhere/model" in runs[0]["error"]
        stop.set()

    def beside() -> "Served":
        return Served(tmp_path, found)

    using = asyncio.create_task(use())
    await deployment.up(stop, ready.set, beside=beside)
    await using
    assert not (tmp_path / "control.json").exists()


class Served:
    """The interface beside a deployment."""

    def __init__(self, root: Path, found: list[Client]) -> None:
        self._context = served(root)
        self._found = found

    async def __aenter__(self) -> None:
        self._found.append(await self._context.__aenter__())

    async def __aexit__(self, *error: object) -> None:
        await self._context.__aexit__(None, None, None)


async def test_a_root_that_is_served_keeps_the_address_of_its_server(tmp_path: Path) -> None:
    layers = Layers(file=None, environ={}, flags={})
    stop, ready = asyncio.Event(), asyncio.Event()
    first = Deployment(tmp_path, layers, max_parallel_runs=1, tell=lambda _: None)
    second = Deployment(tmp_path, layers, max_parallel_runs=1, tell=lambda _: None)
    serving = asyncio.create_task(first.up(stop, ready.set, beside=lambda: Served(tmp_path, [])))
    await asyncio.wait_for(ready.wait(), 20)
    address = (tmp_path / "control.json").read_text()
    with pytest.raises(Conflict, match="is served by another"):
        await second.up(asyncio.Event(), lambda: None, beside=lambda: Served(tmp_path, []))
    assert (tmp_path / "control.json").read_text() == address
    stop.set()
    await serving
