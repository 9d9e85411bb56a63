"""Environment variables: what a worker process may know (never arguments, which `ps` shows), the form of logs, and the
backend."""

import os

from turnmill.errors import ConfigError, printable
from turnmill.telemetry import FORMATS

WORKER_TOKEN = "TURNMILL_WORKER_TOKEN"
PROXY_URL = "TURNMILL_PROXY_URL"
WORKER_CONFIG = "TURNMILL_WORKER_CONFIG"
LOG_FORMAT = "TURNMILL_LOG_FORMAT"
BACKEND = "TURNMILL_BACKEND"


def log_format() -> str:
    """One of `telemetry.FORMATS`, `text` where nothing is set; raises `ConfigError` for anything else."""
    form = os.environ.get(LOG_FORMAT) or "text"
    if form not in FORMATS:
        raise ConfigError(f"{LOG_FORMAT} = {printable(form)}: must be one of {', '.join(FORMATS)}")
    return form
