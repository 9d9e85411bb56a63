"""What every blob store keeps."""

import asyncio
import hashlib

import pytest

from turnmill.errors import InvalidInput, NotFound
from turnmill.ports import BlobInfo, BlobStore


async def test_a_blob_is_read_as_it_was_put(blobs: BlobStore) -> None:
    content = bytes(range(256)) * 100
    info = await blobs.put("a/b.json", content)
    assert info == BlobInfo(key="a/b.json", size=len(content), digest=hashlib.sha256(content).hexdigest())
    assert await blobs.get("a/b.json") == content


async def test_a_second_put_replaces_the_first(blobs: BlobStore) -> None:
    await blobs.put("a", b"long content")
    assert await blobs.put("a", b"") == BlobInfo(key="a", size=0, digest=hashlib.sha256(b"").hexdigest())
    assert await blobs.get("a") == b""


async def test_what_is_not_there_is_not_found(blobs: BlobStore) -> None:
    with pytest.raises(NotFound, match="'a/b'"):
        await blobs.get("a/b")
    await blobs.put("a/b", b"1")
    await blobs.delete("a/b")
    await blobs.delete("a/b")
    await blobs.delete("never/was")
    with pytest.raises(NotFound):
        await blobs.get("a/b")
    assert await blobs.list() == []


async def test_a_list_holds_what_begins_with_the_prefix_by_key(blobs: BlobStore) -> None:
    for key in ("runs/1/b", "runs/1/a", "runs/10/a", "runs/1", "other", "runs/1/a/deep"):
        await blobs.put(key, key.encode())
    assert [info.key for info in await blobs.list()] == sorted(
        ["other", "runs/1", "runs/1/a", "runs/1/a/deep", "runs/1/b", "runs/10/a"]
    )
    assert [info.key for info in await blobs.list("runs/1")] == [
        "runs/1",
        "runs/1/a",
        "runs/1/a/deep",
        "runs/1/b",
        "runs/10/a",
    ]
    assert [(info.key, info.size) for info in await blobs.list("runs/1/")] == [
        ("runs/1/a", 8),
        ("runs/1/a/deep", 13),
        ("runs/1/b", 8),
    ]
    assert await blobs.list("absent/") == []
    assert await blobs.list("../") == []


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\0b", "x" * 300, "\ud800"])
async def test_a_key_that_is_no_path_is_refused(blobs: BlobStore, key: str) -> None:
    for attempt in (blobs.put(key, b""), blobs.get(key), blobs.delete(key)):
        with pytest.raises(InvalidInput, match="blob key") as raised:
            await attempt
        assert not isinstance(raised.value, NotFound)
    assert await blobs.list() == []


async def test_a_reader_sees_one_whole_content_while_others_replace_it(blobs: BlobStore) -> None:
    contents = [bytes([number]) * 200_000 for number in range(4)]
    await blobs.put("a", contents[0])

    async def replace(content: bytes) -> None:
        for _ in range(5):
            await blobs.put("a", content)

    async def read() -> None:
        for _ in range(20):
            assert await blobs.get("a") in contents

    await asyncio.gather(*(replace(content) for content in contents), read(), read())
    assert len(await blobs.list()) == 1
