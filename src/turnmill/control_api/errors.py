"""Answers that are no success: `{"error": {"message", "type"}}`, whatever went wrong and wherever."""

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from turnmill.errors import BackendUnavailable, Conflict, InvalidInput, NotFound, TurnmillError

# The first that fits counts.
_STATUSES: tuple[tuple[type[TurnmillError], int, str], ...] = (
    (NotFound, 404, "not_found"),
    (InvalidInput, 400, "invalid_request"),
    (Conflict, 409, "conflict"),
    (BackendUnavailable, 503, "unavailable"),
    (TurnmillError, 500, "internal_error"),
)
_TYPES = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def problem(status: int, type: str, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An answer that says what is wrong."""
    return JSONResponse({"error": {"message": message, "type": type}}, status_code=status, headers=headers)


async def on_turnmill_error(_: Request, error: Exception) -> Response:
    """What a route raised on purpose."""
    for kind, status, type_ in _STATUSES:
        if isinstance(error, kind):
            return problem(status, type_, str(error))
    raise error


async def on_http_error(request: Request, error: Exception) -> Response:
    """What the framework refuses: no such path, or not with this method."""
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == 404:
        message = f"there is nothing at {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not possible at {request.url.path}"
    else:
        message = error.detail
    return problem(error.status_code, _TYPES.get(error.status_code, "invalid_request"), message, error.headers)


async def on_defect(_: Request, __: Exception) -> Response:
    """A defect of ours: its traceback is in the log, and not in the answer."""
    return problem(500, "internal_error", "a defect of the server; the log of control has it")
