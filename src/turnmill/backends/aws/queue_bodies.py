"""How a message is put on the wire of SQS, and read from it.

    Message -> text | base64 | an object in S3 -> SQS -> bytes

| body | on the wire | attribute `turnmill.encoding` |
|---|---|---|
| UTF-8 that SQS takes: all JSON | as it is | absent, as in what others send, who read and write plain JSON |
| other bytes, and none at all | `base64,` and the base64 of it | `base64` |
| above `MAX_INLINE_BYTES` on the wire | the key of an object in S3 | `object` |

A queue that somebody else reads has no objects: who reads plain JSON knows nothing of our bucket. Its messages are as
large as SQS takes them.

Group and deduplication ids are SHA-256 digests: ours are of any length and alphabet. The group itself travels, as JSON,
in the attribute `turnmill.group`; of a message that others sent it is the id that SQS knows.

Objects are named by the digest of their content, so that what is sent again, or redriven, needs no other one and
nobody has to know who is the last to read it: they go with the run's resources, not with their message.
"""

import base64
import binascii
import hashlib
import json
import re
import uuid

from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.objects import Objects
from turnmill.backends.aws.queue_requests import MAX_MESSAGE_BYTES, Outgoing, Received
from turnmill.errors import InvalidInput, NotFound, RecordCorrupt
from turnmill.ports import Message

MAX_INLINE_BYTES = 200_000
GROUP, ENCODING = "turnmill.group", "turnmill.encoding"
_BASE64, _OBJECT = "base64", "object"
# It keeps an empty body from being empty on the wire, too, which SQS refuses.
_BASE64_PREFIX = "base64,"
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class UnreadableBody(Exception):
    """A message's body can't be read, and another try would end the same."""


class Overflow:
    """Bodies that are too large for a message: objects below `prefix` (`runs/<run_id>/messages/`) of a bucket."""

    def __init__(self, clients: AwsClients, bucket: str, prefix: str) -> None:
        self._objects = Objects(clients, bucket, prefix)
        self._prefix = prefix

    def put(self, body: bytes) -> str:
        """Store; returns the key. The same body always has the same one. Raises `InvalidInput` for missing rights."""
        name = hashlib.sha256(body).hexdigest()
        self._objects.put(name, body)
        return self._prefix + name

    def get(self, key: str) -> bytes:
        """The body under `key`; raises `UnreadableBody` for one that is absent, damaged or not below our prefix.

        Raises `InvalidInput` for missing rights: giving the message up would mend nothing.
        """
        if not key.startswith(self._prefix):
            raise UnreadableBody(f"its body is said to be at {key!r}, which is not below {self._prefix}")
        name = key.removeprefix(self._prefix)
        try:
            body = self._objects.get(name)
        except NotFound as error:
            raise UnreadableBody(f"its body can't be read: {error}") from error
        except RecordCorrupt as error:
            raise UnreadableBody(f"its body is not the one that was stored: {error}") from error
        if name != hashlib.sha256(body).hexdigest():
            raise UnreadableBody(f"its body at {self._objects.uri(name)} is not the one that was stored")
        return body


def to_wire(message: Message, overflow: Overflow | None) -> Outgoing:
    """`message` with a deduplication id of its own where it has none; stores its body first where it is too large.

    Without an `overflow` it is as large as it is; raises `InvalidInput` above what SQS takes.
    """
    body, encoding = _encoded(message.body)
    if overflow is not None and len(body.encode()) > MAX_INLINE_BYTES:
        body, encoding = overflow.put(message.body), _OBJECT
    attributes = {GROUP: _string(json.dumps(message.group))}
    if encoding is not None:
        attributes[ENCODING] = _string(encoding)
    outgoing = Outgoing(
        group_id=digest(message.group),
        dedup_id=uuid.uuid4().hex if message.dedup_id is None else digest(message.dedup_id),
        body=body,
        attributes=attributes,
    )
    if outgoing.num_bytes > MAX_MESSAGE_BYTES:
        raise InvalidInput(
            f"a message has {outgoing.num_bytes} bytes with its attributes, and SQS takes {MAX_MESSAGE_BYTES} at most, "
            "which is the limit where somebody else reads the queue: shorten the conversation or its data"
        )
    return outgoing


def body_of(received: Received, overflow: Overflow | None) -> bytes:
    """Raises `UnreadableBody`."""
    encoding = received.attributes.get(ENCODING, {}).get("StringValue")
    if encoding is None:
        return received.body.encode()
    if encoding == _OBJECT:
        if overflow is None:
            raise UnreadableBody(f"its body is said to be at {received.body!r}, and its queue has no objects")
        return overflow.get(received.body)
    if encoding != _BASE64 or not received.body.startswith(_BASE64_PREFIX):
        raise UnreadableBody(f"its body has the unknown encoding {encoding!r}")
    try:
        return base64.b64decode(received.body.removeprefix(_BASE64_PREFIX), validate=True)
    except binascii.Error as error:
        raise UnreadableBody(f"its body is no base64: {error}") from error


def group_of(received: Received) -> str:
    """Raises `UnreadableBody` for one that is not ours and says that it is."""
    ours = received.attributes.get(GROUP, {}).get("StringValue")
    if ours is None:
        return received.group_id
    try:
        group = json.loads(ours)
    except json.JSONDecodeError as error:
        raise UnreadableBody(f"its group is no JSON: {error}") from error
    if not isinstance(group, str):
        raise UnreadableBody(f"its group is no text: {ours}")
    return group


def digest(name: str) -> str:
    """An id of any alphabet and length as one that SQS takes."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()


def _encoded(body: bytes) -> tuple[str, str | None]:
    try:
        text = body.decode()
    except UnicodeDecodeError:
        text = ""
    if text and _FORBIDDEN.search(text) is None:
        return text, None
    return _BASE64_PREFIX + base64.b64encode(body).decode(), _BASE64


def _string(value: str) -> dict[str, str]:
    return {"DataType": "String", "StringValue": value}
