"""JSON bodies from outside: objects from bytes, and values out of them; what does not fit is an `InvalidRequest`."""

import math
from typing import Any

import msgspec

from turnmill.errors import InvalidRequest

MAX_TEXT = 4096


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a request body."""
    value = decoded(body)
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def parts_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The JSON object in a request body, its values as they came."""
    try:
        return _OBJECT.decode(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(error) from error


def decoded(raw: bytes | msgspec.Raw) -> Any:
    """The JSON value."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _no_json(error) from error


def _no_json(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {error}")


_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def text_at(raw: dict[str, Any], key: str) -> str | None:
    """The text under a key; None where there is none."""
    value = raw.get(key)
    if value is not None and (not isinstance(value, str) or len(value) > MAX_TEXT):
        raise InvalidRequest(f"{key} must be a text of at most {MAX_TEXT} characters", param=key)
    return value


def number(value: Any, where: str) -> float:
    """The finite number at `where`."""
    found = finite(value)
    if found is None:
        raise InvalidRequest(f"{where} must be a finite number, not {short(value)}", param=where)
    return found


def finite(value: Any) -> float | None:
    """The number that a client sent; None for what is none, or beyond a float: JSON's integers have no end."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any, where: str, least: int, most: int) -> int:
    """The integer at `where`, within its bounds."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidRequest(f"{where} must be an integer from {least} to {most}, not {short(value)}", param=where)
    return value


def flag(value: Any, where: str) -> bool:
    """The truth value at `where`."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where} must be true or false, not {short(value)}", param=where)
    return value


def short(value: Any) -> str:
    """A value as an error may show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
