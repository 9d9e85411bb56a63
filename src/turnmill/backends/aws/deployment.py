"""A deployment on AWS as a whole: what all its runs share, made once and removed after the last of them.

settings -> the stack of the deployment: bucket, records, alert topic, log group of metrics
"""

from collections.abc import Callable
from dataclasses import replace

from turnmill.backends.aws import stacks
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.settings import AwsSettings
from turnmill.backends.aws.templates import deployment_tags, deployment_template
from turnmill.errors import Conflict, InvalidInput, NotFound


async def deploy_deployment(clients: AwsClients, settings: AwsSettings, tell: Callable[[str], None]) -> dict[str, str]:
    """Make it what the settings say; the outputs of its stack. Idempotent; raises as `stacks.deploy`.

    Settings without a KMS key leave the bucket the one that it has: nobody who repeats a command means to drop it.
    """
    if settings.kms_key is None and (key := await key_of(clients, settings)) is not None:
        tell(f"the bucket goes on encrypting with {key}")
        settings = replace(settings, kms_key=key)
    template = deployment_template(settings)
    return await stacks.deploy(clients, settings.name, template, deployment_tags(settings), tell=tell)


async def delete_deployment(clients: AwsClients, settings: AwsSettings, tell: Callable[[str], None]) -> None:
    """Remove it with all that is stored there. Idempotent; raises as `stacks.delete`.

    Raises `Conflict` naming the runs that it still has: their stacks need it.
    """
    runs = await runs_of(clients, settings)
    if runs:
        raise Conflict(
            f"the deployment {settings.name} still has what these runs stand on: {', '.join(runs)} "
            "(`turnmill cleanup RUN` removes it)"
        )
    await stacks.delete(clients, settings.name, deployment_tags(settings), tell=tell)


async def runs_of(clients: AwsClients, settings: AwsSettings) -> list[str]:
    """The ids of the runs that have a stack."""
    found = await stacks.find_tagged(clients, deployment_tags(settings))
    return [stack.tags["turnmill:run"] for stack in found if "turnmill:run" in stack.tags]


async def bucket_of(clients: AwsClients, settings: AwsSettings) -> str:
    """The deployment's bucket; raises `InvalidInput` where there is no deployment of that name."""
    try:
        return (await stacks.outputs(clients, settings.name))["BucketName"]
    except (NotFound, KeyError) as error:
        raise InvalidInput(
            f"there is no deployment {settings.name!r} in {clients.region}: `turnmill deploy --name {settings.name}` "
            "makes it"
        ) from error


async def key_of(clients: AwsClients, settings: AwsSettings) -> str | None:
    """The KMS key that the bucket encrypts with; None where the keys are S3's, or there is no such deployment."""
    stack = await stacks.find(clients, settings.name)
    return stack.outputs.get("BucketKmsKey") if stack is not None else None
