"""A proxy whose backend refuses it: that is nobody's fault who asks."""

import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from tests.aws.emulator import REGION, Emulator
from tests.aws.scripted_proxy import refuse, scripted_proxy
from tests.contracts.aws_queue import make_queue, open_queue
from tests.unit.conversation.conftest import open_world
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.settings import AwsSettings
from turnmill.errors import BackendUnavailable


async def test_a_right_that_is_missing_ends_the_serving_and_is_not_blamed_on_the_client(
    tmp_path: Path, clients: AwsClients, emulator: Emulator
) -> None:
    name = f"refused-{secrets.token_hex(4)}"
    make_queue(clients, name)
    with scripted_proxy(emulator.url) as between:
        between.acts["SendMessageBatch"] = [refuse(400, "AccessDeniedException")]
        refused = AwsClients(AwsSettings(region=REGION, endpoint_url=between.url))
        async with open_world(tmp_path) as world:
            rollout = await world.begin()
            ports = replace(world.ports, rollout_response=open_queue(refused, name))
            async with replace(world, ports=ports).restarted() as second:
                assert (await second.report(rollout)).status == 503
                with pytest.raises(BackendUnavailable, match="AccessDenied"):
                    second.sessions.check()
                assert (await second.lease(wait_s=20)).status == 503
        refused.close()


async def test_a_queue_that_was_deleted_ends_the_serving_and_is_not_taken_for_an_unknown_step(
    tmp_path: Path, clients: AwsClients
) -> None:
    gone = open_queue(clients, f"deleted-{secrets.token_hex(4)}")
    async with open_world(tmp_path) as world:
        rollout = await world.begin()
        ports = replace(world.ports, rollout_response=gone)
        async with replace(world, ports=ports).restarted() as second:
            assert (await second.report(rollout)).status == 503
            with pytest.raises(BackendUnavailable, match="does not exist"):
                second.sessions.check()
