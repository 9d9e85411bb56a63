"""A replica of a house in a process of its own: `python -m tests.e2e.replica_child FOLDER INDEX CONFIG`."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import torch

from tests.e2e.house import MODEL
from turnmill.backends.embedded import open_run
from turnmill.config import from_dict
from turnmill.generation.engine import EngineResult
from turnmill.generation.renderer import Renderer
from turnmill.generation.replica import run_replica
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import replica_name

# A call of some tokens takes long enough to be interrupted.
STEP_S = 0.02


class SlowEngine(TransformersEngine):
    """The engine, no faster than a larger model."""

    def step(self) -> list[EngineResult]:
        time.sleep(STEP_S)
        return super().step()


async def serve(folder: Path, index: int, config_json: str) -> None:
    torch.set_num_threads(1)
    config = from_dict(json.loads(config_json))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    ports = open_run(folder, "house", num_replicas=config.generation_replicas)
    try:
        await run_replica(
            ports,
            run_id="house",
            name=replica_name(index),
            index=index,
            config=config,
            engine=SlowEngine(MODEL, num_slots=config.generation_slots, max_length=config.max_length),
            renderer=Renderer(MODEL),
            stop=stop,
        )
    finally:
        ports.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
