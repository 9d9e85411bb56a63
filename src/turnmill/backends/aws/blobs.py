"""Blobs as objects in S3, each with its digest (see `objects`)."""

from functools import partial

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.objects import Objects
from turnmill.errors import NotFound
from turnmill.ports import BlobInfo, ListedBlob
from turnmill.ports.blob_keys import check_blob_key


class S3BlobStore:
    """Implements `ports.BlobStore` below `prefix` of a bucket, e.g. `runs/<run>/blobs/`."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str, *, kms_key: str | None = None) -> None:
        """Encrypted with `kms_key`, else as the bucket says."""
        self._clients = clients
        self._objects = Objects(clients, bucket, prefix, kms_key=kms_key)

    async def put(self, key: str, data: bytes) -> BlobInfo:
        """See `ports.BlobStore.put`."""
        return await self._clients.run(partial(self.put_now, key, data))

    async def get(self, key: str) -> bytes:
        """See `ports.BlobStore.get`."""
        return await self._clients.run(partial(self.get_now, key))

    async def list(self, prefix: str = "") -> list[ListedBlob]:
        """See `ports.BlobStore.list`; one request for a thousand blobs."""
        found = await self._clients.run(partial(self._objects.listed, prefix))
        return [ListedBlob(key=item.key, size=item.size) for item in found]

    async def delete(self, key: str) -> None:
        """See `ports.BlobStore.delete`."""
        await self._clients.run(partial(self._objects.delete, check_blob_key(key)))

    def put_now(self, key: str, data: bytes) -> BlobInfo:
        """`put` for a thread of the caller's own."""
        digest = self._objects.put(check_blob_key(key), data)
        return BlobInfo(key=key, size=len(data), digest=digest)

    def get_now(self, key: str) -> bytes:
        """`get` for a thread of the caller's own."""
        try:
            return self._objects.get(check_blob_key(key))
        except NotFound:
            raise NotFound(f"there is no blob {key!r} at {self._objects.uri()}") from None
