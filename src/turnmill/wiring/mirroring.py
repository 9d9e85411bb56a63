"""The process that mirrors runs to MLflow, beside control: started where `turnmill.toml` asks for it, ended in time.

Nothing of it is awaited while a run goes on, and its death is a line in a log.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from turnmill.backends.embedded.files import disk
from turnmill.config.deployment import FILE, load_deployment
from turnmill.errors import BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

# A little longer than the process itself goes on for.
_GRACE_S = 10.0
# It phones home otherwise, prints URLs with what is secret in them, and holds a request for minutes; what the user set
# about the last one counts.
_ENV = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
_DEFAULT_ENV = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def check_mirror(root: Path) -> bool:
    """Whether runs are to be mirrored; raises `ConfigError` where `turnmill.toml` is wrong or MLflow is missing."""
    if load_deployment(root, os.environ).mlflow is None:
        return False
    if find_spec("mlflow") is None:
        raise ConfigError(f"{root / FILE}: [mlflow] needs MLflow: install the extra, pip install 'turnmill[mlflow]'")
    return True


@asynccontextmanager
async def mirrored(root: Path) -> AsyncIterator[Callable[[str | None], None]]:
    """Yields what starts the mirror of one run, or of all of a deployment (None); starting it again does nothing.

    On leaving, what is not mirrored yet gets some seconds. Raises `ConfigError` as `check_mirror` does.
    """
    is_wanted = check_mirror(root)
    started: list[subprocess.Popen[bytes]] = []

    def start(run_id: str | None) -> None:
        if is_wanted and not started:
            try:
                started.append(_start(root, run_id))
            except BackendUnavailable as error:
                # No run is worth less for it.
                logger.error("the mirror to MLflow can't be started: %s", error)

    try:
        yield start
    finally:
        for process in started:
            await asyncio.shield(_end(process))


def _start(root: Path, run_id: str | None) -> subprocess.Popen[bytes]:
    """Raises `BackendUnavailable`."""
    log = (root if run_id is None else root / "runs" / run_id) / "logs" / "mlflow.log"
    with disk(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "turnmill.wiring.mirror_process",
                    str(root.absolute()),
                    *([run_id] if run_id else []),
                ],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env={**_DEFAULT_ENV, **os.environ, **_ENV},
                # Ctrl-C is for control.
                start_new_session=True,
            )


async def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        code = await asyncio.to_thread(process.wait, _GRACE_S)
    except subprocess.TimeoutExpired:
        logger.warning("the mirror to MLflow hangs and is killed; the next `turnmill up` sends what is left")
        process.kill()
        code = await asyncio.to_thread(process.wait)
    if code > 0:
        logger.error("the mirror to MLflow ended with exit code %d; its log is mlflow.log", code)
