"""What the applications over HTTP have in common: bodies, bearer tokens, and which error is which status."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from turnmill.conversation.exchange import Receive, Scope, Send
from turnmill.errors import (
    BackendUnavailable,
    CallTimeout,
    Conflict,
    GenerationFailed,
    InvalidInput,
    InvalidRequest,
    LeaseLost,
    NotFound,
    RecordCorrupt,
    ShuttingDown,
    TurnmillError,
    Unauthorized,
)
from turnmill.records import encode

T = TypeVar("T")

MAX_BODY_BYTES = 8 * 1024 * 1024
# Where a bearer token stands in requests whose Authorization header is a signature for somebody before this server.
FORWARDED_AUTHORIZATION = "X-Turnmill-Authorization"
_AUTHORIZATION = (FORWARDED_AUTHORIZATION.lower().encode(), b"authorization")


_TOO_LONG = "context_length_exceeded"
# For OpenAI's clients, which try again after a 409 and a 500: the answer would be the same.
_FINAL = ((b"x-should-retry", b"false"),)


class HttpError(Exception):
    """An answer that is no success, with the fields of an OpenAI error."""

    def __init__(
        self,
        *,
        status: int,
        type: str,
        code: str,
        message: str,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self._error = {"message": message, "type": type, "param": param, "code": code}

    def body(self) -> bytes:
        return encode({"error": self._error})


def to_http(error: TurnmillError) -> HttpError:
    """The one place that knows which domain error is which status."""
    text = str(error)
    if isinstance(error, InvalidRequest):
        status = 404 if error.code == "model_not_found" else 400
        return HttpError(status=status, type="invalid_request_error", code=error.code, message=text, param=error.param)
    if isinstance(error, GenerationFailed):
        # The client's fault only where the replica says so; anything else may be tried again.
        if error.code == _TOO_LONG or error.code.startswith("invalid"):
            param = "messages" if error.code == _TOO_LONG else None
            return HttpError(status=400, type="invalid_request_error", code=error.code, message=text, param=param)
        return HttpError(status=500, type="server_error", code=error.code, message=text, headers=_FINAL)
    for kind, status, type_, code in _STATUSES:
        if isinstance(error, kind):
            headers = _FINAL if status == 409 else ()
            return HttpError(status=status, type=type_, code=code, message=text, headers=headers)
    return HttpError(status=500, type="server_error", code="internal_error", message=text)


_STATUSES: tuple[tuple[type[TurnmillError], int, str, str], ...] = (
    (Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (LeaseLost, 409, "conflict_error", "attempt_over"),
    (Conflict, 409, "conflict_error", "reported_otherwise"),
    (NotFound, 404, "invalid_request_error", "not_found"),
    (InvalidInput, 400, "invalid_request_error", "invalid_request"),
    (CallTimeout, 504, "server_error", "call_timeout"),
    (ShuttingDown, 503, "server_error", "shutting_down"),
    (BackendUnavailable, 503, "server_error", "backend_unavailable"),
    (RecordCorrupt, 500, "server_error", "record_corrupt"),
)


def refusal(status: int, code: str, message: str) -> HttpError:
    """Of a request that can't be served as it is."""
    return HttpError(status=status, type="invalid_request_error", code=code, message=message)


async def send_json(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """The whole answer."""
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *headers])


async def send_whole(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """The whole answer, of the type that its headers say."""
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(receive: Receive) -> bytes:
    """The whole body; raises `HttpError` 413 as soon as it is known to be too large."""
    chunks: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise refusal(400, "incomplete", "the client went away before its request was complete")
        chunk: bytes = event.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise refusal(413, "body_too_large", f"a body holds at most {MAX_BODY_BYTES} bytes")
        if not event.get("more_body"):
            return b"".join([*chunks, chunk])
        chunks.append(chunk)


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(asking: "asyncio.Future[T]", receive: Receive) -> T | None:
    """What `asking` comes to; None when the client has gone away before that. It is ended in any case."""
    gone = asyncio.create_task(until_disconnect(receive), name="client-gone")
    both: tuple[asyncio.Future[Any], ...] = (asking, gone)
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


def bearer_of(scope: Scope) -> str:
    """The token that a client shows; raises `Unauthorized` where it shows none."""
    for name, value in scope["headers"]:
        if name in _AUTHORIZATION:
            scheme, _, token = value.decode("latin-1").partition(" ")
            if scheme.lower() == "bearer" and token.strip():
                return str(token.strip())
    raise Unauthorized("an Authorization header with a bearer token is needed")
