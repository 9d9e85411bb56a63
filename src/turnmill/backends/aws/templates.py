"""The CloudFormation templates of Turnmill: what a deployment has, and what a run has.

    AwsSettings -> deployment_template      bucket, table of the deployment's records, topic of its alerts, log group
    + run id    -> run_template             the run's queues with their dead-letter queues, its table,
                                            and for an external trainer its Lambda functions (functions.py)

Plain dictionaries, equal for equal arguments, so that deploying twice is deploying once. All names are fixed by
`AwsSettings` and `StackNames`, which check them; the roles alone are named by CloudFormation. Everything has the tags
of its stack. Nothing is retained: deleting a stack leaves nothing.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnmill.backends.aws.functions import CodeLocation, function_resources
from turnmill.backends.aws.resources import (
    Json,
    bucket,
    bucket_policy,
    log_group,
    queue_id,
    queue_resources,
    queues_of_run,
    queues_policy,
    table,
    topic,
    topic_policy,
)
from turnmill.backends.aws.settings import AwsSettings, StackNames, check_run_id
from turnmill.errors import InvalidInput

# What CloudFormation takes: resources of a stack, and bytes of a template.
MAX_RESOURCES, MAX_BYTES = 500, 1_000_000
# What the outputs call the URL of a queue.
_QUEUE_OUTPUTS = {
    "rollout_request": "RolloutQueueUrl",
    "rollout_response": "RolloutFinishedQueueUrl",
    "generate_request": "RequestQueueUrl",
    "generate_response": "RequestResponseQueueUrl",
}


def deployment_template(settings: AwsSettings) -> Json:
    """What all runs of a deployment share."""
    resources = {
        "Bucket": bucket(settings),
        "BucketPolicy": bucket_policy(),
        "Records": table(settings.table, is_recoverable=True),
        "Alerts": topic(settings.topic),
        "AlertsPolicy": topic_policy(),
        "Metrics": log_group(settings.log_group),
    }
    outputs: Json = {
        "BucketName": {"Ref": "Bucket"},
        "RecordsTableName": {"Ref": "Records"},
        "AlertTopicArn": {"Ref": "Alerts"},
        "MetricsLogGroupName": {"Ref": "Metrics"},
    }
    if settings.kms_key is not None:
        outputs["BucketKmsKey"] = settings.kms_key
    return _template(f"Turnmill deployment {settings.name}: what its runs share", resources, outputs)


def run_template(
    settings: AwsSettings,
    stack: str,
    run_id: str,
    num_replicas: int,
    external: bool = False,
    *,
    with_proxy: bool = False,
    callers: Sequence[str] = (),
    code: CodeLocation | None = None,
) -> Json:
    """What one run has for itself in the stack `stack`.

    `external`: trainer and generator are somebody else's, who have one generate_request queue, and Lambda functions to
    call; `with_proxy`: of these the proxy alone. They need `code`. `callers` are ARNs of roles or users, or accounts,
    that may call the proxy's URL. Raises `InvalidInput` for what breaks a limit of a service.
    """
    check_run_id(run_id)
    names = StackNames(stack=stack)
    queues = queues_of_run(num_replicas, external=external)
    resources = {"Records": table(names.table, is_recoverable=False)}
    outputs: Json = {"TasksTableName": {"Ref": "Records"}}
    for queue in queues:
        resources |= queue_resources(names, queue)
        if queue in _QUEUE_OUTPUTS:
            outputs[_QUEUE_OUTPUTS[queue]] = {"Ref": queue_id(queue)}
    resources["QueuesPolicy"] = queues_policy(queues)
    if external or with_proxy:
        if code is None:
            raise InvalidInput("the Lambda functions of a run need their code: pack it, then store it in the bucket")
        functions = function_resources(settings, names, run_id, queues, external=external, callers=callers, code=code)
        resources |= functions.resources
        outputs |= functions.outputs
    return _template(f"Turnmill run {run_id} of deployment {settings.name}", resources, outputs)


def deployment_tags(settings: AwsSettings) -> dict[str, str]:
    """Of everything that belongs to a deployment; its stack is told from others by them."""
    return {"turnmill:deployment": settings.name}


def run_tags(settings: AwsSettings, run_id: str) -> dict[str, str]:
    """Of everything that belongs to a run; its stack is told from others by them."""
    return deployment_tags(settings) | {"turnmill:run": check_run_id(run_id)}


def body_of(template: Mapping[str, Any]) -> str:
    """As CloudFormation takes it; raises `InvalidInput` for one that is larger than it takes."""
    body = json.dumps(template, separators=(",", ":"))
    num_resources = len(template["Resources"])
    if num_resources > MAX_RESOURCES or len(body) > MAX_BYTES:
        raise InvalidInput(
            f"{template['Description']}: {num_resources} resources in {len(body)} bytes of template; CloudFormation "
            f"takes at most {MAX_RESOURCES} in {MAX_BYTES}: use fewer generation replicas"
        )
    return body


def _template(description: str, resources: Json, outputs: Json) -> Json:
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": description,
        "Resources": resources,
        "Outputs": {name: {"Value": value} for name, value in outputs.items()},
    }
