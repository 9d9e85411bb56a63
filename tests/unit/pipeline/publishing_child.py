"""A trained run on disk, and a process that publishes it: `python publishing_child.py ROOT`."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from turnmill.backends.embedded import ProcessLauncher, open_root_records, open_run
from turnmill.config import Config, to_dict
from turnmill.errors import InvalidInput
from turnmill.pipeline.engine import RunRecord, load_run
from turnmill.pipeline.publishing import poll_publish, start_publish
from turnmill.pipeline.stage import BASE_VERSION, Done, StageContext
from turnmill.ports import Write
from turnmill.records import (
    Metric,
    Purpose,
    Run,
    RunStatus,
    StageRecord,
    TrainingStatus,
    Version,
    encode,
    training_key,
)

VERSION = Version(incarnation=1, n=2)
CONFIG = Config(max_steps=2)
BASELINE = {
    "verdict": "signal",
    "num_tasks": 16,
    "num_rollouts": 64,
    "pass_rate": 0.125,
    "low": 0.065,
    "high": 0.228,
    "reward_mean": 0.125,
}


async def unused_quarantine(error: InvalidInput) -> InvalidInput:
    return error


async def nothing_redriven() -> int:
    return 0


def evaluation(solved: float, **more: Any) -> dict[str, Any]:
    """What Evaluate records of one side, with an interval that is as wide as one of 50 rollouts."""
    figures = {"solved": solved, "solved_low": solved - 0.12, "solved_high": solved + 0.12, "reward_mean": solved}
    return {**figures, "num_tasks": 50, "num_valid": 50, **more}


BETTER = {"both": 10.0, "gained": 25.0, "lost": 0.0, "neither": 15.0}
EVALUATIONS = {"before": evaluation(0.2), "after": evaluation(0.7, pairs=BETTER)}
WORSE = {"before": evaluation(0.7), "after": evaluation(0.2, pairs={**BETTER, "gained": 0.0, "lost": 25.0})}


def stages(evaluations: dict[str, Any]) -> tuple[StageRecord, ...]:
    digest = "d" * 64
    results: dict[str, dict[str, Any]] = {
        "ValidateData": {"data": {"path": "/data/tasks|1.jsonl", "rows": 150, "digest": digest, "earlier": "r0"}},
        "SubmitTraining": {"steps": 2, "baseline": BASELINE},
        "Evaluate": evaluations,
    }
    return tuple(
        StageRecord(name=name, state="done", started_at=1.0, ended_at=2.0, result=result)
        for name, result in results.items()
    )


async def prepare(
    root: Path, run_id: str = "r1", *, evaluations: dict[str, Any] | None = None, content: bytes = b"weights"
) -> Path:
    """The records of a run that is about to publish, and its checkpoint."""
    run = Run(
        run_id=run_id,
        cause="bucket/tasks.jsonl@1",
        upload="tasks.jsonl",
        status=RunStatus.ACTIVE,
        created_at=1.0,
        config=to_dict(CONFIG),
        sources={"max_steps": "--max-steps"},
        data_path=None,
        stages=stages(EVALUATIONS if evaluations is None else evaluations),
    )
    runs = open_root_records(root)
    await RunRecord.create(runs, run)
    runs.close()
    ports = open_run(root, run_id, num_replicas=0)
    checkpoint = root / "runs" / run_id / "checkpoints" / "final"
    checkpoint.mkdir(parents=True)
    digest = f"fingerprint of {content.decode()}"
    (checkpoint / "model.safetensors").write_bytes(content)
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "checkpoint.json").write_text(json.dumps({"digest": digest}))
    await ports.weights.publish(VERSION, checkpoint, digest)
    for step, reward in ((1, 0.25), (2, 0.5), (3, 0.9)):
        await ports.metrics.write(Metric(run_id=run_id, step=step, time=1.0, values={"reward_mean": reward}))
    status = TrainingStatus(
        run_id=run_id,
        state="succeeded",
        step=2,
        max_steps=2,
        incarnation=1,
        updated_at=time.time(),
        checkpoint=str(checkpoint),
        version=VERSION,
    )
    await ports.records.write([Write(key=training_key(run_id), value=encode(status), expected=None)])
    ports.close()
    return checkpoint


class NoEvaluations:
    """Publishing plays nothing."""

    async def start(
        self, name: str, path: Path, purpose: Purpose = Purpose.EVAL, version: Version = BASE_VERSION
    ) -> None:
        raise AssertionError(name)

    def poll(self, name: str) -> dict[str, Any] | None:
        raise AssertionError(name)

    def compare(self, before: str, after: str, *, by: str) -> dict[str, Any]:
        raise AssertionError(before)

    def progress(self, name: str) -> str:
        raise AssertionError(name)


async def _nothing(*_: object) -> dict[str, Any]:
    raise AssertionError("publishing neither validates nor claims")


@asynccontextmanager
async def opened(root: Path, run_id: str = "r1", config: Config = CONFIG) -> AsyncIterator[StageContext]:
    """The context of the run's stages."""
    ports = open_run(root, run_id, num_replicas=0)
    try:
        yield StageContext(
            run=await load_run(ports.runs, run_id),
            config=config,
            ports=ports,
            launcher=ProcessLauncher(root),
            evaluations=NoEvaluations(),
            validate=_nothing,
            quarantine=unused_quarantine,
            claim=_nothing,
            give_up_redriven=nothing_redriven,
            worker_env={},
            check=lambda: None,
        )
    finally:
        ports.close()


async def publish(root: Path, run_id: str = "r1", config: Config = CONFIG) -> dict[str, Any]:
    """The result of the stage."""
    async with opened(root, run_id, config) as ctx:
        handle = await start_publish(ctx)
        while not isinstance(done := await poll_publish(ctx, handle), Done):
            pass
        return done.result


if __name__ == "__main__":
    print(json.dumps(asyncio.run(publish(Path(sys.argv[1])))))
