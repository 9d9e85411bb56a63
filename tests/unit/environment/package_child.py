"""In a process of its own: a package is found, loaded and checked as a run would; prints the report as JSON."""

import asyncio
import sys
from pathlib import Path

from turnmill.environment.preflight import choose, preflight
from turnmill.environment.registry import find, load
from turnmill.intake.dataset import read_tasks
from turnmill.records import EnvironmentChoice, PreflightRequest, encode


async def main(env_id: str, data: Path) -> None:
    choice = EnvironmentChoice(env_id=env_id)
    request = PreflightRequest(
        environment=choice, data_path=str(data), seed=0, max_length=16384, play_s=20.0, total_s=60.0
    )
    tasks = choose(read_tasks(data), request.seed)
    report = await preflight(load(find(choice)), tasks, request, playing=lambda what: None)
    print(encode(report).decode())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
