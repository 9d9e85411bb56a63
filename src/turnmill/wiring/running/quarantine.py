"""An upload that can't be trained: out of the way with a report on it, and a dead letter that can bring it back.

    the run's error -> report -> quarantine/<run>/ -> DeadTrigger -> the run fails, and its error names the place

Killed in between, the run is begun again and all of this is done again; none of it is there twice.
"""

import asyncio
import logging
import shlex
import time
from pathlib import Path

from turnmill import __version__, failpoints
from turnmill.backends.embedded import open_bucket, open_quarantine
from turnmill.backends.embedded.bucket import HELD_OUT_SUFFIX, SIDECAR_SUFFIX, SUFFIX
from turnmill.errors import ConfigError, DataError, InvalidInput
from turnmill.intake.dataset import validate
from turnmill.intake.reports import ENVIRONMENT, MAX_PROBLEMS, SIDECAR, Refusal, RefusedData
from turnmill.intake.rows import Problem
from turnmill.ports import RecordStore, Write
from turnmill.records import DeadTrigger, Run, Upload, encode

logger = logging.getLogger(__name__)

REPORT = "report.md"


async def quarantine(root: Path, runs: RecordStore, run: Run, error: InvalidInput) -> InvalidInput:
    """Hold the upload of a run that `error` says can't be trained; `error` with the place where it lies then.

    Runs that were begun by hand have no upload, and their files stay where they are.
    """
    if run.upload is None or run.data_path is None:
        return error
    copy = Path(run.data_path)
    if not await asyncio.to_thread(copy.is_file):
        # What was removed from the run's own folder is no fault of the upload.
        return error
    refusal = await asyncio.to_thread(_refusal, run, run.upload, copy, error)
    upload = Upload(
        bucket=open_bucket(root).name,
        key=run.upload,
        # Of a run that does another one again, the upload was held before.
        version=run.upload_version or "",
        num_bytes=refusal.num_bytes,
    )
    held = open_quarantine(root)
    redrive = _redrive(root, run.run_id)
    reports = {
        "report.json": refusal.as_json(),
        REPORT: refusal.as_text(redrive),
    }
    held_out = Path(run.eval_path) if run.eval_path else None
    # People know it by its key; the copies that were read are the run's own affair.
    text = str(error).replace(str(copy), run.upload)
    if held_out is not None:
        text = text.replace(str(held_out), run.upload.removesuffix(SUFFIX) + HELD_OUT_SUFFIX)
    place = await asyncio.to_thread(held.hold, run.run_id, upload, copy, reports, held_out=held_out)
    letter = DeadTrigger(
        name=run.run_id,
        upload=upload,
        error=text,
        dead_at=time.time(),
        run_id=run.run_id,
        digest=refusal.digest,
        place=place,
        attempts=run.attempt,
        code_version=__version__,
        config=run.config,
    )
    await runs.write([Write(key=letter.key, value=encode(letter), expected=0)])
    failpoints.hit("quarantine-lettered")
    folder = held.folder_of(place)
    logger.warning("upload %s is held in %s", run.upload, folder, extra={"at": run.run_id})
    kind = ConfigError if isinstance(error, ConfigError) else DataError
    # Behind the first line: long errors are cut at their end.
    first, _, rest = text.partition("\n")
    where = f"  held in quarantine: {folder} (see its {REPORT}); correct it there, then: {redrive}"
    return kind("\n".join([first, where, *([rest] if rest else [])]))


def _redrive(root: Path, run_id: str) -> str:
    """The command that uploads it again, wherever it is typed."""
    return f"turnmill dlq redrive trigger/{run_id} --root {shlex.quote(str(root.absolute()))}"


def _refusal(run: Run, key: str, copy: Path, error: InvalidInput) -> Refusal:
    of_file = error.report if isinstance(error, RefusedData) else None
    # What is wrong with the data is said as well where something beside it was refused.
    is_of_data = of_file is not None and of_file.path == str(copy)
    data = of_file if of_file is not None and is_of_data else validate(copy, max_problems=MAX_PROBLEMS)
    if of_file is not None:
        file, problems, num_problems = Path(of_file.path).name, of_file.problems, of_file.num_problems
    else:
        is_sidecar = isinstance(error, ConfigError)
        file = copy.name.removesuffix(SUFFIX) + SIDECAR_SUFFIX if is_sidecar else copy.name
        rule = SIDECAR if is_sidecar else ENVIRONMENT
        first = Problem(line=None, column=None, field=None, rule=rule, message=str(error))
        problems, num_problems = (first, *data.problems), data.num_problems + 1
    return Refusal(
        run_id=run.run_id,
        key=key,
        version=run.upload_version or "",
        digest=data.digest,
        num_bytes=copy.stat().st_size,
        num_rows=data.num_rows,
        file=file,
        problems=problems[:MAX_PROBLEMS],
        num_problems=num_problems,
    )


def is_sidecars(run: Run, parameter: str) -> bool:
    """Whether the upload's own sidecar gave the parameter its value."""
    return run.sources.get(parameter, "").startswith("sidecar ")
