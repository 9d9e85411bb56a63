"""Records as items of a DynamoDB table, and writes of them as the parameters that all its write operations share.

    key, value -> item | condition and change of it -> PutItem, UpdateItem, or an action of TransactWriteItems

| attribute | what it holds |
|---|---|
| `pk`, `sk` | the key: its partition, the kind included, and the rest |
| `item_version` | 1 at creation, +1 with each write |
| `item_value` | the value, one packed binary, or in its place ... |
| `s3_key`, `s3_sha256` | ... the object that holds a large one, and its digest |
| `item_number` | ... or the number that is the value of a counter |
| `token_0` ... `token_3` | by which write it has its value, and by which ones it had those before |
| `expires_at` | seconds since 1970 after which DynamoDB may remove it; only of kinds for which that was asked |

Each write has a token. One that is refused, but whose token is in the item, was applied before: its answer was lost,
and it was sent again. As others may have written to the item since, the tokens of the last `NUM_TOKENS` writes stay.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from turnmill.backends.aws.large_values import LargeValue
from turnmill.errors import InvalidInput, RecordCorrupt
from turnmill.ports.record_keys import key_parts

PARTITION, SORT, EXPIRES = "pk", "sk", "expires_at"
_VALUE, _VERSION, _NUMBER = "item_value", "item_version", "item_number"
_S3_KEY, _S3_DIGEST = "s3_key", "s3_sha256"
NUM_TOKENS = 4
_TOKENS = [f"token_{age}" for age in range(NUM_TOKENS)]
# In place of the token of a write that never was.
_NO_TOKEN = b"-"
# DynamoDB's limits, bytes.
MAX_PARTITION, MAX_SORT = 2048, 1024

# In DynamoDB's form: {"S": text}, {"B": bytes}, {"N": digits}.
Attributes = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Item:
    """A record as its item holds it."""

    key: str
    version: int
    # The value, or where it lies.
    value: bytes | LargeValue
    # Of the last writes, the latest one first.
    tokens: tuple[bytes, ...]

    @property
    def large_value(self) -> LargeValue | None:
        return self.value if isinstance(self.value, LargeValue) else None


@dataclass(frozen=True, kw_only=True)
class ItemWrite:
    """A conditional change of one item, or (`ConditionCheck`) a condition alone."""

    action: Literal["Put", "Update", "Delete", "ConditionCheck"]
    key: str
    # Without those that only one of the operations knows.
    parameters: Mapping[str, Any]


def new_token() -> bytes:
    """No two writes of an item have the same one."""
    return secrets.token_bytes(12)


def primary_key(key: str) -> Attributes:
    """Raises `InvalidInput` for a text that is no key of a record, or a longer one than DynamoDB takes."""
    parts = key_parts(key)
    for what, text, limit in (("partition", parts.partition, MAX_PARTITION), ("rest", parts.rest, MAX_SORT)):
        if len(text.encode()) > limit:
            raise InvalidInput(
                f"record key {key[:100]!r}... has {len(text.encode())} bytes in its {what}, DynamoDB takes {limit}: "
                "shorten the ids in it"
            )
    return {PARTITION: {"S": parts.partition}, SORT: {"S": parts.rest}}


def key_of(attributes: Mapping[str, Any]) -> str:
    return f"{attributes[PARTITION]['S']}/{attributes[SORT]['S']}"


def item_of(attributes: Attributes) -> Item:
    """Raises `RecordCorrupt` for an item that is no record."""
    key = key_of(attributes)
    try:
        return Item(
            key=key,
            version=int(attributes[_VERSION]["N"]),
            value=_value_of(attributes),
            tokens=tuple(attributes[name]["B"] for name in _TOKENS if name in attributes),
        )
    except (KeyError, ValueError) as error:
        raise RecordCorrupt(f"the item of record {key} was not written as one: {error!r}") from error


def _value_of(attributes: Attributes) -> bytes | LargeValue:
    if _NUMBER in attributes:
        return str(int(attributes[_NUMBER]["N"])).encode()
    if _S3_KEY in attributes:
        return LargeValue(s3_key=attributes[_S3_KEY]["S"], digest=attributes[_S3_DIGEST]["S"])
    return bytes(attributes[_VALUE]["B"])


class ItemWrites:
    """Makes the writes of one table."""

    def __init__(self, table: str, *, ttl_s: Mapping[str, float], clock: Callable[[], float] = time.time) -> None:
        """`ttl_s`: how long after its last write a record of a kind may be removed."""
        self._table = table
        self._ttl_s = ttl_s
        self._clock = clock

    def put(self, key: str, value: bytes | LargeValue, *, expected: int, token: bytes) -> ItemWrite:
        """Create (`expected` 0), or replace what is at the expected version."""
        content = self._content(key, value)
        if expected == 0:
            item = primary_key(key) | content | {_VERSION: {"N": "1"}, _TOKENS[0]: {"B": token}}
            return self._write("Put", key, Item=item, ConditionExpression=f"attribute_not_exists({PARTITION})")
        values = {f":{name}": attribute for name, attribute in content.items()}
        values |= {
            ":expected": {"N": str(expected)},
            ":next": {"N": str(expected + 1)},
            ":token": {"B": token},
            ":none": {"B": _NO_TOKEN},
        }
        # All right-hand sides are what the item held before.
        changes = [f"{older} = if_not_exists({newer}, :none)" for newer, older in pairwise(_TOKENS)]
        changes = [*reversed(changes), f"{_TOKENS[0]} = :token", f"{_VERSION} = :next"]
        changes += [f"{name} = :{name}" for name in content]
        gone = [name for name in (_VALUE, _NUMBER, _S3_KEY, _S3_DIGEST) if name not in content]
        return self._write(
            "Update",
            key,
            Key=primary_key(key),
            UpdateExpression=f"SET {', '.join(changes)} REMOVE {', '.join(gone)}",
            ConditionExpression=f"{_VERSION} = :expected",
            ExpressionAttributeValues=values,
        )

    def delete(self, item: Item) -> ItemWrite:
        """Delete the record as it was read: one that was made anew at the same version is another."""
        values: Attributes = {":expected": {"N": str(item.version)}}
        condition = f"{_VERSION} = :expected"
        if item.tokens:
            values[":token"] = {"B": item.tokens[0]}
            condition += f" AND {_TOKENS[0]} = :token"
        return self._write(
            "Delete",
            item.key,
            Key=primary_key(item.key),
            ConditionExpression=condition,
            ExpressionAttributeValues=values,
        )

    def check_absent(self, key: str) -> ItemWrite:
        return self._write(
            "ConditionCheck", key, Key=primary_key(key), ConditionExpression=f"attribute_not_exists({PARTITION})"
        )

    def add(self, key: str, amount: int) -> ItemWrite:
        """Add to a counter. It has no condition and no token: only in a transaction is it applied once."""
        return self._write(
            "Update",
            key,
            Key=primary_key(key),
            UpdateExpression=f"ADD {_NUMBER} :amount, {_VERSION} :one",
            ExpressionAttributeValues={":amount": {"N": str(amount)}, ":one": {"N": "1"}},
        )

    def _write(
        self,
        action: Literal["Put", "Update", "Delete", "ConditionCheck"],
        key: str,
        **parameters: Any,
    ) -> ItemWrite:
        return ItemWrite(action=action, key=key, parameters={"TableName": self._table, **parameters})

    def _content(self, key: str, value: bytes | LargeValue) -> Attributes:
        content: Attributes
        if isinstance(value, LargeValue):
            content = {_S3_KEY: {"S": value.s3_key}, _S3_DIGEST: {"S": value.digest}}
        else:
            content = {_VALUE: {"B": value}}
        ttl_s = self._ttl_s.get(key_parts(key).kind)
        if ttl_s is not None:
            content[EXPIRES] = {"N": str(int(self._clock() + ttl_s))}
        return content
