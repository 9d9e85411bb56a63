"""What `turnmill up` says for people, beside records on disk."""

import asyncio
import io
import time
from pathlib import Path

from rich.console import Console

from turnmill.backends.embedded import open_root_records, open_run
from turnmill.cli.narrator import Narrator
from turnmill.ports import Write
from turnmill.records import Run, RunStatus, StageRecord, encode
from turnmill.wiring.deployment import News


class Screen(io.StringIO):
    """Tells when the first stage is on it."""

    def __init__(self) -> None:
        super().__init__()
        self.has_stage = asyncio.Event()

    def write(self, text: str) -> int:
        if "stage" in text:
            self.has_stage.set()
        return super().write(text)


def run(status: RunStatus, *stages: StageRecord) -> Run:
    return Run(
        run_id="one",
        cause="bucket/a.jsonl@1",
        upload="a.jsonl",
        status=status,
        created_at=time.time(),
        config={"max_steps": 1},
        sources={"max_steps": "--max-steps"},
        data_path="a.jsonl",
        stages=stages,
    )


async def store(root: Path, made: Run) -> None:
    runs, ports = open_root_records(root), open_run(root, made.run_id, num_replicas=0)
    await runs.write([Write(key=made.key, value=encode(made), expected=None)])
    runs.close()
    ports.close()


async def test_a_run_is_told_from_its_turn_to_what_came_of_it(tmp_path: Path) -> None:
    said = Screen()
    narrator = Narrator(tmp_path, Console(file=said, width=200))
    validated = StageRecord(name="ValidateData", state="running", started_at=1.0)
    begun = run(RunStatus.ACTIVE, validated)
    await store(tmp_path, begun)
    narrator.tell(News(text="upload a.jsonl: run one queued", run=run(RunStatus.QUEUED)))
    assert said.getvalue() == "upload a.jsonl: run one queued\n", "one that waits for its turn is not followed"
    narrator.tell(News(text="run one begins: a.jsonl", run=begun, is_begun=True))
    async with asyncio.timeout(30):
        await said.has_stage.wait()
    narrator.tell(News(text="run one cancelled: by the user", run=run(RunStatus.CANCELLED)))
    await narrator.close()
    assert said.getvalue().splitlines()[1:] == [
        "run one begins: a.jsonl",
        "  one  stage ValidateData",
        "run one cancelled: by the user",
        f"  go on with it: turnmill resume one --root {tmp_path}",
    ]
