"""JSON logs carry the ids of what they are about, also where the part that logs does not know them."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from turnmill.telemetry import configure_logging, log_as_run, log_as_stage, log_at

logger = logging.getLogger("turnmill.tests")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    found = io.StringIO()
    configure_logging("control", stream=found, form="json")
    yield found
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def walk(run_id: str) -> None:
    log_as_run(run_id)
    with log_as_stage("Evaluate"):
        await asyncio.gather(asyncio.create_task(part()), asyncio.to_thread(logger.info, "in a thread"))
    logger.info("behind the stage", extra={"at": "one/train/s/1"})


async def part() -> None:
    logger.info("in a task")


async def test_each_line_has_the_run_and_the_stage_of_the_task_that_logs_it(stream: io.StringIO) -> None:
    await asyncio.gather(asyncio.create_task(walk("one")), asyncio.create_task(walk("two")))
    logger.info("of no run")
    for run_id in ("one", "two"):
        found = {line["message"]: line for line in lines(stream) if line.get("run") == run_id}
        assert found["in a task"]["stage"] == found["in a thread"]["stage"] == "Evaluate"
        assert "stage" not in found["behind the stage"] and found["behind the stage"]["at"] == "one/train/s/1"
    (last,) = [line for line in lines(stream) if line["message"] == "of no run"]
    assert not {"run", "stage", "at"} & set(last)


async def play(sample: str) -> None:
    log_at(f"{sample}/1")
    logger.info("from an environment")
    logger.info("of another", extra={"at": "other"})


async def test_what_an_environment_logs_says_which_rollout_it_plays(stream: io.StringIO) -> None:
    await asyncio.gather(*[asyncio.create_task(play(sample)) for sample in ("a", "b")])
    assert [line["at"] for line in lines(stream)] == ["a/1", "other", "b/1", "other"]
    configure_logging("worker-0", stream=stream)
    await asyncio.create_task(play("c"))
    assert "from an environment [c/1]" in stream.getvalue()


def test_a_process_of_one_run_says_so_on_each_line(stream: io.StringIO) -> None:
    configure_logging("trainer", stream=stream, form="json", run_id="three")
    logger.info("anything")
    assert lines(stream)[-1]["run"] == "three"
