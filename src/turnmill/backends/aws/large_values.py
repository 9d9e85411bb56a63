"""Values that are too large for an item: an object in S3 each, which the item points to.

    value -> S3 under a name of its own -> item (name, digest)      reading: item -> S3 -> digest checked -> value

An object belongs to one write of one record and never changes; it goes when the record is replaced or deleted. One that
is left behind, by a process that died in between or by a write whose answer was lost, is removed with everything else
under the prefix.
"""

import hashlib
import logging
from dataclasses import dataclass

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.objects import Objects
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LargeValue:
    """Where a value lies."""

    # Below the prefix.
    s3_key: str
    # SHA-256 hex of the value.
    digest: str


class LargeValues:
    """The objects below `prefix` of `bucket`. Its methods block, and raise like `Objects`."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str, *, kms_key: str | None = None) -> None:
        self._objects = Objects(clients, bucket, prefix, kms_key=kms_key)

    def put_now(self, s3_key: str, value: bytes) -> LargeValue:
        """Store under a key that no other value has."""
        return LargeValue(s3_key=s3_key, digest=self._objects.put(s3_key, value))

    def get_now(self, stored: LargeValue) -> bytes | None:
        """None where it was removed. Raises `RecordCorrupt` for another content than was stored."""
        try:
            value = self._objects.get(stored.s3_key)
        except NotFound:
            return None
        if hashlib.sha256(value).hexdigest() != stored.digest:
            raise RecordCorrupt(f"{self._objects.uri(stored.s3_key)} does not match the digest in its record")
        return value

    def discard_now(self, stored: LargeValue) -> None:
        """Remove what no record points to any more.

        What it was stored for is decided by then, so that a failure is logged only: what stays costs its storage.
        """
        try:
            self._objects.delete(stored.s3_key)
        except (BackendUnavailable, InvalidInput) as error:
            logger.warning("%s is not needed any more and stays: %s", self._objects.uri(stored.s3_key), error)
