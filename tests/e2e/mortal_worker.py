"""A worker in a process of its own that may be killed at any turn: `python -m tests.e2e.mortal_worker URL TOKEN FOLDER`

It plays `Turns`; the failpoints `asking-<turn>` and `answered-<turn>` lie around the calls. FOLDER gets what was said
in each conversation that came to its end, a line each.
"""

import asyncio
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from tests.e2e.house import CONFIG
from turnmill import failpoints
from turnmill.environment.base import Chat, Environment, Outcome, opening_messages
from turnmill.records import Task
from turnmill.rollout.worker import run_worker

NUM_TURNS = 4
# From here on each process says something of its own: what is replayed by another one ends here.
FIRST_OWN = 2
MORTAL = replace(CONFIG, worker_lease_s=1.0, max_new_tokens=4, max_length=300)


class Turns(Environment):
    """As many turns, each with a mark of the process that plays it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def play(self, task: Task, chat: Chat) -> Outcome:
        messages = opening_messages(task)
        content = ""
        for turn in range(NUM_TURNS):
            if turn:
                own = f"{os.getpid()} " if turn >= FIRST_OWN else ""
                messages.append({"role": "user", "content": f"{own}turn {turn}"})
            failpoints.hit(f"asking-{turn}")
            reply = await chat.complete(messages)
            failpoints.hit(f"answered-{turn}")
            messages.append(dict(reply.message))
            content += reply.content
        line = json.dumps({"sample_id": task.id, "pid": os.getpid(), "messages": messages}) + "\n"
        with (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)
        return Outcome(reward=float(sum(map(ord, content)) % 2))


if __name__ == "__main__":
    url, token, folder = sys.argv[1:]
    asyncio.run(
        run_worker(
            proxy_url=url,
            worker_token=token,
            name=f"worker-{os.getpid()}",
            config=MORTAL,
            environment=Turns(Path(folder)),
            stop=asyncio.Event(),
        )
    )
