"""The requests to one SQS queue, for threads: batches of ten, and what to do with the entries of one that failed.

    entries -> batches -> SQS -> 200 with a result for each entry -> those that failed for no fault of theirs, again

| failure | who tries again |
|---|---|
| of a whole request | see `clients` |
| of single entries, by throttling or an error of SQS | this module, `ENTRY_TRIES` in all |
| of single entries, for what they are | nobody |
"""

import logging
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnmill.backends.aws.clients import AwsClients, Refused
from turnmill.errors import BackendUnavailable, InvalidInput, NotDeployed, NotFound

logger = logging.getLogger(__name__)
# Limits of the service.
MAX_BATCH, MAX_BATCH_BYTES, MAX_MESSAGE_BYTES = 10, 1_048_576, 1_048_576
MAX_POLL_S, MAX_VISIBILITY_S = 20, 43_200
# Tries of an entry, the first one included; the pauses between them come to 3 s at most.
ENTRY_TRIES, _ENTRY_PAUSE_S = 6, 0.1
_ABSENT = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist")
# Somebody purges the queue already: the one refusal that passes.
_PURGING = "PurgeQueueInProgress"
_SYSTEM_ATTRIBUTES = ["ApproximateReceiveCount", "MessageGroupId", "SentTimestamp"]


class BusyPurging(BackendUnavailable):
    """A purge that somebody else has begun is under way."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """A message as it is put on the wire."""

    # Both within the alphabet and the length of the service.
    group_id: str
    dedup_id: str
    body: str
    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """What it counts towards the limits of the service."""
        values = (value for attribute in self.attributes.values() for value in attribute.values())
        return sum(
            len(part.encode() if isinstance(part, str) else part) for part in (self.body, *self.attributes, *values)
        )


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message as it comes from the wire."""

    message_id: str
    # Of this receive; good until its visibility timeout ends.
    handle: str
    body: str
    attributes: Mapping[str, Mapping[str, Any]]
    group_id: str
    # This one included.
    num_receives: int
    # Seconds since the epoch.
    sent_at: float


