"""Objects in S3, whole and verified: what blobs, published models and checkpoints are kept as.

    put: SHA-256 of the content -> metadata and S3's own checksum -> PutObject, or a multipart upload
    get: GetObject -> content -> the digest once more -> content | RecordCorrupt

S3 checks a checksum before it stores anything; ours is checked again on the way back, by whoever reads. What a killed
upload leaves of a multipart upload is no object; the bucket's lifecycle rule (`AbortIncompleteMultipartUpload`) ends
it. All methods block; they are for a thread (`AwsClients.run`).

| failure | who tries again |
|---|---|
| a request | as `clients` says |
| the content of an answer breaks off | here, `_READ_TRIES` in all; of a download to a file boto3, 5 in all |
| 409: two conditional writes of one key met | here, `_CREATE_TRIES` in all |
"""

import base64
import hashlib
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import (
    FlexibleChecksumError,
    IncompleteReadError,
    ReadTimeoutError,
    ResponseStreamingError,
)
from s3transfer.exceptions import RetriesExceededError, S3DownloadFailedError, S3ValidationError

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound, RecordCorrupt

T = TypeVar("T")
# Larger ones go up in parts, several at once.
MULTIPART_FROM = 16 * 1024 * 1024
_TRANSFER = TransferConfig(
    multipart_threshold=MULTIPART_FROM, multipart_chunksize=MULTIPART_FROM, max_concurrency=8, use_threads=True
)
# The metadata that holds the SHA-256 of the content, hex.
_DIGEST = "sha256"
_MAX_PREFIX_BYTES = 256
_READ_TRIES = 4
_BROKEN_OFF = (IncompleteReadError, ReadTimeoutError, ResponseStreamingError)
_CREATE_TRIES, _CREATE_PAUSE_S = 6, 0.1
# Of DeleteObjects.
_MOST_DELETED_AT_ONCE = 1000
_ABSENT = ("NoSuchKey", "404", "NotFound")
_EXISTS, _MET_ANOTHER = ("PreconditionFailed", "412"), ("ConditionalRequestConflict",)


@dataclass(frozen=True, kw_only=True)
class Listed:
    """An object in a list; its key is below the prefix."""

    key: str
    size: int


