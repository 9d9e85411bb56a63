"""How records are stored and sent."""

import hashlib
from collections.abc import Hashable
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")
PROTOCOL_VERSION = "v0"


def encode(record: object) -> bytes:
    """The stored and sent form of a record: compact JSON in field order."""
    return msgspec.json.encode(record)


def decode(data: bytes, kind: type[T]) -> T:
    """The record of type `kind`; raises `msgspec.ValidationError` naming the field that does not fit."""
    value: T = _decoder(cast(Hashable, kind)).decode(data)
    return value


@cache
def _decoder(kind: Hashable) -> "msgspec.json.Decoder[Any]":
    """Made once a type: a tenth of the time of decoding a record."""
    return msgspec.json.Decoder(kind)


def digest_of(*parts: bytes) -> str:
    """32 hex digits over length-prefixed parts (BLAKE2b, 16 bytes)."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()
