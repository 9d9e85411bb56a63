"""Who may use the interface: the token of a deployment, and what is asked of each request before its route."""

import hashlib
import hmac
import secrets
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from turnmill.backends.embedded.files import replacing
from turnmill.control_api.errors import problem
from turnmill.errors import ConfigError

TOKEN_FILE = "control.token"
# Without a token: whether anybody is there.
OPEN_PATH = "/healthz"
# Shorter ones are guessed.
_SHORTEST = 32
# Any other name of this machine is one that a page in somebody's browser may have been given (DNS rebinding).
_HOSTS = frozenset({"127.0.0.1", "localhost"})
# Of a request that uploads nothing; none of them needs a body.
_MOST_BODY_BYTES = 64 * 1024
UPLOADS = "/api/v1/uploads/"


def token_of(root: Path) -> str:
    """The deployment's token, made where there is none yet; raises `ConfigError` for one that can't be used.

    Call it while the root is this process's own.
    """
    path = root.absolute() / TOKEN_FILE
    if not path.exists():
        with replacing(path, mode=0o600) as file:
            file.write(secrets.token_urlsafe(32).encode() + b"\n")
    if path.stat().st_mode & 0o077:
        raise ConfigError(f"{path}: other users can read or change this token: chmod 600 {path}, or remove it")
    token = path.read_bytes().decode("ascii", "replace").strip()
    if len(token) < _SHORTEST or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            f"{path}: must hold at least {_SHORTEST} printable characters without spaces; remove it for a new token"
        )
    return token


class Guard:
    """In front of all routes, so that no route can forget it. Never says whether a path exists without the token."""

    def __init__(self, app: ASGIApp, *, token: str, max_upload_bytes: int) -> None:
        self._app = app
        self._digest = _digest_of(token)
        self._max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope, Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        hosts = [host.lower() for host in headers.getlist("host")]
        if len(hosts) != 1 or not {hosts[0], hosts[0].rpartition(":")[0]} & _HOSTS:
            return problem(421, "wrong_host", "the Host header must name 127.0.0.1 or localhost")
        if scope["path"] != OPEN_PATH and not self._is_known(headers.getlist("authorization")):
            message = f"send the token that is in {TOKEN_FILE} of the deployment: Authorization: Bearer TOKEN"
            return problem(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})
        most = self._max_upload_bytes if scope["path"].startswith(UPLOADS) else _MOST_BODY_BYTES
        # The parser has seen to it that it is a number.
        if int(headers.get("content-length", "0")) > most:
            return problem(413, "too_large", f"the body must not be larger than {most} bytes")
        return None

    def _is_known(self, given: list[str]) -> bool:
        if len(given) != 1:
            return False
        scheme, _, token = given[0].partition(" ")
        # Digests, so that the time says nothing of the length either.
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest_of(token.strip()), self._digest)


def _digest_of(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
