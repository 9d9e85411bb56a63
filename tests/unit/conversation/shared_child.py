"""One request to a run that several processes serve, by a process of its own: `python shared_child.py ROOT REQUEST`.

REQUEST is JSON: {"open": {...}} | {"chat": secret, "text": ..., "key": ..., "choices": 1}
                 | {"report": secret, "body": {...}}
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tests.unit.conversation.conftest import CONFIG, RUN, RUN_ID
from tests.unit.conversation.talking import request_of, user
from turnmill.backends.embedded import open_run
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.reports import parse_report
from turnmill.conversation.shared import SharedSessions
from turnmill.records import RunKind, encode


async def serve(root: Path, request: dict[str, Any]) -> None:
    run = replace(RUN, kind=RunKind.EXTERNAL)
    ports = open_run(root, RUN_ID, num_replicas=1)
    sessions = SharedSessions(ports, run=run, config=CONFIG)
    if "open" in request:
        await open_occurrence(ports, run, CONFIG, request["open"])
    elif "chat" in request:
        asked = request_of([user(request["text"])], num_choices=request.get("choices", 1))
        await sessions.chat(request["chat"], asked, key=request["key"], hold_s=0)
    else:
        await sessions.report(request["report"], parse_report(encode(request["body"])))
    ports.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), msgspec.json.decode(sys.argv[2])))
