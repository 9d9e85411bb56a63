"""A process that plays a rollout in a box for ever: started, and killed, by a test. Arguments: root, isolation, URL."""

import asyncio
import sys
from pathlib import Path

from tests.unit.rollout.boxes import hostile_settings
from tests.unit.rollout.small_proxy import TOKEN
from turnmill.config import Config
from turnmill.rollout.box.order import Isolation
from turnmill.rollout.worker import run_worker


async def main() -> None:
    settings = hostile_settings(Path(sys.argv[1]), Isolation(sys.argv[2]))
    await run_worker(
        proxy_url=sys.argv[3],
        worker_token=TOKEN,
        name="w",
        config=Config(),
        environment=settings,
        stop=asyncio.Event(),
    )


if __name__ == "__main__":
    asyncio.run(main())
