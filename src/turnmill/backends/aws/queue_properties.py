"""What a run's queues are made of: the properties of `AWS::SQS::Queue`, as CloudFormation takes them."""

from typing import Any

# The longest that SQS keeps a message: a queue goes with its run.
RETENTION_S = 1_209_600
# For receivers that name no visibility timeout of their own, as external trainers may.
VISIBILITY_S = 60


def queue_properties(
    name: str,
    dead_letters_arn: str | dict[str, Any],
    *,
    max_receives: int,
    visibility_s: int = VISIBILITY_S,
    kms_key: str | dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Of a queue of a run. The ARN and the key, None for the one of SQS, may be CloudFormation expressions.

    A function that is fed from it needs a `visibility_s` that is not below its own time-out.
    """
    return {
        **_fifo(name, kms_key),
        "VisibilityTimeout": visibility_s,
        "RedrivePolicy": {"deadLetterTargetArn": dead_letters_arn, "maxReceiveCount": max_receives},
    }


def dead_letter_queue_properties(
    name: str, source_arn: str | dict[str, Any], *, kms_key: str | dict[str, Any] | None = None
) -> dict[str, Any]:
    """Of the queue of its dead letters, which takes none but those of `source_arn`.

    Give that ARN as text made of the queue's name: the two refer to each other.
    """
    return {
        **_fifo(name, kms_key),
        "RedriveAllowPolicy": {"redrivePermission": "byQueue", "sourceQueueArns": [source_arn]},
    }


def _fifo(name: str, kms_key: str | dict[str, Any] | None) -> dict[str, Any]:
    encryption = {"SqsManagedSseEnabled": True} if kms_key is None else {"KmsMasterKeyId": kms_key}
    return {
        "QueueName": name,
        "FifoQueue": True,
        # High throughput: quotas and deduplication are per message group, not per queue.
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
        "MessageRetentionPeriod": RETENTION_S,
        **encryption,
    }
