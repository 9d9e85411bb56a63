"""Records in one DynamoDB table.

    Write -> [large value -> S3] -> item -> DynamoDB            get, scan: items -> [S3 -> large values] -> Stored

**Keys.** A record's key is `kind/partition/rest` (`ports.record_keys`). `kind/partition` is the partition key, `rest`
the sort key, so that a scan of a prefix is one Query of one partition, in the order of the keys: DynamoDB sorts text
by its UTF-8 bytes, which is the order of its code points.

| records | partition key | sort key |
|---|---|---|
| calls | `calls/<run>/<purpose>/<sample>` | call |
| samples, batches, clocks, tokens ... of a run | `samples/<run>` | `<purpose>/<sample>` |
| of a deployment | `runs/all`, `alerts/all` ... | run, alert |

Calls are most of what is written, and no two samples share a partition of them. A partition serves 1 000 writes and
3 000 reads (of 4 KB) a second; as the table has no local index, DynamoDB splits one that is busier between its sort
keys.

**Items** hold a value as one packed binary (`items`). An item has at most 400 KB; values above `MAX_INLINE` go to S3
first (`large_values`), so that 64 KB is what a read of many items, a page of 1 MB and a transaction of 4 MB are made
for. Below it an item costs up to 64 write units where an object in S3 costs as much as about 8, but is written and read
in one request of a few milliseconds.

**Conditions** are DynamoDB's. Each is one request (`table` tells what becomes of lost answers), but for these, which
read first: unconditional writes (two requests, more while others write the same record), so that versions count up by
one even if an answer is lost; and deletes (a read and a transaction), which remove an object in S3 with its record.
One case is left: a record whose creation was applied, its answer lost, and which was deleted by somebody else before
botocore sends the creation again, is created again.

**Time to live** is off unless asked for by kind. Records past their time are there until DynamoDB removes them, and
objects in S3 outlive them.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.items import EXPIRES, PARTITION, SORT, Item, ItemWrites, new_token, primary_key
from turnmill.backends.aws.large_values import LargeValue, LargeValues
from turnmill.backends.aws.table import MAX_KEYS, RecordTable
from turnmill.errors import RecordCorrupt
from turnmill.ports import Stored, Write
from turnmill.ports.record_keys import prefix_parts

# Bytes of the largest value that an item holds.
MAX_INLINE = 64 * 1024
# Requests of one call that are under way at once.
MAX_PARALLEL = 16


def table_properties(*, is_recoverable: bool = False) -> dict[str, Any]:
    """A table of records as CloudFormation describes it (`AWS::DynamoDB::Table`), without its name and encryption.

    `is_recoverable`: as it was at any second of the last 35 days.
    """
    return {
        "AttributeDefinitions": [
            {"AttributeName": PARTITION, "AttributeType": "S"},
            {"AttributeName": SORT, "AttributeType": "S"},
        ],
        "KeySchema": [
            {"AttributeName": PARTITION, "KeyType": "HASH"},
            {"AttributeName": SORT, "KeyType": "RANGE"},
        ],
        "BillingMode": "PAY_PER_REQUEST",
        "TimeToLiveSpecification": {"AttributeName": EXPIRES, "Enabled": True},
        "PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": is_recoverable},
    }


class DynamoRecordStore:
    """Implements `ports.RecordStore`; the methods that end in `_now` are for callers without an event loop."""

    def __init__(
        self,
        clients: AwsClients,
        table: str,
        *,
        overflow: LargeValues,
        ttl_s: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s`: how long after its last write a record of a kind may be removed; the others never are."""
        self.clients = clients
        self.table = RecordTable(clients, table)
        self.writes = ItemWrites(table, ttl_s=ttl_s or {}, clock=clock)
        self.overflow = overflow

    async def get(self, keys: Sequence[str]) -> list[Stored | None]:
        """See `ports.RecordStore.get`."""
        batches = _batches(keys)
        parts = await self._in_parallel([partial(self._get_batch, batch) for batch in batches])
        found = {stored.key: stored for stored in chain.from_iterable(parts)}
        return [found.get(key) for key in keys]

    def get_now(self, keys: Sequence[str]) -> list[Stored | None]:
        """`get` in the caller's thread."""
        found = {stored.key: stored for batch in _batches(keys) for stored in self._get_batch(batch)}
        return [found.get(key) for key in keys]

    async def write(self, writes: Sequence[Write]) -> list[bool]:
        """See `ports.RecordStore.write`; writes to different keys are under way at the same time."""
        by_key: dict[str, list[int]] = {}
        for index, write in enumerate(writes):
            primary_key(write.key)
            by_key.setdefault(write.key, []).append(index)
        queues = list(by_key.values())
        lanes = [
            list(chain.from_iterable(queues[lane::MAX_PARALLEL])) for lane in range(min(MAX_PARALLEL, len(queues)))
        ]
        applied = [False] * len(writes)
        outcomes = await self._in_parallel([partial(self._write_all, [writes[i] for i in lane]) for lane in lanes])
        for lane, outcome in zip(lanes, outcomes, strict=True):
            for index, done in zip(lane, outcome, strict=True):
                applied[index] = done
        return applied

    async def scan(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """See `ports.RecordStore.scan`."""
        return await self.clients.run(partial(self.scan_now, prefix, after=after, limit=limit))

    def scan_now(self, prefix: str, *, after: str = "", limit: int = 1000) -> list[Stored]:
        """`scan` in the caller's thread; all records where `limit` is negative."""
        parts = prefix_parts(prefix)
        if after > prefix and not after.startswith(prefix):
            return []
        # Before the first key of the partition lies nothing, and its name alone is no key.
        last: str | None = after if after >= prefix and after != f"{parts.partition}/" else ""
        found: list[Stored] = []
        while last is not None and (limit < 0 or len(found) < limit):
            items, last = self.table.page(parts, after=last, limit=None if limit < 0 else limit - len(found))
            found += self._stored(items)
        return found

    def close(self) -> None:
        """Nothing is held: the clients belong to whoever made them."""

    def put_large(self, key: str, value: bytes, token: bytes) -> bytes | LargeValue:
        """What the item of a record is to hold: the value, or a large one's place in S3, where it is from now on."""
        if len(value) <= MAX_INLINE:
            return value
        return self.overflow.put_now(f"{key.partition('/')[0]}/{token.hex()}", value)

    def discard(self, value: bytes | LargeValue | None) -> None:
        """Remove the object of a value that no item holds any more; others have none."""
        if isinstance(value, LargeValue):
            self.overflow.discard_now(value)

    async def _in_parallel(self, work: Sequence[Callable[[], list[Any]]]) -> list[list[Any]]:
        """The results of all; if some fail, all have ended when the first failure is raised."""
        results = await asyncio.gather(*(self.clients.run(one) for one in work), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    def _get_batch(self, keys: Sequence[str]) -> list[Stored]:
        return self._stored(list(self.table.get(keys).values()))

    def _stored(self, items: Sequence[Item]) -> list[Stored]:
        """In order, without those that are deleted by now; large values are read several at a time."""
        if sum(item.large_value is not None for item in items) < 2:
            read = [self._read(item) for item in items]
        else:
            with ThreadPoolExecutor(MAX_PARALLEL, "large-values") as pool:
                read = list(pool.map(self._read, items))
        return [stored for stored in read if stored is not None]

    def _read(self, item: Item | None) -> Stored | None:
        """Raises `RecordCorrupt` for a large value that is lost or damaged."""
        while item is not None:
            large = item.large_value
            value = self.overflow.get_now(large) if large else item.value
            if isinstance(value, bytes):
                return Stored(key=item.key, value=value, version=item.version)
            # It was replaced or deleted since, or it is lost.
            item = self.table.get([item.key]).get(item.key)
            if large is not None and item is not None and item.large_value == large:
                raise RecordCorrupt(f"the value of record {item.key} is lost: nothing lies at {large.s3_key}")
        return None

    def _write_all(self, writes: Sequence[Write]) -> list[bool]:
        return [self._write(write) for write in writes]

    def _write(self, write: Write) -> bool:
        if write.value is None:
            return self._delete(write.key, write.expected)
        if write.expected is not None:
            return self._put(write.key, write.value, write.expected)
        while True:
            item = self.table.get([write.key]).get(write.key)
            # Refused, somebody else has written it in between.
            if self._put(write.key, write.value, item.version if item else 0):
                return True

    def _put(self, key: str, value: bytes, expected: int) -> bool:
        token = new_token()
        content = self.put_large(key, value, token)
        write = self.writes.put(key, content, expected=expected, token=token)
        applied, replaced = self.table.put(write, expected=expected, token=token)
        old = replaced.value if replaced else None
        self.discard(old if applied else content)
        return applied

    def _delete(self, key: str, expected: int | None) -> bool:
        while True:
            item = self.table.get([key]).get(key)
            if item is None:
                return not expected
            if expected is not None and item.version != expected:
                return False
            if not self.table.transact([self.writes.delete(item)]):
                self.discard(item.value)
                return True


def _batches(keys: Sequence[str]) -> list[list[str]]:
    """Different keys, as many at once as a read takes."""
    for key in keys:
        primary_key(key)
    distinct = list(dict.fromkeys(keys))
    return [distinct[start : start + MAX_KEYS] for start in range(0, len(distinct), MAX_KEYS)]
