"""The requests to a table of records: which of them are sent again, by whom, and what their answers mean.

    ItemWrite -> request -> applied | refused by its condition | `BackendUnavailable`

| what happens | who tries again |
|---|---|
| throttled, 5xx, no connection, no answer; a transaction with the same token is in progress | botocore |
| the credentials have expired | `AwsClients` |
| a transaction on the same item is under way, or was throttled: nothing was done | this module, `MAX_TRIES` in all |
| `UnprocessedKeys` of a read | this module, until `MAX_TRIES` in a row brought nothing |
| a condition does not hold | nobody here: that is the answer |

A write whose answer was lost is sent again by botocore, and then meets its own effect. A transaction is recognised by
DynamoDB, by its token of 10 minutes; a single write by its token in the item, which is half the price (`items`).
"""

import random
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.backends.aws.items import (
    NUM_TOKENS,
    PARTITION,
    SORT,
    Attributes,
    Item,
    ItemWrite,
    item_of,
    key_of,
    primary_key,
)
from turnmill.errors import BackendUnavailable, InvalidInput, NotDeployed
from turnmill.ports.record_keys import KeyParts

MAX_TRIES = 10
# The longest pause before the second try; it doubles up to the last one. About 10 s in all.
_PAUSE_S, _MAX_PAUSE_S = 0.05, 4.0
# Keys that a BatchGetItem takes.
MAX_KEYS = 100
# Actions and bytes that a TransactWriteItems takes: 4 MB of items, of which those that are replaced count, too.
MAX_ACTIONS, MAX_TRANSACTION_BYTES = 100, 2_500_000
_OPERATIONS = {"Put": "put_item", "Update": "update_item"}
# Reasons for which a transaction was cancelled that pass.
_PASSING = ("TransactionConflict", "ThrottlingError", "ProvisionedThroughputExceeded")
_DENIED = ("AccessDeniedException", "UnrecognizedClientException", "InvalidSignatureException")


