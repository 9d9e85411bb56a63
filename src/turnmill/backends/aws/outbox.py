"""Records and the news of them: the records in DynamoDB first, then the messages of those that were written.

    entries, counts -> transactions of records and their counters -> messages of what was applied -> queue

A process that dies in between leaves records whose messages were never sent; whoever waits for them looks at the
records. Without counts each record is a write of its own, at half the price.

What a transaction consumes: writes to different records, and what each adds to its counter. It is applied as a whole,
so that a counter says exactly what its records do. If the conditions of some do not hold, these are told apart and the
rest is tried again without them (`_apply`); that others write the same items at the same moment, as well as a lost
answer, is the matter of `RecordTable.transact`. A counter is one item and takes part in one transaction at a time, so
that everybody who counts should have one of his own: replicas do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from turnmill.backends.aws.items import Item, ItemWrite, new_token, primary_key
from turnmill.backends.aws.large_values import LargeValue
from turnmill.backends.aws.records import DynamoRecordStore
from turnmill.backends.aws.table import MAX_ACTIONS, MAX_KEYS, MAX_TRANSACTION_BYTES
from turnmill.errors import InvalidInput
from turnmill.ports import Count, Message, WorkQueue, Write
from turnmill.ports.record_keys import key_parts

# Bytes of keys of the greatest length, attribute names, expressions and tokens.
_OVERHEAD = 10_000


class DynamoOutbox:
    """Implements `ports.Outbox` for the records of one kind and a queue."""

    def __init__(self, records: DynamoRecordStore, queue: WorkQueue, *, kind: str = "calls") -> None:
        self._records = records
        self._queue = queue
        self._kind = kind

    async def write(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count] = ()) -> list[bool]:
        """See `ports.Outbox.write`; raises `InvalidInput` for a record of another kind, and a counter of this one."""
        self._check(entries, counts)
        writes = [write for write, _ in entries]
        if counts:
            applied = await self._records.clients.run(partial(_write_counted, self._records, writes, counts))
        else:
            applied = await self._records.write(writes)
        if messages := [message for (_, message), done in zip(entries, applied, strict=True) if done]:
            await self._queue.send(messages)
        return applied

    def _check(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count]) -> None:
        """Nothing may be found wrong after the first record is written."""
        if counts and len(counts) != len(entries):
            raise ValueError(f"{len(counts)} counts for {len(entries)} entries")
        for write, message in entries:
            primary_key(write.key)
            if key_parts(write.key).kind != self._kind:
                raise InvalidInput(f"record {write.key!r} does not belong here: only {self._kind} do")
            # A queue that is text can't take half of a surrogate pair.
            message.group.encode()
        for count in counts:
            primary_key(count.key)
            if key_parts(count.key).kind == self._kind:
                raise InvalidInput(f"counter {count.key!r} is of the kind of the records that it counts")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A write on its way into a transaction."""

    # Its place among all.
    index: int
    write: Write
    count: Count
    token: bytes
    # What its item will hold.
    content: bytes | LargeValue | None

    @property
    def size(self) -> int:
        """Bytes of a transaction that it takes up with its counter, at most."""
        return _OVERHEAD + (len(self.content) if isinstance(self.content, bytes) else 0)


def _write_counted(records: DynamoRecordStore, writes: Sequence[Write], counts: Sequence[Count]) -> list[bool]:
    applied = [False] * len(writes)
    for turn in _turns(writes):
        entries = []
        for index in turn:
            write, token = writes[index], new_token()
            content = None if write.value is None else records.put_large(write.key, write.value, token)
            entries.append(_Entry(index=index, write=write, count=counts[index], token=token, content=content))
        for transaction in _transactions(entries):
            for index in _apply(records, transaction):
                applied[index] = True
    return applied


def _turns(writes: Sequence[Write]) -> Iterator[list[int]]:
    """All writes, by index; none of a turn is to the same record as another, as in a transaction."""
    left = list(range(len(writes)))
    while left:
        first = {writes[index].key: index for index in reversed(left)}
        yield sorted(first.values())
        left = [index for index in left if first[writes[index].key] != index]


def _transactions(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    """As many entries at once as a transaction takes, their counters included."""
    part: list[_Entry] = []
    size, counters = 0, set[str]()
    for entry in entries:
        added = counters | {entry.count.key}
        if part and (len(part) + 1 + len(added) > MAX_ACTIONS or size + entry.size > MAX_TRANSACTION_BYTES):
            yield part
            part, size, added = [], 0, {entry.count.key}
        part.append(entry)
        size, counters = size + entry.size, added
    if part:
        yield part


def _apply(records: DynamoRecordStore, entries: Sequence[_Entry]) -> list[int]:
    """Write what can be written and count it, all at once: the indices of it."""
    pending = list(entries)
    while pending:
        items = _replaced(records, pending)
        changes = {entry.index: _change(records, entry, items.get(entry.write.key)) for entry in pending}
        ready = [entry for entry in pending if changes[entry.index] is not None]
        writes = [change for change in changes.values() if change is not None]
        failed = (
            {ready[at].index for at in records.table.transact([*writes, *_counters(records, ready)])} if ready else ()
        )
        # Unconditional ones are read and tried again; the records of the others are not as expected.
        is_refused = {
            entry.index: changes[entry.index] is None or (entry.index in failed and entry.write.expected is not None)
            for entry in pending
        }
        for entry in pending:
            if is_refused[entry.index]:
                records.discard(entry.content)
        if not failed:
            for entry in ready:
                if replaced := items.get(entry.write.key):
                    records.discard(replaced.value)
            return [entry.index for entry in ready]
        pending = [entry for entry in pending if not is_refused[entry.index]]
    return []


def _replaced(records: DynamoRecordStore, entries: Sequence[_Entry]) -> dict[str, Item]:
    """What is there of the records that are to be replaced or deleted; those that are to be created need no read."""
    keys = [entry.write.key for entry in entries if entry.write.expected != 0 or entry.write.value is None]
    assert len(keys) <= MAX_KEYS
    return records.table.get(keys) if keys else {}


def _change(records: DynamoRecordStore, entry: _Entry, item: Item | None) -> ItemWrite | None:
    """None where the record, as it was read, is not as expected."""
    key, expected = entry.write.key, entry.write.expected
    if entry.content is not None and expected == 0:
        return records.writes.put(key, entry.content, expected=0, token=entry.token)
    version = item.version if item else 0
    if expected is not None and expected != version:
        return None
    if entry.content is not None:
        return records.writes.put(key, entry.content, expected=version, token=entry.token)
    return records.writes.delete(item) if item else records.writes.check_absent(key)


def _counters(records: DynamoRecordStore, entries: Sequence[_Entry]) -> list[ItemWrite]:
    sums: dict[str, int] = {}
    for entry in entries:
        sums[entry.count.key] = sums.get(entry.count.key, 0) + entry.count.amount
    return [records.writes.add(key, amount) for key, amount in sums.items()]
