"""The Lambda functions of a run's stack, each with a role that may do what it does, and a log group that forgets.

    proxy      a function URL that agents call (SigV4)   reads and writes records, sends generate_request, reports
    rollout    what an external trainer calls            writes a sample, sends rollout_request
    responses  generate_response -> records              what a foreign generator answers

A role's statements name resources of its own stack, the run's prefix in the deployment's bucket, and one partition of
the deployment's table. `logs` takes a resource `...:*`: the streams of one group.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnmill.backends.aws.resources import Json, bucket_name, log_group, queue_id
from turnmill.backends.aws.settings import AwsSettings, StackNames
from turnmill.errors import InvalidInput

RUNTIME, ARCHITECTURE = "python3.12", "x86_64"
HANDLERS = "turnmill.backends.aws.lambdas"
# Messages of one invocation of `responses`: the most that a FIFO queue gives.
_BATCH_SIZE = 10
# Partitions of the deployment's table: the records of runs, and those of whom has been told what.
_RUNS = ("runs/all",)
_ALERTS = ("alerts/all", "alerts/handed_over", "sightings/all")
_CALLER = re.compile(r"\d{12}|arn:aws[a-z-]*:iam::\d{12}:(root|(role|user)/[\w+=,.@/-]+)", re.ASCII)
_FIND = ("sqs:GetQueueAttributes", "sqs:GetQueueUrl")
_SEND = ("sqs:SendMessage", *_FIND)
_CONSUME = ("sqs:ChangeMessageVisibility", "sqs:DeleteMessage", "sqs:ReceiveMessage", *_FIND)
_RECORDS = tuple(
    f"dynamodb:{action}"
    for action in "BatchGetItem ConditionCheckItem DeleteItem GetItem PutItem Query UpdateItem".split()
)
_ALERT_RECORDS = tuple(
    f"dynamodb:{action}" for action in "BatchGetItem ConditionCheckItem GetItem PutItem UpdateItem".split()
)


@dataclass(frozen=True, kw_only=True)
class CodeLocation:
    """Where the code of the functions lies, as `package.store` says."""

    bucket: str
    key: str


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What a template gets of them."""

    resources: Json
    outputs: Json


@dataclass(frozen=True, kw_only=True)
class _Function:
    """One function, and what its role may do with the run's queues."""

    # proxy | rollout | responses; its handler is in the module of that name.
    name: str
    # Logical ids begin so.
    prefix: str
    timeout_s: int
    memory_mb: int
    sends: tuple[str, ...] = ()
    consumes: tuple[str, ...] = ()
    # It records and publishes alerts: nobody else watches a run of an external trainer.
    tells: bool = False


_PROXY = _Function(
    name="proxy",
    prefix="Proxy",
    timeout_s=60,
    # A whole core comes with 1769 MB.
    memory_mb=1769,
    sends=("rollout_response", "generate_request"),
    consumes=("rollout_request",),
    tells=True,
)
_ROLLOUT = _Function(
    name="rollout",
    prefix="Rollout",
    timeout_s=30,
    memory_mb=512,
    sends=("rollout_request",),
)
# A sixth of the queue's visibility timeout, as Lambda asks for: a batch that is throttled is not delivered twice.
_RESPONSES = _Function(
    name="responses", prefix="Responses", timeout_s=10, memory_mb=512, consumes=("generate_response",)
)


def function_resources(
    settings: AwsSettings,
    names: StackNames,
    run_id: str,
    queues: Sequence[str],
    *,
    external: bool,
    callers: Sequence[str],
    code: CodeLocation,
) -> Functions:
    """The proxy, and for an external trainer the other two. `queues`: those of the run, by their name."""
    resources: Json = {}
    for function in (_PROXY, _ROLLOUT, _RESPONSES) if external else (_PROXY,):
        resources |= _resources_of(function, settings, names, run_id, queues, code)
    resources |= _url_resources(callers)
    outputs: Json = {
        "ProxyFunctionName": {"Ref": "ProxyFunction"},
        "ProxyFunctionUrl": {"Fn::GetAtt": ["ProxyUrl", "FunctionUrl"]},
    }
    if external:
        resources["ResponsesSource"] = _source()
        outputs |= {
            "RolloutFunctionName": {"Ref": "RolloutFunction"},
            "RolloutFunctionArn": {"Fn::GetAtt": ["RolloutFunction", "Arn"]},
        }
    return Functions(resources=resources, outputs=outputs)


def _resources_of(
    function: _Function,
    settings: AwsSettings,
    names: StackNames,
    run_id: str,
    queues: Sequence[str],
    code: CodeLocation,
) -> Json:
    prefix = function.prefix
    environment = {
        "TURNMILL_BUCKET": bucket_name(settings),
        "TURNMILL_DEPLOYMENT": settings.name,
        "TURNMILL_RUN": run_id,
        "TURNMILL_STACK": names.stack,
    }
    properties = {
        "FunctionName": names.function(function.name),
        "Architectures": [ARCHITECTURE],
        "Code": {"S3Bucket": code.bucket, "S3Key": code.key},
        "Environment": {"Variables": environment},
        "Handler": f"{HANDLERS}.{function.name}.handler",
        "LoggingConfig": {"LogGroup": {"Ref": f"{prefix}Logs"}},
        "MemorySize": function.memory_mb,
        "Role": {"Fn::GetAtt": [f"{prefix}Role", "Arn"]},
        "Runtime": RUNTIME,
        "Timeout": function.timeout_s,
    }
    return {
        # Made here and not by Lambda, whose own would stay for ever; a role may not make one, so that none comes back.
        f"{prefix}Logs": log_group(names.log_group(function.name)),
        f"{prefix}Role": _role(function, settings, names, run_id, queues),
        f"{prefix}Function": {"Type": "AWS::Lambda::Function", "Properties": properties},
    }