class RecordTable:
    """The items of one table. All methods block, and may be called by several threads at once."""

    def __init__(self, clients: AwsClients, name: str) -> None:
        self.name = name
        self._clients = clients

    def get(self, keys: Sequence[str]) -> dict[str, Item]:
        """The items that are there, of at most `MAX_KEYS` different keys, in strongly consistent reads."""
        if len(keys) == 1:
            answer = self._ask("get_item", TableName=self.name, Key=primary_key(keys[0]), ConsistentRead=True)
            return {keys[0]: item_of(answer["Item"])} if "Item" in answer else {}
        found: dict[str, Item] = {}
        wanted = [primary_key(key) for key in keys]
        pauses = _pauses()
        while wanted:
            answer = self._ask("batch_get_item", RequestItems={self.name: {"Keys": wanted, "ConsistentRead": True}})
            items = [item_of(attributes) for attributes in answer["Responses"].get(self.name, ())]
            found |= {item.key: item for item in items}
            wanted = answer.get("UnprocessedKeys", {}).get(self.name, {}).get("Keys", [])
            if items:
                pauses = _pauses()
            if wanted:
                pause_s = next(pauses, None)
                if pause_s is None:
                    raise BackendUnavailable(f"DynamoDB table {self.name} is too busy to read {len(wanted)} records")
                time.sleep(pause_s)
        return found

    def page(self, prefix: KeyParts, *, after: str, limit: int | None) -> tuple[list[Item], str | None]:
        """Items below a prefix in the order of their keys, and after which key to go on; None where there are no more.

        A page ends after `limit` items (None: any number) or 1 MB. `after` is a key below the prefix, or empty.
        """
        condition, values = f"{PARTITION} = :partition", {":partition": {"S": prefix.partition}}
        if prefix.rest:
            condition += f" AND begins_with({SORT}, :rest)"
            values[":rest"] = {"S": prefix.rest}
        bounds: dict[str, Any] = {"ExclusiveStartKey": primary_key(after)} if after else {}
        if limit is not None:
            bounds["Limit"] = limit
        answer = self._ask(
            "query",
            TableName=self.name,
            KeyConditionExpression=condition,
            ExpressionAttributeValues=values,
            ConsistentRead=True,
            **bounds,
        )
        last = answer.get("LastEvaluatedKey")
        return [item_of(attributes) for attributes in answer["Items"]], key_of(last) if last else None

    def put(self, write: ItemWrite, *, expected: int, token: bytes) -> tuple[bool, Item | None]:
        """Whether a write by `ItemWrites.put` was applied, and what it replaced, where that is known."""
        operation, num_requests = _OPERATIONS[write.action], 0

        def send(client: Any) -> Any:
            nonlocal num_requests
            num_requests += 1
            return getattr(client, operation)(
                **write.parameters, ReturnValues="ALL_OLD", ReturnValuesOnConditionCheckFailure="ALL_OLD"
            )

        for pause_s in _pauses():
            try:
                answer = self._clients.work_with("dynamodb", operation, send)
            except Refused as refused:
                num_requests += refused.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)
                if refused.code == "ConditionalCheckFailedException":
                    now = _item(refused.response.get("Item"))
                    return _was_applied(write.key, now, expected + 1, token, is_first=num_requests == 1), None
                if refused.code != "TransactionConflictException":
                    raise self._named(refused) from refused
                time.sleep(pause_s)
            else:
                return True, _item(answer.get("Attributes"))
        raise BackendUnavailable(f"record {write.key} is in a transaction of others all the time")

    def transact(self, writes: Sequence[ItemWrite]) -> list[int]:
        """Apply all, or none if the conditions of some do not hold: the indices of these."""
        actions = [{write.action: dict(write.parameters)} for write in writes]
        token = str(uuid.uuid4())
        for pause_s in _pauses():
            try:
                self._clients.call_now(
                    "dynamodb", "transact_write_items", TransactItems=actions, ClientRequestToken=token
                )
            except Refused as refused:
                if refused.code != "TransactionCanceledException":
                    raise self._named(refused) from refused
                codes = [reason.get("Code", "None") for reason in refused.response.get("CancellationReasons", ())]
                failed = [index for index, code in enumerate(codes) if code == "ConditionalCheckFailed"]
                if failed:
                    return failed
                if not any(code in _PASSING for code in codes):
                    raise self._named(refused) from refused
                time.sleep(pause_s)
            else:
                return []
        raise BackendUnavailable(
            f"record {writes[0].key} and {len(writes) - 1} others can't be written together: others write them as well"
        )

    def _ask(self, operation: str, **parameters: Any) -> dict[str, Any]:
        try:
            return self._clients.call_now("dynamodb", operation, **parameters)
        except Refused as refused:
            raise self._named(refused) from refused

    def _named(self, refused: Refused) -> Exception:
        if refused.code == "ResourceNotFoundException":
            return NotDeployed(f"DynamoDB table {self.name} does not exist: {refused}")
        if refused.code in _DENIED:
            return InvalidInput(f"DynamoDB table {self.name} can't be used with these credentials: {refused}")
        return BackendUnavailable(f"DynamoDB table {self.name}: {refused}")


def _item(attributes: Attributes | None) -> Item | None:
    return item_of(attributes) if attributes else None


def _was_applied(key: str, now: Item | None, target: int, token: bytes, *, is_first: bool) -> bool:
    """Whether a write that its condition refused, and that was to make version `target`, had been applied before.

    `is_first`: it was sent once. Raises `BackendUnavailable` where nobody can tell: its answer was lost, and the record
    was deleted or written several times before it was sent again.
    """
    if now is not None and token in now.tokens:
        return True
    if is_first or (now is not None and target > now.version - NUM_TOKENS):
        return False
    raise BackendUnavailable(f"whether the write of record {key} was applied is not known: it has changed meanwhile")


def _pauses() -> Iterator[float]:
    """What to wait after each try; of the last one nothing."""
    pause_s = _PAUSE_S
    for _ in range(MAX_TRIES - 1):
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)
    yield 0.0