class QueueRequests:
    """One queue by its name; its address is looked up with the first request.

    Raises `NotDeployed` where it is absent, and `InvalidInput` for what only another configuration can mend.
    """

    def __init__(self, clients: AwsClients, name: str) -> None:
        self.name = name
        self._clients = clients
        self._url: str | None = None

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Append, in order within each group; raises `InvalidInput` for a message that SQS refuses for what it is.

        No batch has two messages of a group: where one of them failed and the other one did not, sending it again
        would put it behind the other.
        """
        for batch in batches_of(outgoing):
            entries = [
                {
                    "Id": str(index),
                    "MessageBody": message.body,
                    "MessageAttributes": message.attributes,
                    "MessageGroupId": message.group_id,
                    "MessageDeduplicationId": message.dedup_id,
                }
                for index, message in enumerate(batch)
            ]
            for refusal in self._batch("send_message_batch", entries).values():
                raise InvalidInput(f"SQS does not take a message for {self.name}: {_text(refusal)}")

    def receive(self, *, max_messages: int, visibility_s: int, wait_s: int = 0) -> list[Received]:
        """At most ten; an answer that is lost on the way is sent again with the same messages."""
        answer = self.call(
            "receive_message",
            MaxNumberOfMessages=min(max_messages, MAX_BATCH),
            VisibilityTimeout=visibility_s,
            WaitTimeSeconds=wait_s,
            ReceiveRequestAttemptId=uuid.uuid4().hex,
            MessageSystemAttributeNames=_SYSTEM_ATTRIBUTES,
            MessageAttributeNames=["All"],
        )
        return [_received(message) for message in answer.get("Messages", [])]

    def delete(self, handles: Sequence[str]) -> list[bool]:
        """True where a message is gone."""
        return self._with_each("delete_message_batch", handles, {})

    def hide(self, handles: Sequence[str], visibility_s: int) -> list[bool]:
        """Set the visibility timeouts, from now; 0 gives back. True where that was done."""
        return self._with_each("change_message_visibility_batch", handles, {"VisibilityTimeout": visibility_s})

    def attributes(self, *names: str) -> Mapping[str, str]:
        """Those of these attributes that are set."""
        found: Mapping[str, str] = self.call("get_queue_attributes", AttributeNames=list(names)).get("Attributes", {})
        return found

    def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """An operation on this queue; raises `NotDeployed`, `BusyPurging`, `InvalidInput` for other refusals."""
        try:
            if self._url is None:
                self._url = str(self._clients.call_now("sqs", "get_queue_url", QueueName=self.name)["QueueUrl"])
            return self._clients.call_now("sqs", operation, QueueUrl=self._url, **parameters)
        except Refused as refused:
            if refused.code in _ABSENT:
                raise NotDeployed(
                    f"queue {self.name} does not exist; the resources of its run are not deployed"
                ) from None
            if _PURGING in refused.code:
                raise BusyPurging(str(refused)) from refused
            raise InvalidInput(
                f"{refused}; check queue {self.name}, its KMS key, and what the credentials in use may do"
            ) from refused

    def _with_each(self, operation: str, handles: Sequence[str], parameters: Mapping[str, Any]) -> list[bool]:
        """An operation on received messages, ten at a time; what is no handle belongs to none."""
        done = [bool(handle) for handle in handles]
        entries = [
            {"Id": str(index), "ReceiptHandle": handle, **parameters} for index, handle in enumerate(handles) if handle
        ]
        for start in range(0, len(entries), MAX_BATCH):
            for entry_id in self._batch(operation, entries[start : start + MAX_BATCH]):
                done[int(entry_id)] = False
        return done

    def _batch(self, operation: str, entries: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
        """One batch, and again those of its entries that failed for no fault of theirs; what was refused, by id."""
        refused: dict[str, Mapping[str, Any]] = {}
        left = list(entries)
        for attempt in range(ENTRY_TRIES):
            failures = {failure["Id"]: failure for failure in self.call(operation, Entries=left).get("Failed", [])}
            refused |= {entry_id: failure for entry_id, failure in failures.items() if not _is_transient(failure)}
            left = [entry for entry in left if entry["Id"] in failures and entry["Id"] not in refused]
            if not left:
                return refused
            if attempt < ENTRY_TRIES - 1:
                time.sleep(_ENTRY_PAUSE_S * 2**attempt * random.uniform(0.5, 1.0))
        why = _text(failures[left[0]["Id"]])
        raise BackendUnavailable(f"AWS sqs {operation} failed for {len(left)} entries of {self.name}: {why}")


def batches_of(outgoing: Sequence[Outgoing]) -> list[list[Outgoing]]:
    """Batches within the limits of the service, to be sent one after another: each group at most once in each."""
    batches: list[list[Outgoing]] = []
    num_bytes: list[int] = []
    first_open = 0
    next_of_group: dict[str, int] = {}
    for message in outgoing:
        index = max(first_open, next_of_group.get(message.group_id, 0))
        while index < len(batches) and (
            len(batches[index]) == MAX_BATCH or num_bytes[index] + message.num_bytes > MAX_BATCH_BYTES
        ):
            index += 1
        if index == len(batches):
            batches.append([])
            num_bytes.append(0)
        batches[index].append(message)
        num_bytes[index] += message.num_bytes
        next_of_group[message.group_id] = index + 1
        while first_open < len(batches) and len(batches[first_open]) == MAX_BATCH:
            first_open += 1
    return batches


def give_back(queue: QueueRequests, handles: Sequence[str]) -> None:
    """Messages that nobody will use; where that can't be done they come back at the end of their lease."""
    try:
        queue.hide(handles, 0)
    except (BackendUnavailable, InvalidInput, NotFound) as error:
        logger.warning("%d messages of %s are not given back: %s", len(handles), queue.name, error)


def _received(message: Mapping[str, Any]) -> Received:
    system = message.get("Attributes", {})
    return Received(
        message_id=message["MessageId"],
        handle=message["ReceiptHandle"],
        body=message["Body"],
        attributes=message.get("MessageAttributes", {}),
        group_id=system.get("MessageGroupId", ""),
        num_receives=int(system.get("ApproximateReceiveCount", 1)),
        sent_at=int(system.get("SentTimestamp", 0)) / 1000,
    )


def _is_transient(failure: Mapping[str, Any]) -> bool:
    return not failure.get("SenderFault", False) or "Throttl" in str(failure.get("Code", ""))


def _text(failure: Mapping[str, Any]) -> str:
    return f"{failure.get('Code', 'no code')}: {failure.get('Message', 'no message')}"