def _role(function: _Function, settings: AwsSettings, names: StackNames, run_id: str, queues: Sequence[str]) -> Json:
    deployment_table = _arn("dynamodb", f"table/{settings.table}")
    statements = [
        _allow(
            "Logs", ("logs:CreateLogStream", "logs:PutLogEvents"), {"Fn::GetAtt": [f"{function.prefix}Logs", "Arn"]}
        ),
        _allow("Records", _RECORDS, {"Fn::GetAtt": ["Records", "Arn"]}),
        *_bucket_statements(settings, run_id),
        # A condition can name a partition, not an item of it.
        _allow("RunRecord", ("dynamodb:GetItem",), deployment_table, _in_partitions(_RUNS)),
    ]
    for sid, actions, kinds in (("Send", _SEND, function.sends), ("Consume", _CONSUME, function.consumes)):
        arns = [{"Fn::GetAtt": [queue_id(queue), "Arn"]} for queue in queues if queue.partition("-")[0] in kinds]
        if arns:
            statements.append(_allow(sid, actions, arns))
    if function.tells:
        statements.append(_allow("AlertRecords", _ALERT_RECORDS, deployment_table, _in_partitions(_ALERTS)))
        statements.append(_allow("Alerts", ("sns:Publish",), _arn("sns", settings.topic)))
    trust = {"Effect": "Allow", "Principal": {"Service": "lambda.amazonaws.com"}, "Action": "sts:AssumeRole"}
    properties = {
        "AssumeRolePolicyDocument": _document([trust]),
        "Description": f"What the function {names.function(function.name)} may do",
        "Path": {"Fn::Sub": f"{names.role_path}${{AWS::Region}}/"},
        "Policies": [{"PolicyName": function.name, "PolicyDocument": _document(statements)}],
    }
    return {"Type": "AWS::IAM::Role", "Properties": properties}


def _bucket_statements(settings: AwsSettings, run_id: str) -> list[Json]:
    bucket = f"arn:${{AWS::Partition}}:s3:::{settings.name}-${{AWS::AccountId}}-${{AWS::Region}}"
    prefix = f"runs/{run_id}/*"
    statements = [
        _allow("Objects", ("s3:DeleteObject", "s3:GetObject", "s3:PutObject"), {"Fn::Sub": f"{bucket}/{prefix}"}),
        # Records of the deployment that are too large for their table.
        _allow("LargeRunRecord", ("s3:GetObject",), {"Fn::Sub": f"{bucket}/records/runs/*"}),
        # Who may not list is told that an absent object is forbidden; so it would be with a condition on the prefix,
        # as the request for an object has none. The price: a function may see the keys of other runs.
        _allow("Keys", ("s3:ListBucket",), {"Fn::Sub": bucket}),
    ]
    if settings.kms_key is not None:
        via = {"StringEquals": {"kms:ViaService": {"Fn::Sub": "s3.${AWS::Region}.amazonaws.com"}}}
        statements.append(_allow("Key", ("kms:Decrypt", "kms:GenerateDataKey"), settings.kms_key, via))
    return statements


def _url_resources(callers: Sequence[str]) -> Json:
    """The proxy's URL. Who calls it needs both permissions; in the same account, its own policies may give them.

    Raises `InvalidInput` for a caller that is not one role, user or account: `*` would be everybody who has an account.
    """
    for caller in callers:
        if _CALLER.fullmatch(caller) is None:
            raise InvalidInput(
                f"caller {caller!r} can't be allowed: name the ARN of a role or user, or the 12 digits of an account"
            )
    function = {"Ref": "ProxyFunction"}
    url = {
        "AuthType": "AWS_IAM",
        "InvokeMode": "BUFFERED",
        "TargetFunctionArn": {"Fn::GetAtt": ["ProxyFunction", "Arn"]},
    }
    resources: Json = {"ProxyUrl": {"Type": "AWS::Lambda::Url", "Properties": url}}
    for index, caller in enumerate(callers):
        common = {"FunctionName": function, "Principal": caller}
        for logical_id, more in (
            (f"ProxyCaller{index}Url", {"Action": "lambda:InvokeFunctionUrl", "FunctionUrlAuthType": "AWS_IAM"}),
            (f"ProxyCaller{index}Function", {"Action": "lambda:InvokeFunction", "InvokedViaFunctionUrl": True}),
        ):
            resources[logical_id] = {"Type": "AWS::Lambda::Permission", "Properties": common | more}
    return resources


def _source() -> Json:
    """`generate_response` -> `responses`; of a batch, what failed comes again and the rest does not."""
    properties = {
        "BatchSize": _BATCH_SIZE,
        "EventSourceArn": {"Fn::GetAtt": [queue_id("generate_response"), "Arn"]},
        "FunctionName": {"Ref": "ResponsesFunction"},
        "FunctionResponseTypes": ["ReportBatchItemFailures"],
    }
    return {"Type": "AWS::Lambda::EventSourceMapping", "Properties": properties}


def _allow(sid: str, actions: Sequence[str], resource: object, condition: Mapping[str, Any] | None = None) -> Json:
    statement: Json = {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": resource}
    return statement | ({"Condition": dict(condition)} if condition else {})


def _in_partitions(partitions: Sequence[str]) -> Json:
    return {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": list(partitions)}}


def _arn(service: str, resource: str) -> Json:
    """Of what another stack of the same account and region has."""
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:{service}:${{AWS::Region}}:${{AWS::AccountId}}:{resource}"}


def _document(statements: list[Json]) -> Json:
    return {"Version": "2012-10-17", "Statement": statements}
