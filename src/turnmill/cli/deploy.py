"""`turnmill deploy`: what all runs of a deployment on AWS share is made, or with --delete removed."""

import importlib.util
import json

import click
from rich.console import Console

from turnmill.cli.show import json_option
from turnmill.cli.view import PlainConsole, confirm, say
from turnmill.errors import InvalidInput
from turnmill.wiring.event_loop import run_loop


@click.command(short_help="Make, or remove, what a deployment on AWS consists of.")
@click.option("--name", default="turnmill", show_default=True, help="Of the deployment; what it has is named after it.")
@click.option("--region", help="AWS region. [default: AWS_REGION, or the shared configuration files]")
@click.option(
    "--kms-key",
    metavar="ARN",
    help="KMS key that the bucket encrypts with. [default: the one it has, else S3's own keys]",
)
@click.option("--delete", "is_delete", is_flag=True, help="Remove it, and everything that is stored there.")
@click.option("--yes", is_flag=True, help="Don't ask before removing it.")
@json_option("Print one object: the name and what there is. Progress goes to standard error.")
def deploy(name: str, region: str | None, kms_key: str | None, is_delete: bool, yes: bool, as_json: bool) -> None:
    """Make what the runs of a deployment on AWS share: a bucket, a table of records, a topic of alerts, a log group.

    Idempotent: what is as it should be stays as it is, cut short the same command completes it. While no run goes on,
    nothing is paid for but what is stored. Queues, and a table of its own, come and go with each run.
    """
    console = PlainConsole(stderr=as_json)
    outputs = _delete(name, region, yes, console) if is_delete else _deploy(name, region, kms_key, console)
    if as_json:
        click.echo(json.dumps({"name": name, "deleted": is_delete, "outputs": outputs}))


def _deploy(name: str, region: str | None, kms_key: str | None, console: Console) -> dict[str, str]:
    require_extra()
    from turnmill.backends.aws.clients import AwsClients
    from turnmill.backends.aws.deployment import deploy_deployment
    from turnmill.backends.aws.settings import AwsSettings

    settings = AwsSettings(name=name, region=region, kms_key=kms_key)
    clients = AwsClients(settings)
    try:
        # Whose account it is, the services say when something is made.
        bucket = settings.bucket("account", clients.region).replace("-account-", "-<account>-")
        say(console, f"deployment {name} in {clients.region}: what is not there yet is made, the rest stays")
        say(
            console,
            f"  bucket {bucket}, table {settings.table}, topic {settings.topic}, log group {settings.log_group}",
        )
        say(console, "  it costs nothing while no run goes on, but for what is stored")
        outputs = run_loop(deploy_deployment(clients, settings, lambda text: say(console, text)))
    finally:
        clients.close()
    say(console, "it is there:")
    for what, output in (
        ("bucket", "BucketName"),
        ("records", "RecordsTableName"),
        ("alerts", "AlertTopicArn"),
        ("metrics", "MetricsLogGroupName"),
    ):
        say(console, f"  {what}: {outputs[output]}")
    return outputs


def _delete(name: str, region: str | None, yes: bool, console: Console) -> dict[str, str]:
    require_extra()
    from turnmill.backends.aws.clients import AwsClients
    from turnmill.backends.aws.deployment import delete_deployment
    from turnmill.backends.aws.settings import AwsSettings

    settings = AwsSettings(name=name, region=region)
    clients = AwsClients(settings)
    try:
        if not yes:
            what = f"the deployment {name} in {clients.region}"
            confirm(what, f"Remove {what} with all data, models and records in it?")
        run_loop(delete_deployment(clients, settings, lambda text: say(console, text)))
    finally:
        clients.close()
    say(console, f"nothing is left of the deployment {name}")
    return {}


def require_extra() -> None:
    """The SDK is loaded by the commands that need it alone, and installed only for whom it is of use."""
    if any(importlib.util.find_spec(module) is None for module in ("anyio", "boto3")):
        raise InvalidInput("AWS can't be used: its SDK is not installed; pip install 'turnmill[aws]'")
