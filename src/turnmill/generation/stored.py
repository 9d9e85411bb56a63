"""Reading recorded calls: each is checked against its digest, and each path against the chain of parent digests."""

from collections.abc import Sequence

import msgspec

from turnmill.errors import RecordCorrupt
from turnmill.ports import RecordStore
from turnmill.records import Call, GenerateRequest, call_key, decode


def parent_key(child: GenerateRequest | Call) -> str:
    """The key of the call that `child` continues: a parent is of the same sample."""
    return call_key(child.run_id, child.purpose, child.sample_id, child.parent or "")


async def read_calls(records: RecordStore, keys: Sequence[str]) -> list[Call | None]:
    """The calls under these keys, None where there is none; raises `RecordCorrupt`."""
    calls: list[Call | None] = []
    for key, stored in zip(keys, await records.get(keys), strict=True):
        call = None
        if stored is not None:
            try:
                call = decode(stored.value, Call)
            except msgspec.DecodeError as error:
                raise RecordCorrupt(f"{key} is no call record: {error}") from error
            if call.key != key or call.digest != call.expected_digest():
                raise RecordCorrupt(f"{key} does not match its digest {call.digest}")
        calls.append(call)
    return calls


async def read_paths(records: RecordStore, last_calls: Sequence[Call]) -> list[list[int]]:
    """The tokens of the conversations that end in these calls, root first; one read a generation for all of them.

    Raises `RecordCorrupt` where a call is missing or is not the one that its child continued.
    """
    paths = [[call] for call in last_calls]
    unfinished = [path for path in paths if path[0].parent]
    while unfinished:
        keys = [parent_key(path[0]) for path in unfinished]
        for path, key, call in zip(unfinished, keys, await read_calls(records, keys), strict=True):
            if call is None or call.digest != path[0].parent_digest:
                raise RecordCorrupt(f"{path[0].key} does not continue {key} as it is recorded")
            path.insert(0, call)
        unfinished = [path for path in unfinished if path[0].parent]
    return [[token for call in path for token in call.token_ids] for path in paths]
