"""The templates: what is in them, that no role may do more than it has to, and what a linter of CloudFormation says."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turnmill.backends.aws.functions import CodeLocation
from turnmill.backends.aws.resources import Json, queues_of_run
from turnmill.backends.aws.settings import AwsSettings, StackNames, check_name
from turnmill.backends.aws.templates import body_of, deployment_template, run_tags, run_template
from turnmill.errors import InvalidInput

SETTINGS = AwsSettings(name="team")
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
WITH_KEY = AwsSettings(name="team", kms_key=KEY)
CODE = CodeLocation(bucket="team-123456789012-us-east-1", key="lambda/0123.zip")
CALLERS = ("arn:aws:iam::123456789012:role/agents", "210987654321")


def external(settings: AwsSettings = SETTINGS) -> Json:
    return run_template(settings, "my-trainer", "my-trainer", 4, external=True, callers=CALLERS, code=CODE)


def of_type(template: Json, kind: str) -> dict[str, Json]:
    """The properties of the resources of one type, by their logical ids."""
    resources: dict[str, Json] = template["Resources"]
    return {name: each["Properties"] for name, each in resources.items() if each["Type"] == kind}


def statements_of(template: Json, role: str) -> dict[str, Json]:
    (policy,) = template["Resources"][role]["Properties"]["Policies"]
    return {statement["Sid"]: statement for statement in policy["PolicyDocument"]["Statement"]}


def test_the_bucket_is_versioned_encrypted_closed_and_forgets() -> None:
    (bucket,) = of_type(deployment_template(SETTINGS), "AWS::S3::Bucket").values()
    assert bucket["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(bucket["PublicAccessBlockConfiguration"].values()) == {True}
    assert len(bucket["PublicAccessBlockConfiguration"]) == 4
    rules = {rule["Id"]: rule for rule in bucket["LifecycleConfiguration"]["Rules"]}
    assert rules["incomplete-uploads"]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert rules["noncurrent-versions"]["NoncurrentVersionExpiration"] == {"NoncurrentDays": 30}
    (encryption,) = bucket["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert encryption["ServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}
    (keyed,) = of_type(deployment_template(WITH_KEY), "AWS::S3::Bucket").values()
    (encryption,) = keyed["BucketEncryption"]["ServerSideEncryptionConfiguration"]
    assert encryption["ServerSideEncryptionByDefault"] == {"SSEAlgorithm": "aws:kms", "KMSMasterKeyID": KEY}


def test_what_does_not_come_by_tls_is_denied() -> None:
    template = deployment_template(SETTINGS)
    for kind in ("AWS::S3::BucketPolicy", "AWS::SNS::TopicPolicy"):
        (policy,) = of_type(template, kind).values()
        denied = [each for each in policy["PolicyDocument"]["Statement"] if each["Effect"] == "Deny"]
        assert [each["Condition"] for each in denied] == [{"Bool": {"aws:SecureTransport": "false"}}]
    template = run_template(SETTINGS, "a-stack", "run", 3)
    (policy,) = of_type(template, "AWS::SQS::QueuePolicy").values()
    assert sorted(each["Ref"] for each in policy["Queues"]) == sorted(of_type(template, "AWS::SQS::Queue"))
    (denied,) = policy["PolicyDocument"]["Statement"]
    assert (denied["Effect"], denied["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})


def test_the_records_of_a_deployment_can_be_recovered_and_those_of_a_run_go_with_it() -> None:
    (deployments,) = of_type(deployment_template(SETTINGS), "AWS::DynamoDB::Table").values()
    assert deployments["PointInTimeRecoverySpecification"] == {"PointInTimeRecoveryEnabled": True}
    (runs,) = of_type(run_template(SETTINGS, "a-stack", "run", 1), "AWS::DynamoDB::Table").values()
    assert not runs.get("PointInTimeRecoverySpecification", {}).get("PointInTimeRecoveryEnabled")
    for table in (deployments, runs):
        assert table["BillingMode"] == "PAY_PER_REQUEST"
        assert [(key["AttributeName"], key["KeyType"]) for key in table["KeySchema"]] == [
            ("pk", "HASH"),
            ("sk", "RANGE"),
        ]


def test_each_queue_has_its_dead_letters_and_each_replica_its_queue() -> None:
    template = run_template(SETTINGS, "a-stack", "run", 3)
    queues = of_type(template, "AWS::SQS::Queue")
    assert len(queues) == 2 * len(queues_of_run(3, external=False)) == 12
    for name, queue in queues.items():
        assert queue["FifoQueue"] is True
        assert queue["DeduplicationScope"] == "messageGroup"
        assert queue["FifoThroughputLimit"] == "perMessageGroupId"
        if "DeadLetters" not in name:
            assert queue["RedrivePolicy"]["deadLetterTargetArn"]["Fn::GetAtt"] == [
                name.replace("Queue", "DeadLetters"), "Arn"
            ]  # fmt: skip
            assert queue["RedrivePolicy"]["maxReceiveCount"] == 20
            assert queue["VisibilityTimeout"] == 60
    assert template["Outputs"].keys() == {
        "RolloutQueueUrl", "RolloutFinishedQueueUrl", "RequestResponseQueueUrl", "TasksTableName"
    }  # fmt: skip


def test_an_external_trainer_finds_everything_among_the_outputs() -> None:
    template = external()
    assert template["Outputs"].keys() == {
        "RolloutQueueUrl", "RolloutFinishedQueueUrl", "RequestQueueUrl", "RequestResponseQueueUrl", "TasksTableName",
        "RolloutFunctionName", "RolloutFunctionArn", "ProxyFunctionName", "ProxyFunctionUrl",
    }  # fmt: skip
    # However many replicas it has.
    assert len(of_type(template, "AWS::SQS::Queue")) == 8
    names = {each["FunctionName"] for each in of_type(template, "AWS::Lambda::Function").values()}
    assert names == {f"my-trainer-SageMaker-{name}" for name in ("proxy", "rollout", "responses")}
    (source,) = of_type(template, "AWS::Lambda::EventSourceMapping").values()
    assert source["FunctionResponseTypes"] == ["ReportBatchItemFailures"]
    assert source["EventSourceArn"] == {"Fn::GetAtt": ["GenerateResponseQueue", "Arn"]}
    assert source["BatchSize"] == 10


def test_a_batch_of_answers_is_processed_before_its_messages_are_visible_again() -> None:
    template = external()
    timeout_s = template["Resources"]["ResponsesFunction"]["Properties"]["Timeout"]
    assert 6 * timeout_s <= template["Resources"]["GenerateResponseQueue"]["Properties"]["VisibilityTimeout"]


def test_the_url_of_the_proxy_asks_for_a_signature_and_for_both_permissions() -> None:
    template = external()
    (url,) = of_type(template, "AWS::Lambda::Url").values()
    assert url["AuthType"] == "AWS_IAM"
    permissions = of_type(template, "AWS::Lambda::Permission").values()
    assert sorted((each["Principal"], each["Action"]) for each in permissions) == sorted(
        (caller, action) for caller in CALLERS for action in ("lambda:InvokeFunction", "lambda:InvokeFunctionUrl")
    )
    assert not of_type(run_template(SETTINGS, "s", "run", 1, with_proxy=True, code=CODE), "AWS::Lambda::Permission")


@pytest.mark.parametrize("caller", ["*", "arn:aws:iam::*:role/agents", "lambda.amazonaws.com", "12345", ""])
def test_nobody_is_allowed_to_call_the_proxy_by_a_wildcard(caller: str) -> None:
    with pytest.raises(InvalidInput, match="name the ARN of a role or user, or the 12 digits of an account"):
        run_template(SETTINGS, "s", "run", 1, with_proxy=True, callers=[*CALLERS, caller], code=CODE)


def test_the_roles_of_a_stack_are_known_from_those_of_its_namesake_in_another_region() -> None:
    paths = [role["Path"] for role in of_type(external(), "AWS::IAM::Role").values()]
    assert paths == [{"Fn::Sub": "/turnmill/my-trainer/${AWS::Region}/"}] * 3


@pytest.mark.parametrize("settings", [SETTINGS, WITH_KEY], ids=["own-keys", "kms"])
def test_no_role_has_a_wildcard_but_below_what_belongs_to_the_run(settings: AwsSettings) -> None:
    template = external(settings)
    roles = of_type(template, "AWS::IAM::Role")
    assert set(roles) == {"ProxyRole", "RolloutRole", "ResponsesRole"}
    for role in roles:
        assert "ManagedPolicyArns" not in roles[role]
        for sid, statement in statements_of(template, role).items():
            assert "*" not in "".join(statement["Action"]), sid
            resource = json.dumps(statement["Resource"])
            # Objects of the run, and large records of runs; a log group's own ARN ends in the wildcard of its streams.
            assert "*" not in resource or "/runs/my-trainer/*" in resource or sid == "LargeRunRecord", sid
    assert ("Key" in statements_of(template, "ProxyRole")) is (settings.kms_key is not None)


def test_each_role_uses_the_queues_that_its_function_is_about() -> None:
    template = external()

    def queues(role: str, sid: str) -> list[str]:
        found = statements_of(template, role).get(sid, {"Resource": []})["Resource"]
        return sorted(each["Fn::GetAtt"][0] for each in found)

    assert queues("ProxyRole", "Send") == ["GenerateRequestQueue", "RolloutResponseQueue"]
    assert queues("ProxyRole", "Consume") == ["RolloutRequestQueue"]
    assert queues("RolloutRole", "Send") == ["RolloutRequestQueue"]
    assert queues("RolloutRole", "Consume") == []
    assert queues("ResponsesRole", "Send") == []
    assert queues("ResponsesRole", "Consume") == ["GenerateResponseQueue"]


def test_the_records_of_the_deployment_are_read_in_the_partition_of_runs_alone() -> None:
    for role in ("ProxyRole", "RolloutRole", "ResponsesRole"):
        statement = statements_of(external(), role)["RunRecord"]
        assert statement["Action"] == ["dynamodb:GetItem"]
        assert statement["Condition"] == {"ForAllValues:StringEquals": {"dynamodb:LeadingKeys": ["runs/all"]}}


def test_the_log_group_of_a_function_is_made_and_forgets_and_its_role_can_make_none() -> None:
    template = external()
    groups = of_type(template, "AWS::Logs::LogGroup")
    assert {group["RetentionInDays"] for group in groups.values()} == {30}
    for function in of_type(template, "AWS::Lambda::Function").values():
        (reference,) = function["LoggingConfig"]["LogGroup"].values()
        assert groups[reference]["LogGroupName"] == f"/aws/lambda/{function['FunctionName']}"
    for role in of_type(template, "AWS::IAM::Role"):
        assert statements_of(template, role)["Logs"]["Action"] == ["logs:CreateLogStream", "logs:PutLogEvents"]


def test_nothing_is_retained() -> None:
    for template in (deployment_template(SETTINGS), external()):
        for resource in template["Resources"].values():
            assert resource.get("DeletionPolicy", "Delete") == resource.get("UpdateReplacePolicy", "Delete") == "Delete"


def test_equal_arguments_give_equal_templates() -> None:
    assert body_of(external()) == body_of(external())
    assert body_of(deployment_template(SETTINGS)) == body_of(deployment_template(SETTINGS))


def test_a_template_that_is_too_large_is_refused_with_the_limit() -> None:
    body_of(run_template(SETTINGS, "x" * 32, "run", 200))
    with pytest.raises(InvalidInput, match="takes at most 500 in 1000000: use fewer generation replicas"):
        body_of(run_template(SETTINGS, "x" * 32, "run", 250))


@pytest.mark.parametrize(
    ("kind", "longest"), [("queue", 80), ("function", 64), ("table", 255), ("bucket", 63), ("topic", 256)]
)
def test_a_name_is_refused_with_the_limit_of_its_service(kind: str, longest: int) -> None:
    check_name(kind, "x" * longest)
    with pytest.raises(InvalidInput, match=f"has {longest + 1} characters; AWS allows [0-9]+ to {longest}"):
        check_name(kind, "x" * (longest + 1))
    with pytest.raises(InvalidInput, match="characters that AWS does not allow"):
        check_name(kind, "a name")


def test_names_that_a_service_keeps_for_itself_or_that_mean_more_are_refused() -> None:
    with pytest.raises(InvalidInput, match="S3 keeps for itself"):
        deployment_template(AwsSettings(name="xn--a"))
    with pytest.raises(InvalidInput, match="has 81 characters"):
        StackNames(stack="x" * 32).dead_letter_queue("generate_response-10000")
    for run_id in ("*", "a/b", "a?", "x" * 129, ""):
        with pytest.raises(InvalidInput, match="can't be used"):
            run_tags(SETTINGS, run_id)
        with pytest.raises(InvalidInput, match="can't be used"):
            run_template(SETTINGS, "a-stack", run_id, 1)


def test_the_longest_names_fit_everywhere() -> None:
    settings = AwsSettings(name="a" * 21)
    stack = settings.run_stack("a run with a long name" * 9)
    for template in (
        deployment_template(settings),
        run_template(settings, stack, "run", 9, with_proxy=True, code=CODE),
    ):
        body_of(template)
    assert len(settings.bucket("1" * 12, "ap-southeast-1")) <= 63


def test_a_linter_of_cloudformation_has_nothing_to_say(tmp_path: Path) -> None:
    linter = shutil.which("cfn-lint", path=str(Path(sys.executable).parent)) or shutil.which("cfn-lint")
    if linter is None:
        pytest.skip("cfn-lint is not installed: pip install cfn-lint")
    templates: dict[str, Any] = {
        "deployment": deployment_template(WITH_KEY),
        "deployment-own-keys": deployment_template(SETTINGS),
        "run": run_template(SETTINGS, "a-stack", "run", 2),
        "proxy": run_template(SETTINGS, "a-stack", "run", 2, with_proxy=True, code=CODE),
        "external": external(WITH_KEY),
    }
    paths = [tmp_path / f"{name}.json" for name in templates]
    for path, template in zip(paths, templates.values(), strict=True):
        path.write_text(json.dumps(template, indent=1))
    command = [linter, "--include-checks", "I", "--regions", "us-east-1", "--template", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
