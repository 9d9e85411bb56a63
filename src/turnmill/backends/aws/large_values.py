"""Values that are too large for an item: an object in S3 each, which the item points to.

    value -> S3 under a name of its own -> item (name, digest)      reading: item -> S3 -> digest checked -> value

An object belongs to one write of one record and never changes; it goes when the record is replaced or deleted. One that
is left behind by a process that died in between is removed with everything else under the prefix.
"""

import hashlib
import logging
from dataclasses import dataclass

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import BackendUnavailable, RecordCorrupt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LargeValue:
    """Where a value lies."""

    # In the bucket, the prefix included.
    s3_key: str
    # SHA-256 hex of the value.
    digest: str


class LargeValues:
    """The objects under `prefix` of `bucket`."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str) -> None:
        self._clients = clients
        self._bucket = bucket
        self._prefix = prefix

    def put_now(self, name: str, value: bytes) -> LargeValue:
        """Store under a name that no other value has. Raises `BackendUnavailable`."""
        stored = LargeValue(s3_key=self._prefix + name, digest=hashlib.sha256(value).hexdigest())
        try:
            self._clients.call_now("s3", "put_object", Bucket=self._bucket, Key=stored.s3_key, Body=value)
        except Refused as error:
            raise BackendUnavailable(f"a large record can't be stored in bucket {self._bucket}: {error}") from error
        return stored

    def get_now(self, stored: LargeValue) -> bytes | None:
        """None where it was removed. Raises `RecordCorrupt` for another content than was stored."""
        try:
            answer = self._clients.work_with(
                "s3",
                "get_object",
                lambda client: client.get_object(Bucket=self._bucket, Key=stored.s3_key)["Body"].read(),
            )
        except Refused as error:
            if error.code == "NoSuchKey":
                return None
            raise BackendUnavailable(f"a large record can't be read from bucket {self._bucket}: {error}") from error
        value = bytes(answer)
        if hashlib.sha256(value).hexdigest() != stored.digest:
            raise RecordCorrupt(f"s3://{self._bucket}/{stored.s3_key} does not match the digest in its record")
        return value

    def discard_now(self, stored: LargeValue) -> None:
        """Remove what no record points to any more.

        What it was stored for is decided by then, so that a failure is logged only: what stays costs its storage.
        """
        try:
            self._clients.call_now("s3", "delete_object", Bucket=self._bucket, Key=stored.s3_key)
        except (Refused, BackendUnavailable) as error:
            logger.warning("s3://%s/%s is not needed any more and stays: %s", self._bucket, stored.s3_key, error)
