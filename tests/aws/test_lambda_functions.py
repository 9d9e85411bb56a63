"""The functions of an external run, each called as AWS calls it: by invocation, by its URL, with a batch of a queue."""

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.aws import peer
from tests.aws.emulator import Emulator
from tests.aws.external_run import ExternalRun, begin_external_run
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.signing import RequestSigner
from turnmill.config import Config
from turnmill.conversation.client import RolloutApi
from turnmill.conversation.foreign import open_occurrence
from turnmill.conversation.http import HttpClient, Url
from turnmill.conversation.registry import hash_secret
from turnmill.errors import InvalidInput
from turnmill.ports import Write
from turnmill.records import Ask, AskedCall, Purpose, SampleState, Sampling, call_key, encode
from turnmill.wiring.event_loop import run_loop

TASK = {"prompt": "Guess the five-letter word.", "answer": "crane"}
CONFIG = Config(env="wordle", worker_lease_s=60.0)


@pytest.fixture(scope="module")
def external(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> ExternalRun:
    return begin_external_run(emulator, "functions", CONFIG, tmp_path_factory.mktemp("external"))


@pytest.fixture
def clients(external: ExternalRun) -> Iterator[AwsClients]:
    clients = AwsClients(external.settings)
    yield clients
    clients.close()


def signed(external: ExternalRun) -> HttpClient:
    return HttpClient(RequestSigner(region=external.settings.region))


# ---------------------------------------------------------------- rollout


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sample_id", 7),
        ("max_length", "many"),
        ("rewards", {"range": [1]}),
        ("data", None),
        ("version", "v9"),
        ("timestamp", "now"),
    ],
)
def test_a_request_that_can_not_be_played_is_refused_with_the_field_and_leaves_nothing(
    external: ExternalRun, field: str, value: object
) -> None:
    request = {**peer.rollout_request(f"refused-{field}_0", TASK), field: value}
    answer = peer.Trainer(external.place).ask(request)
    assert (answer["status"], answer["error"]["field"]) == ("refused", field)
    assert field in answer["error"]["message"]
    assert f"refused-{field}_0" not in external.samples()


@pytest.mark.parametrize("event", [[], "text", None, 7])
def test_what_is_no_request_at_all_is_refused(external: ExternalRun, event: Any) -> None:
    answer = peer.Trainer(external.place).ask(event)
    assert (answer["status"], answer["error"]["field"]) == ("refused", None)


def test_a_request_that_comes_again_while_it_is_played_is_the_same_rollout_and_unknown_fields_are_ignored(
    external: ExternalRun,
) -> None:
    trainer = peer.Trainer(external.place)
    request = peer.rollout_request("again_0", TASK) | {"run_id": "of-somebody-else", "purpose": "eval", "new": [1]}
    for _ in range(2):
        assert trainer.ask(request) == {"version": "v0", "status": "accepted", "sample_id": "again_0"}
    (sample,) = external.samples()["again_0"]
    assert (sample.run_id, sample.purpose, sample.state) == (
        external.run.run_id,
        Purpose.TRAIN,
        SampleState.REQUESTED,
    )


# ---------------------------------------------------------------- proxy


async def test_the_url_wants_a_signature_and_leases_lead_back_to_it(external: ExternalRun) -> None:
    trainer = peer.Trainer(external.place)
    await asyncio.to_thread(trainer.ask, peer.rollout_request("leased_0", TASK))
    async with HttpClient() as plain:
        status, _ = await plain.get(Url.parse(f"{external.proxy_url}/healthz"), {}, timeout_s=20)
        assert status == 403
    async with signed(external) as session:
        health = await session.get(Url.parse(f"{external.proxy_url}/healthz"), {}, timeout_s=20)
        assert health == (200, b'{"status":"ok"}')
        api = RolloutApi(session, external.proxy_url, external.worker_token)
        leases = await api.lease(worker="w", max_rollouts=10, wait_s=0)
        assert all(lease.base_url.startswith(f"{external.proxy_url}/a/") for lease in leases)
        assert "leased_0" in [lease.request.sample_id for lease in leases]
        with pytest.raises(InvalidInput, match="unknown worker token"):
            await RolloutApi(session, external.proxy_url, "of-nobody").lease(worker="w", max_rollouts=1, wait_s=0)


async def test_a_body_that_comes_in_base64_and_a_path_that_is_encoded_are_read(external: ExternalRun) -> None:
    async with signed(external) as session:
        url = Url.parse(f"{external.proxy_url}/v1/rollouts%2Fheartbeat")
        body = json.dumps({"worker": "w", "lease_tokens": []}).encode()
        # Lambda passes on as it is only what it takes for text.
        headers = {"Content-Type": "application/octet-stream", "Authorization": f"Bearer {external.worker_token}"}
        assert await session.post(url, body, headers, timeout_s=20) == (200, b'{"lost":[]}')


def test_the_proxy_of_a_run_without_a_record_says_so(emulator: Emulator, tmp_path_factory: Any) -> None:
    external = begin_external_run(emulator, "recordless", CONFIG, tmp_path_factory.mktemp("recordless"))
    run_loop(external.ports().runs.write([Write(key=external.run.key, value=None, expected=None)]))

    async def ask() -> tuple[int, bytes]:
        async with signed(external) as session:
            return await session.get(Url.parse(f"{external.proxy_url}/healthz"), {}, timeout_s=20)

    status, body = run_loop(ask())
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")
    assert external.run.run_id in json.loads(body)["error"]["message"]


