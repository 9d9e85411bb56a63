"""A proxy in a process of its own, to be killed: `python -m tests.unit.conversation.proxy_child ROOT FORM`.

It prints its port once it serves.
"""

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from tests.unit.conversation.conftest import CONFIG, RUN, RUN_ID, Form
from turnmill.backends.embedded import open_run
from turnmill.conversation.hosting import serve
from turnmill.conversation.proxy import create_app
from turnmill.conversation.sessions import Sessions
from turnmill.conversation.shared import SharedSessions


async def serve_run(root: Path, form: Form) -> None:
    ports = open_run(root, RUN_ID, num_replicas=1)
    async with AsyncExitStack() as stack:
        service: Sessions | SharedSessions
        if form is Form.LONE:
            service = await stack.enter_async_context(Sessions(ports, run=RUN, config=CONFIG))
        else:
            service = SharedSessions(ports, run=RUN, config=CONFIG, resend_s=0.2)
        print(await stack.enter_async_context(serve(create_app(service))), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve_run(Path(sys.argv[1]), Form(sys.argv[2])))
