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


async def read_paths(records: RecordStore, last_calls: Sequence[tuple[str, str]]) -> list[list[int]]:
    """The tokens of the conversations that end in these calls (key, digest), root first; one read a generation for all.

    Raises `RecordCorrupt` where a call is missing or is not the one that its child continued.
    """
    paths: list[list[Call]] = [[] for _ in last_calls]
    # Path, and key and digest of the call before what it holds.
    wanted = [(path, *last) for path, last in zip(paths, last_calls, strict=True)]
    while wanted:
        found = await read_calls(records, [key for _, key, _ in wanted])
        for (path, key, digest), call in zip(wanted, found, strict=True):
            if call is None or call.digest != digest:
                child = path[0].key if path else "a request"
                raise RecordCorrupt(f"{child} does not continue {key} as it is recorded")
            path.insert(0, call)
        wanted = [(path, parent_key(path[0]), path[0].parent_digest) for path, _, _ in wanted if path[0].parent]
    return [[token for call in path for token in call.token_ids] for path in paths]