def test_the_functions_of_a_run_that_was_cancelled_say_so(emulator: Emulator, tmp_path_factory: Any) -> None:
    root = tmp_path_factory.mktemp("cancelled")
    external = begin_external_run(emulator, "cancelled", CONFIG, root)
    external.write_backend_json()
    command = [sys.executable, "-m", "turnmill", "cancel", external.run.run_id, "--root", str(root)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    refused = peer.Trainer(external.place).ask(peer.rollout_request("late_0", TASK))
    assert (refused["status"], refused["error"]["message"]) == ("refused", "run cancelled-run has ended: cancelled")

    async def lease() -> None:
        async with signed(external) as session:
            await RolloutApi(session, external.proxy_url, external.worker_token).lease(
                worker="w", max_rollouts=1, wait_s=0
            )

    with pytest.raises(InvalidInput, match="has ended: cancelled"):
        run_loop(lease())


def test_an_instance_learns_of_another_worker_token(external: ExternalRun) -> None:
    code = (
        "import types, sys\n"
        "from turnmill.backends.aws.lambdas.boot import Instance\n"
        "made = []\n"
        "def make(opened):\n"
        "    made.append(opened)\n"
        "    return opened\n"
        "async def work(opened): return opened.run.worker_token_hash\n"
        "context = types.SimpleNamespace(aws_request_id='r', invoked_function_arn='arn:aws:lambda:r:000000000000:f')\n"
        "instance = Instance('proxy', make, renew_s=0.0)\n"
        "for _ in range(2): instance.run(context, work)\n"
        "print(instance.run(context, work), len(made), flush=True)\n"
        "sys.stdin.readline()\n"
        "print(instance.run(context, work), len(made), flush=True)\n"
    )
    environ = {"TURNMILL_DEPLOYMENT": external.settings.name, "TURNMILL_RUN": external.run.run_id}
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        # Made once, as long as the record is the same.
        assert child.stdout.readline().split() == [external.run.worker_token_hash, "1"]
        other = replace(external.run, worker_token_hash=hash_secret("another"))
        _record(external, other)
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline().split() == [other.worker_token_hash, "2"]
        _record(external, external.run)


def _record(external: ExternalRun, run: Any) -> None:
    run_loop(external.ports().runs.write([Write(key=run.key, value=encode(run), expected=None)]))


# ---------------------------------------------------------------- responses


def test_what_can_not_be_recorded_comes_again_with_all_that_is_behind_it_in_its_group(
    external: ExternalRun, clients: AwsClients
) -> None:
    # An ask that goes on from a call which is not there can't be answered.
    damaged, other = _asked(external, "damaged_0", parent="damaged_0_77"), _asked(external, "other_0", parent=None)
    batch = [
        _message("1", "a", "{no json"),
        _message("2", "a", _answer(damaged)),
        _message("3", "b", _answer(other)),
        _message("4", "a", _answer(other)),
        _message("5", "b", _answer(other)),
    ]
    answer = clients.call_now(
        "lambda",
        "invoke",
        FunctionName=external.names.function("responses"),
        Payload=json.dumps({"Records": batch}).encode(),
    )
    failures = json.loads(answer["Payload"].read())["batchItemFailures"]
    assert [failure["itemIdentifier"] for failure in failures] == ["2", "4"]
    (recorded,) = run_loop(external.ports().records.get(other.call_keys))
    assert recorded is not None


def _asked(external: ExternalRun, sample_id: str, *, parent: str | None) -> Ask:
    """A call of the sample that waits for its answer."""

    async def ask() -> Ask:
        ports = external.ports()
        sample = await open_occurrence(ports, external.run, external.config, peer.rollout_request(sample_id, TASK))
        asked = Ask(
            run_id=sample.run_id,
            purpose=sample.purpose,
            sample_id=sample.sample_id,
            index=0,
            attempt=1,
            calls=(AskedCall(call_id=f"{sample.sample_id}_0", step_id=f"{sample_id}_0"),),
            parent=parent,
            messages=[{"role": "user", "content": "Guess."}],
            sampling=Sampling(),
            request_digest="d",
            identity="i",
            idempotency_key=None,
            nonce="n",
            created_at=0.0,
        )
        assert asked.call_keys == [call_key(sample.run_id, sample.purpose, sample.sample_id, asked.step_id)]
        await ports.records.write([Write(key=asked.key, value=encode(asked), expected=0)])
        return asked

    return run_loop(ask())


def _answer(ask: Ask) -> str:
    choice = {
        "message": {"content": "crane"},
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "token_id:7", "logprob": -0.5}]},
    }
    return json.dumps(
        {
            "version": "v0",
            "sample_id": ask.sample_id,
            "step_id": ask.step_id,
            "data": {"choices": [choice], "serving_model_num": 1},
            "finish_reason": "stop",
        }
    )


def _message(number: str, group: str, body: str) -> dict[str, Any]:
    """As Lambda hands a message of a FIFO queue over."""
    group_id = base64.b32encode(group.encode()).decode()
    return {"messageId": number, "body": body, "attributes": {"MessageGroupId": group_id}, "eventSource": "aws:sqs"}
