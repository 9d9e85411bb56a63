"""What is S3's own about blobs and models: parts, checksums, encryption, conditional writes, lost answers."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.aws.emulator import Emulator
from tests.aws.service_proxy import Faults, RunningProxy, running_proxy
from tests.contracts.aws_objects import bucket_of
from tests.contracts.published import MODEL, weights_in
from turnmill.backends.aws.blobs import S3BlobStore
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.models import S3ModelStore
from turnmill.backends.aws.objects import MULTIPART_FROM, Objects
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt

PREFIX = "runs/r1/blobs/"


@pytest.fixture
def clients(emulator: Emulator) -> Iterator[AwsClients]:
    opened = AwsClients(emulator.settings("stores"))
    yield opened
    opened.close()


@pytest.fixture
def bucket(clients: AwsClients, tmp_path: Path) -> str:
    return bucket_of(clients, tmp_path)


@contextmanager
def through(
    emulator: Emulator, folder: Path, faults: Faults, *, max_tries: int = 8
) -> Iterator[tuple[RunningProxy, AwsClients]]:
    with running_proxy(emulator.url, folder / "proxy", faults) as proxy:
        clients = AwsClients(replace(emulator.settings("stores"), endpoint_url=proxy.url), max_tries=max_tries)
        yield proxy, clients
        clients.close()


def pattern(num_bytes: int) -> bytes:
    return hashlib.shake_128(b"a blob").digest(num_bytes)


async def test_a_blob_lies_under_its_prefix_with_digest_and_checksum(clients: AwsClients, bucket: str) -> None:
    info = await S3BlobStore(clients, bucket, PREFIX).put("steps/1.json", b"{}")
    head = await clients.call("s3", "head_object", Bucket=bucket, Key=f"{PREFIX}steps/1.json", ChecksumMode="ENABLED")
    assert head["Metadata"] == {"sha256": info.digest}
    assert head["ChecksumSHA256"]


async def test_a_large_blob_goes_up_in_parts_and_comes_back_whole(
    emulator: Emulator, bucket: str, tmp_path: Path
) -> None:
    content = pattern(2 * MULTIPART_FROM + 5)
    with through(emulator, tmp_path, Faults()) as (proxy, clients):
        blobs = S3BlobStore(clients, bucket, PREFIX)
        info = await blobs.put("large", content)
        head = await clients.call("s3", "head_object", Bucket=bucket, Key=f"{PREFIX}large")
        assert head["ETag"].strip('"').endswith("-3")
        assert await blobs.get("large") == content
    assert info.digest == hashlib.sha256(content).hexdigest()
    # Started and completed, and three parts.
    assert (proxy.counts().requests["s3.POST"], proxy.counts().requests["s3.PUT"]) == (2, 3)


async def test_a_deployments_key_encrypts_small_and_large_blobs(clients: AwsClients, bucket: str) -> None:
    key = (await clients.call("kms", "create_key"))["KeyMetadata"]["Arn"]
    blobs = S3BlobStore(clients, bucket, PREFIX, kms_key=key)
    for name, content in (("small", b"1"), ("large", pattern(MULTIPART_FROM + 1))):
        await blobs.put(name, content)
        head = await clients.call("s3", "head_object", Bucket=bucket, Key=PREFIX + name)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", key)
        assert await blobs.get(name) == content


async def test_content_that_another_wrote_over_a_blob_is_refused(clients: AwsClients, bucket: str) -> None:
    blobs = S3BlobStore(clients, bucket, PREFIX)
    info = await blobs.put("a", b"content")
    overwrite: dict[str, Any] = {"Bucket": bucket, "Key": f"{PREFIX}a", "Body": b"c0ntent"}
    await clients.call("s3", "put_object", **overwrite, Metadata={"sha256": info.digest})
    with pytest.raises(RecordCorrupt, match="does not match its digest"):
        await blobs.get("a")
    await clients.call("s3", "put_object", **overwrite)
    with pytest.raises(RecordCorrupt, match="no digest"):
        await blobs.get("a")


async def test_a_list_goes_over_all_pages(clients: AwsClients, bucket: str) -> None:
    blobs = S3BlobStore(clients, bucket, PREFIX)
    keys = [f"many/{number:04d}" for number in range(1005)]
    await asyncio.gather(*(blobs.put(key, b"") for key in keys))
    assert [info.key for info in await blobs.list("many/")] == keys
    Objects(clients, bucket, PREFIX).delete(*keys)
    assert await blobs.list() == []


async def test_stores_of_other_prefixes_are_not_seen(clients: AwsClients, bucket: str) -> None:
    await S3BlobStore(clients, bucket, "runs/r1/blobs/").put("a", b"1")
    with pytest.raises(NotFound, match="'a'"):
        await S3BlobStore(clients, bucket, "runs/r10/blobs/").get("a")
    with pytest.raises(InvalidInput, match="must end with '/'"):
        S3BlobStore(clients, bucket, "runs/r1")


async def test_a_bucket_that_is_not_there_is_named(clients: AwsClients) -> None:
    blobs = S3BlobStore(clients, "no-such-bucket-000000000000", PREFIX)
    for attempt in (blobs.put("a", b""), blobs.list()):
        with pytest.raises(InvalidInput, match="check the bucket"):
            await attempt


async def test_a_service_that_fails_all_the_time_is_unavailable(
    emulator: Emulator, bucket: str, tmp_path: Path
) -> None:
    with through(emulator, tmp_path, Faults(refuse=1.0), max_tries=1) as (_, clients):
        blobs = S3BlobStore(clients, bucket, PREFIX)
        for attempt in (blobs.put("a", b""), blobs.get("a"), blobs.list(), blobs.delete("a")):
            with pytest.raises(BackendUnavailable, match="AWS s3"):
                await attempt


@pytest.mark.slow
async def test_blobs_survive_lost_answers_throttling_and_expired_credentials(
    emulator: Emulator, bucket: str, tmp_path: Path
) -> None:
    faults = Faults(lose=0.1, throttle=0.05, refuse=0.05, expire=0.02, seed=5)
    content = pattern(MULTIPART_FROM + 1)
    with through(emulator, tmp_path, faults) as (proxy, clients):
        blobs = S3BlobStore(clients, bucket, PREFIX)
        await blobs.put("large", content)
        for number in range(20):
            await blobs.put(f"{number:02d}", str(number).encode())
            assert await blobs.get(f"{number:02d}") == str(number).encode()
        assert await blobs.get("large") == content
        assert len(await blobs.list()) == 21
    assert {"lose", "throttle", "refuse"} <= proxy.counts().faults.keys()


def test_what_is_created_once_stays_and_a_lost_answer_can_be_told_by_reading(
    emulator: Emulator, clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    objects = Objects(clients, bucket, PREFIX)
    assert objects.create("once", b"first") is True
    assert objects.create("once", b"second") is False
    assert objects.get("once") == b"first"
    with through(emulator, tmp_path, Faults(lose=1.0), max_tries=2) as (_, faulty):
        # Applied, and its answer lost; so the SDK's second try is refused by the condition of the first.
        assert Objects(faulty, bucket, PREFIX).create("twice", b"ours") is False
    assert objects.get("twice") == b"ours"


@pytest.mark.slow
async def test_a_model_whose_manifest_was_written_with_a_lost_answer_is_published(
    emulator: Emulator, clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    with through(emulator, tmp_path, Faults(lose=0.5, seed=3)) as (proxy, faulty):
        models = S3ModelStore(faulty, bucket, "models/")
        published = await models.publish(MODEL, weights_in(tmp_path / "source"), {"README.md": b"card"})
    assert proxy.counts().faults["lose"]
    assert await S3ModelStore(clients, bucket, "models/").find("r1", MODEL.version) == published


async def test_a_model_is_whole_at_its_location_and_what_lost_is_removed(
    clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    left = Objects(clients, bucket, "models/")
    left.put(f"{MODEL.name}/of-one-that-was-killed/model.safetensors", b"half")
    left.put("r1/1.70/other/model.safetensors", b"another version")
    models = S3ModelStore(clients, bucket, "models/")
    large = pattern(MULTIPART_FROM + 1)
    stored = await models.publish(MODEL, weights_in(tmp_path / "source", large), {"README.md": b"card"})
    base = f"s3://{bucket}/models/"
    place = stored.location.removeprefix(base)
    assert stored.location.startswith(f"{base}r1/1.7/") and place.endswith("/")
    expected = {f"{place}{name}" for name in stored.model.files}
    keys = {item.key for item in left.listed()}
    assert keys == expected | {"r1/1.7/manifest.json", "r1/1.70/other/model.safetensors"}
    await models.fetch(stored, tmp_path / "fetched")
    assert (tmp_path / "fetched" / "model.safetensors").read_bytes() == large
    assert (tmp_path / "fetched" / "README.md").read_bytes() == b"card"
    assert (tmp_path / "fetched" / "tokenizer" / "vocab.json").read_bytes() == b"[]"


async def test_a_model_that_can_not_be_written_to_disk_or_lacks_a_file_is_told(
    clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    models = S3ModelStore(clients, bucket, "models/")
    stored = await models.publish(MODEL, weights_in(tmp_path / "source"), {})
    (tmp_path / "a file").touch()
    with pytest.raises(BackendUnavailable, match="can't be written"):
        await models.fetch(stored, tmp_path / "a file")
    Objects(clients, bucket, "").delete(f"{stored.location.removeprefix(f's3://{bucket}/')}config.json")
    with pytest.raises(RecordCorrupt, match=r"config\.json is missing"):
        await models.fetch(stored, tmp_path / "fetched")


async def test_a_damaged_file_or_manifest_of_a_model_is_refused(
    clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    models = S3ModelStore(clients, bucket, "models/")
    stored = await models.publish(MODEL, weights_in(tmp_path / "source"), {})
    weights = f"{stored.location.removeprefix(f's3://{bucket}/')}model.safetensors"
    await clients.call("s3", "put_object", Bucket=bucket, Key=weights, Body=b"altered")
    with pytest.raises(RecordCorrupt, match="does not match its digest"):
        await models.fetch(stored, tmp_path / "fetched")
    Objects(clients, bucket, "models/").put("r1/1.7/manifest.json", b'{"run_id": 1}')
    with pytest.raises(RecordCorrupt, match="does not describe a model"):
        await models.find("r1", MODEL.version)


def wait_for_the_first(objects: Objects) -> None:
    while not objects.listed():
        time.sleep(0.001)


async def test_a_cancelled_publication_publishes_nothing_later(
    clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    models = S3ModelStore(clients, bucket, "models/")
    source = weights_in(tmp_path / "source")
    for number in range(400):
        (source / f"shard-{number:03d}").write_bytes(b"x")
    publishing = asyncio.create_task(models.publish(MODEL, source, {}))
    objects = Objects(clients, bucket, "models/")
    async with asyncio.timeout(60):
        await asyncio.to_thread(wait_for_the_first, objects)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    seen = -1
    while (now := len(await asyncio.to_thread(objects.listed))) != seen:
        seen = now
        await asyncio.sleep(0.1)
    assert await models.find("r1", MODEL.version) is None
    assert seen < 400


async def test_a_document_of_a_published_model_is_read_where_it_lies(
    clients: AwsClients, bucket: str, tmp_path: Path
) -> None:
    models = S3ModelStore(clients, bucket, "models/")
    stored = await models.publish(MODEL, weights_in(tmp_path / "source"), {"README.md": b"a card"})
    assert models.document(stored.location, "README.md") == b"a card"
    assert models.document(stored.location, "lineage.json") is None
