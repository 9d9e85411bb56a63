"""`turnmill resume`: what it says of a run whose content another one has trained since."""

import asyncio
import hashlib
import time
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner

from turnmill import assets
from turnmill.backends.embedded import open_root_records
from turnmill.cli.commands import turnmill
from turnmill.config import Config, to_dict
from turnmill.intake.claims import claim, content_id, digest_of_weights
from turnmill.ports import Write
from turnmill.records import Run, RunStatus, encode
from turnmill.wiring.reading.runs import look_at_run


def test_a_run_whose_content_was_trained_since_is_a_duplicate_and_no_failure(tmp_path: Path) -> None:
    data = assets.wordle_data("train")
    earlier = Run(
        run_id="earlier",
        cause="test",
        upload="a.jsonl",
        status=RunStatus.CANCELLED,
        created_at=time.time(),
        config=to_dict(Config()),
        sources=dict.fromkeys(to_dict(Config()), "default"),
        data_path=str(data),
    )
    later = replace(earlier, run_id="later", status=RunStatus.SUCCEEDED)
    content = content_id(
        data=hashlib.sha256(data.read_bytes()).hexdigest(),
        config=earlier.config,
        base_weights=digest_of_weights(assets.model_folder("wordle-tiny")),
    )

    async def store() -> None:
        records = open_root_records(tmp_path)
        await records.write([Write(key=run.key, value=encode(run), expected=0) for run in (earlier, later)])
        await claim(records, content, "later")
        records.close()

    asyncio.run(store())
    done = CliRunner().invoke(turnmill, ["resume", "earlier", "--root", str(tmp_path)])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "nothing was trained: the same data, environment, configuration and model as run later" in done.output
    assert "turnmill resume" not in done.output
    ended = look_at_run(tmp_path, "earlier")
    assert (ended.status, ended.duplicate_of) == (RunStatus.DUPLICATE, "later")
