"""Which keys a record store takes: `kind/partition/rest`, no part of it empty.

A partition is what a scan stays within, and what a backend may keep in one place. It is one segment, and more for kinds
of which a run has so many records that one place could not serve them (`records.keys.PARTITION_SEGMENTS`).
"""

import re
from typing import NamedTuple

from turnmill.errors import InvalidInput
from turnmill.records.keys import PARTITION_SEGMENTS

_KIND = re.compile(r"[A-Za-z0-9_-]{1,64}")


class KeyParts(NamedTuple):
    """A key, or the prefix of a scan, in its parts."""

    kind: str
    # The kind included: `kind/partition`.
    partition: str
    # Of a key never empty; may hold slashes.
    rest: str


def key_parts(key: str) -> KeyParts:
    """Raises `InvalidInput` for a text that can't be the key of a record."""
    parts = _parts(key)
    if parts is None or not parts.rest:
        raise InvalidInput(f"record key {key!r} must be {_form(key)}..., kind of letters, digits, _ and -")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"record key {key!r} is no valid Unicode text: {error.reason}") from error
    return parts


def prefix_parts(prefix: str) -> KeyParts:
    """Raises `InvalidInput` for a prefix that holds less than a partition."""
    parts = _parts(prefix)
    if parts is None:
        raise InvalidInput(f"scan prefix {prefix!r} must hold at least {_form(prefix)}")
    return parts


def _parts(text: str) -> KeyParts | None:
    kind, _, _ = text.partition("/")
    num_segments = 1 + PARTITION_SEGMENTS.get(kind, 1)
    segments = text.split("/", num_segments)
    if len(segments) <= num_segments or not all(segments[:-1]) or _KIND.fullmatch(kind) is None:
        return None
    rest = segments[-1]
    return KeyParts(kind, text[: len(text) - len(rest) - 1], rest)


def _form(text: str) -> str:
    """How the keys begin that a text was to be one of."""
    num_segments = PARTITION_SEGMENTS.get(text.partition("/")[0], 1)
    return "kind/partition/" if num_segments == 1 else f"kind/partition/ with a partition of {num_segments} segments"