class Objects:
    """The objects below one prefix of a bucket; keys leave the prefix out."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str, *, kms_key: str | None = None) -> None:
        """Encrypted with `kms_key` (id, alias or ARN), else as the bucket says. Raises `InvalidInput` for a prefix."""
        if prefix and (not prefix.endswith("/") or len(prefix.encode()) > _MAX_PREFIX_BYTES):
            raise InvalidInput(f"S3 prefix {prefix!r} must end with '/' and have at most {_MAX_PREFIX_BYTES} bytes")
        self._clients = clients
        self._bucket = bucket
        self._prefix = prefix
        self._encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}

    def uri(self, key: str = "") -> str:
        """Where the object, or all below a key that ends with a slash, is."""
        return f"s3://{self._bucket}/{self._prefix}{key}"

    def put(self, key: str, data: bytes) -> str:
        """Store or replace; the digest."""
        sha256 = hashlib.sha256(data)
        if len(data) < MULTIPART_FROM:
            self._with_client("put_object", partial(self._put_whole, key, data, sha256.digest()))
        else:
            self._with_client("upload", partial(self._put_parts, key, lambda: BytesIO(data), sha256.hexdigest()))
        return sha256.hexdigest()

    def put_file(self, key: str, path: Path, digest: str) -> None:
        """Store or replace; `digest` is the SHA-256 hex of the file's content."""
        if path.stat().st_size < MULTIPART_FROM:
            content = path.read_bytes()
            self._with_client("put_object", partial(self._put_whole, key, content, bytes.fromhex(digest)))
        else:
            self._with_client("upload", partial(self._put_parts, key, lambda: path.open("rb"), digest))

    def create(self, key: str, data: bytes) -> bool:
        """Store where there is nothing; False where there is something.

        False may also mean that our own write was applied and its answer was lost: whoever has to know reads it back.
        """
        digest = hashlib.sha256(data).digest()
        for tries_left in reversed(range(_CREATE_TRIES)):
            try:
                work = partial(self._put_whole, key, data, digest, condition={"IfNoneMatch": "*"})
                self._clients.work_with("s3", "put_object", work)
            except Refused as error:
                if error.code in _EXISTS:
                    return False
                if error.code not in _MET_ANOTHER:
                    raise _named(error) from error
                if not tries_left:
                    raise BackendUnavailable(str(error)) from error
                time.sleep(_CREATE_PAUSE_S * 2 ** (_CREATE_TRIES - 1 - tries_left) * random.uniform(0.5, 1.0))
            else:
                return True
        raise AssertionError("the last try returns or raises")

    def get(self, key: str) -> bytes:
        """The content; raises `NotFound`, or `RecordCorrupt` if it is not what was stored."""
        try:
            content, metadata = self._clients.work_with("s3", "get_object", partial(self._read, key))
        except Refused as error:
            if error.code in _ABSENT:
                raise NotFound(f"there is no object {key!r} at {self.uri()}") from None
            raise _named(error) from error
        expected = metadata.get(_DIGEST)
        if expected is None:
            raise RecordCorrupt(f"{self.uri(key)} has no digest in its metadata: something else than Turnmill wrote it")
        if hashlib.sha256(content).hexdigest() != expected:
            raise RecordCorrupt(f"{self.uri(key)} does not match its digest {expected}")
        return content

    def get_file(self, key: str, path: Path, digest: str) -> None:
        """Write the content to `path`, a new file; raises `NotFound`, `RecordCorrupt` unless it has `digest`."""
        try:
            self._clients.work_with("s3", "download", partial(self._download, key, path))
        except Refused as error:
            if error.code in _ABSENT:
                raise NotFound(f"there is no object {key!r} at {self.uri()}") from None
            raise _named(error) from error
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digest:
            raise RecordCorrupt(f"{self.uri(key)} does not match its digest {digest}")

    def listed(self, prefix: str = "") -> list[Listed]:
        """All objects whose key starts with `prefix`, by key."""
        return self._with_client("list_objects_v2", partial(self._list, prefix))

    def delete(self, *keys: str) -> None:
        """Remove; what is not there is no error."""
        for start in range(0, len(keys), _MOST_DELETED_AT_ONCE):
            part = keys[start : start + _MOST_DELETED_AT_ONCE]
            self._with_client("delete_objects", partial(self._delete, part))

    # ------------------------------------------------------------ with a client

    def _with_client(self, what: str, work: Callable[[Any], T]) -> T:
        try:
            return self._clients.work_with("s3", what, work)
        except Refused as error:
            raise _named(error) from error

    def _put_whole(
        self, key: str, data: bytes, digest: bytes, client: Any, *, condition: Mapping[str, str] = {}
    ) -> None:
        client.put_object(
            Bucket=self._bucket,
            Key=self._prefix + key,
            Body=data,
            ChecksumSHA256=base64.b64encode(digest).decode(),
            Metadata={_DIGEST: digest.hex()},
            **self._encryption,
            **condition,
        )

    def _put_parts(self, key: str, open_content: Callable[[], IO[bytes]], digest: str, client: Any) -> None:
        arguments = {"ChecksumAlgorithm": "SHA256", "Metadata": {_DIGEST: digest}, **self._encryption}
        # Not `upload_file`: its errors no longer say what was refused.
        with open_content() as content:
            client.upload_fileobj(content, self._bucket, self._prefix + key, ExtraArgs=arguments, Config=_TRANSFER)

    def _read(self, key: str, client: Any) -> tuple[bytes, Mapping[str, str]]:
        for tries_left in reversed(range(_READ_TRIES)):
            answer = client.get_object(Bucket=self._bucket, Key=self._prefix + key)
            try:
                with _checked(self.uri(key)):
                    return answer["Body"].read(), answer["Metadata"]
            except _BROKEN_OFF:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _download(self, key: str, path: Path, client: Any) -> None:
        with path.open("wb") as file, _checked(self.uri(key)):
            try:
                client.download_fileobj(self._bucket, self._prefix + key, file, Config=_TRANSFER)
            except (RetriesExceededError, S3DownloadFailedError, S3ValidationError) as error:
                raise BackendUnavailable(f"AWS s3 download failed: {self.uri(key)}: {error}") from error

    def _list(self, prefix: str, client: Any) -> list[Listed]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix + prefix)
        return [
            Listed(key=item["Key"].removeprefix(self._prefix), size=item["Size"])
            for page in pages
            for item in page.get("Contents", [])
        ]

    def _delete(self, keys: tuple[str, ...], client: Any) -> None:
        named = [{"Key": self._prefix + key} for key in keys]
        answer = client.delete_objects(Bucket=self._bucket, Delete={"Objects": named, "Quiet": True})
        errors = answer.get("Errors", [])
        if errors:
            first = f"{errors[0].get('Key')}: {errors[0].get('Code')} {errors[0].get('Message')}"
            raise BackendUnavailable(f"S3 did not delete {len(errors)} of {len(keys)} objects, the first one {first}")


@contextmanager
def _checked(uri: str) -> Iterator[None]:
    """botocore compares S3's own checksum, where there is one over the whole object."""
    try:
        yield
    except FlexibleChecksumError as error:
        raise RecordCorrupt(f"{uri} does not match the checksum of S3, a digest of its content: {error}") from error


def _named(error: Refused) -> InvalidInput:
    """What is refused for good is a matter of configuration: the bucket, the key, or what the role may do."""
    return InvalidInput(f"{error}; check the bucket, its KMS key, and what the credentials in use may do")
