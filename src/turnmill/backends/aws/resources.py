"""The single resources that the templates are made of, as CloudFormation knows them.

What holds data goes with its stack (`_GOES`): nothing is retained. Values are expressions where they are known only in
the account that the stack is made in, so that a template is the same everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from turnmill.backends.aws.queue_properties import dead_letter_queue_properties, queue_properties
from turnmill.backends.aws.records import table_properties
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.ports import queue_names

Json = dict[str, Any]
LOG_RETENTION_DAYS = 30
# Of a message, before it is a dead letter. A sample's own attempts end long before (`max_attempts`).
MAX_RECEIVES = 20
# Parts of an upload that was never completed, and what was overwritten or deleted, are kept for so many days.
_INCOMPLETE_DAYS, _NONCURRENT_DAYS = 7, 30
_GOES: Mapping[str, str] = {"DeletionPolicy": "Delete", "UpdateReplacePolicy": "Delete"}


def queues_of_run(num_replicas: int, *, external: bool) -> list[str]:
    """The queues of a run, by their names everywhere else; an external generator has one generate_request."""
    return queue_names(None if external else num_replicas)


def queue_id(queue: str) -> str:
    """The logical id of a queue: `GenerateRequestQueue0` of `generate_request-0`."""
    kind, _, index = queue.partition("-")
    return f"{''.join(part.capitalize() for part in kind.split('_'))}Queue{index}"


def dead_letters_id(queue_id: str) -> str:
    """The logical id of the queue of its dead letters."""
    return queue_id.replace("Queue", "DeadLetters")


def log_group(name: str) -> Json:
    """A log group that forgets."""
    properties = {"LogGroupName": name, "RetentionInDays": LOG_RETENTION_DAYS}
    return {"Type": "AWS::Logs::LogGroup", **_GOES, "Properties": properties}


def queue_resources(names: StackNames, queue: str) -> Json:
    """A queue with the queue of its dead letters, each of which knows the other one."""
    logical_id = queue_id(queue)
    dead_letters = dead_letters_id(logical_id)
    name = names.queue(queue)
    # As text: an expression of the one resource in the other, and the other way round, would be a circle.
    arn = {"Fn::Sub": f"arn:${{AWS::Partition}}:sqs:${{AWS::Region}}:${{AWS::AccountId}}:{name}"}
    dead_letters_arn = {"Fn::GetAtt": [dead_letters, "Arn"]}
    return {
        dead_letters: _queue(dead_letter_queue_properties(names.dead_letter_queue(queue), arn)),
        logical_id: _queue(queue_properties(name, dead_letters_arn, max_receives=MAX_RECEIVES)),
    }


def queues_policy(queues: Sequence[str]) -> Json:
    """Of these queues and those of their dead letters: by TLS, or not at all."""
    ids = [queue_id(queue) for queue in queues]
    statement = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "sqs:*",
        # Of each queue, itself: one policy for all of them, as a stack has a limit of resources.
        "Resource": "*",
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    urls = [{"Ref": each} for name in ids for each in (name, dead_letters_id(name))]
    document = {"Version": "2012-10-17", "Statement": [statement]}
    return {"Type": "AWS::SQS::QueuePolicy", "Properties": {"Queues": urls, "PolicyDocument": document}}


def _queue(properties: Json) -> Json:
    return {"Type": "AWS::SQS::Queue", **_GOES, "Properties": properties}


def bucket(settings: AwsSettings) -> Json:
    """Versioned, encrypted, closed to the public; old versions and parts of uploads go by themselves."""
    encryption: Json = {"SSEAlgorithm": "AES256"}
    if settings.kms_key is not None:
        encryption = {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": settings.kms_key}
    rules: list[Json] = [
        {
            "Id": "incomplete-uploads",
            "Status": "Enabled",
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _INCOMPLETE_DAYS},
        },
        {
            "Id": "noncurrent-versions",
            "Status": "Enabled",
            "NoncurrentVersionExpiration": {"NoncurrentDays": _NONCURRENT_DAYS},
            "ExpiredObjectDeleteMarker": True,
        },
    ]
    closed = ("BlockPublicAcls", "BlockPublicPolicy", "IgnorePublicAcls", "RestrictPublicBuckets")
    properties = {
        "BucketName": bucket_name(settings),
        "BucketEncryption": {
            "ServerSideEncryptionConfiguration": [
                # One data key for many objects: a request to KMS for each of them costs more than the objects do.
                {"ServerSideEncryptionByDefault": encryption, "BucketKeyEnabled": settings.kms_key is not None}
            ]
        },
        "LifecycleConfiguration": {"Rules": rules},
        "OwnershipControls": {"Rules": [{"ObjectOwnership": "BucketOwnerEnforced"}]},
        "PublicAccessBlockConfiguration": dict.fromkeys(closed, True),
        "VersioningConfiguration": {"Status": "Enabled"},
    }
    return {"Type": "AWS::S3::Bucket", **_GOES, "Properties": properties}


def bucket_name(settings: AwsSettings) -> Json:
    """As an expression, so that a template is the same in every account."""
    # The longest region's name there is, so that the limit is known before anything is made.
    settings.bucket("0" * 12, "ap-southeast-1")
    return {"Fn::Sub": f"{settings.name}-${{AWS::AccountId}}-${{AWS::Region}}"}


def bucket_policy() -> Json:
    """Of the resource `Bucket`: by TLS, or not at all."""
    arn = {"Fn::GetAtt": ["Bucket", "Arn"]}
    statement = {
        "Sid": "TlsOnly",
        "Effect": "Deny",
        "Principal": "*",
        "Action": "s3:*",
        "Resource": [arn, {"Fn::Sub": "${Bucket.Arn}/*"}],
        "Condition": {"Bool": {"aws:SecureTransport": "false"}},
    }
    document = {"Version": "2012-10-17", "Statement": [statement]}
    return {
        "Type": "AWS::S3::BucketPolicy",
        "Properties": {"Bucket": {"Ref": "Bucket"}, "PolicyDocument": document},
    }


def topic_policy() -> Json:
    """Of the resource `Alerts`: for its own account, and by TLS."""
    statements = [
        # The policy that a topic has by itself, and that this one replaces, but for its own account alone.
        {
            "Sid": "Owner",
            "Effect": "Allow",
            "Principal": {"AWS": {"Fn::Sub": "arn:${AWS::Partition}:iam::${AWS::AccountId}:root"}},
            "Action": ["sns:GetTopicAttributes", "sns:ListSubscriptionsByTopic", "sns:Publish", "sns:Subscribe"],
            "Resource": {"Ref": "Alerts"},
        },
        {
            "Sid": "TlsOnly",
            "Effect": "Deny",
            "Principal": "*",
            "Action": "sns:Publish",
            "Resource": {"Ref": "Alerts"},
            "Condition": {"Bool": {"aws:SecureTransport": "false"}},
        },
    ]
    document = {"Version": "2012-10-17", "Statement": statements}
    return {
        "Type": "AWS::SNS::TopicPolicy",
        "Properties": {"Topics": [{"Ref": "Alerts"}], "PolicyDocument": document},
    }


def table(name: str, *, is_recoverable: bool) -> Json:
    """A table of records; `is_recoverable`: as of each second of the last 35 days."""
    properties = table_properties(is_recoverable=is_recoverable) | {"TableName": name}
    return {"Type": "AWS::DynamoDB::Table", **_GOES, "Properties": properties}


def topic(name: str) -> Json:
    """Encrypted with the key that SNS has in each account, which everybody may use who may use the topic."""
    return {"Type": "AWS::SNS::Topic", "Properties": {"TopicName": name, "KmsMasterKeyId": "alias/aws/sns"}}
