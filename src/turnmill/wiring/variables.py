"""Environment variables: what a worker process may know (never arguments, which `ps` shows), the form of logs, and the
backend."""

import os
from urllib.parse import urlsplit

from turnmill.conversation.http import Sign
from turnmill.errors import ConfigError, InvalidInput, printable
from turnmill.telemetry import FORMATS

WORKER_TOKEN = "TURNMILL_WORKER_TOKEN"
PROXY_URL = "TURNMILL_PROXY_URL"
# How requests to the proxy are signed: `sigv4` for a function URL; empty for a proxy that asks for no signature.
PROXY_AUTH, SIGV4 = "TURNMILL_PROXY_AUTH", "sigv4"
# HOST:PORT at which a proxy listens, where that is not what its URL says: `0.0.0.0:8080` in a container.
PROXY_LISTEN = "TURNMILL_PROXY_LISTEN"
WORKER_CONFIG = "TURNMILL_WORKER_CONFIG"
LOG_FORMAT = "TURNMILL_LOG_FORMAT"
BACKEND = "TURNMILL_BACKEND"
# `1`: packages of environments may be played where nothing keeps them in a box.
UNSAFE_ENV = "TURNMILL_UNSAFE_ENV"


def log_format() -> str:
    """One of `telemetry.FORMATS`, `text` where nothing is set; raises `ConfigError` for anything else."""
    form = os.environ.get(LOG_FORMAT) or "text"
    if form not in FORMATS:
        raise ConfigError(f"{LOG_FORMAT} = {printable(form)}: must be one of {', '.join(FORMATS)}")
    return form


def is_unsafe_env_allowed() -> bool:
    """Raises `ConfigError` for a value that says neither."""
    value = os.environ.get(UNSAFE_ENV) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{UNSAFE_ENV} = {printable(value)}: must be 1, 0 or empty")
    return value == "1"


def proxy_place() -> tuple[str, str, int]:
    """A proxy's URL, and the host and port at which it listens: those of its URL on this machine unless said otherwise.

    Raises `InvalidInput` where one of them is missing or is none.
    """
    url, listen = os.environ.get(PROXY_URL, ""), os.environ.get(PROXY_LISTEN)
    try:
        port = urlsplit(f"//{listen}" if listen else url).port
        host = urlsplit(f"//{listen}").hostname if listen else "127.0.0.1"
    except ValueError:
        host = port = None
    if not url or host is None or port is None:
        raise InvalidInput(
            f"a proxy needs {PROXY_URL}, where workers reach it, in its environment; with a port, unless "
            f"{PROXY_LISTEN}=HOST:PORT says where it listens"
        )
    return url.rstrip("/"), host, port


def proxy_signer() -> Sign | None:
    """What signs a worker's requests to the proxy; raises `ConfigError` for a way that is not known."""
    way = os.environ.get(PROXY_AUTH)
    if not way:
        return None
    if way != SIGV4:
        raise ConfigError(f"{PROXY_AUTH} = {printable(way)}: must be {SIGV4}, or empty")
    from turnmill.backends.aws.signing import RequestSigner

    return RequestSigner()
