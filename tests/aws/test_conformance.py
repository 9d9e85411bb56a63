"""A foreign trainer and generator, which know the documented messages only, against an external run on the emulator."""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tests.aws import peer
from tests.aws.emulator import Emulator, running_emulator
from tests.aws.external_run import ExternalRun, begin_external_run
from tests.aws.service_proxy import RunningProxy, running_proxy
from turnmill import assets
from turnmill.backends.aws.clients import AwsClients
from turnmill.config import Config
from turnmill.records import InvalidReason, SampleRecord, SampleState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_SAMPLES = 64
PATIENCE_S = 120.0
CONFIG = Config(
    env="wordle",
    # Each request under way has an instance of the function, a process that takes a second to begin.
    max_concurrent_rollouts=6,
    # Long enough for a busy machine: a heartbeat that is late is a worker that died.
    worker_lease_s=8.0,
    call_timeout_s=30.0,
    training_timeout=90.0,
    max_attempts=3,
)
Figure = Any


@pytest.fixture(scope="module")
def counter(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """Stands before the proxy's function URL, and before the services that the functions use, and counts."""
    with running_proxy(emulator.url, tmp_path_factory.mktemp("counter")) as running:
        yield running


@pytest.fixture(scope="module")
def external(emulator: Emulator, counter: RunningProxy, tmp_path_factory: pytest.TempPathFactory) -> ExternalRun:
    return begin_external_run(emulator, "conformance", CONFIG, tmp_path_factory.mktemp("external"), front=counter.url)


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, Any]]:
    """The metadata of the shipped Wordle tasks."""
    return [json.loads(line)["metadata"] for line in assets.wordle_data("train").read_text().splitlines()]


@pytest.fixture(scope="module")
def words(tasks: list[dict[str, Any]]) -> list[str]:
    return [task["answer"] for task in tasks]


def test_rollouts_reach_their_reward_although_a_worker_is_killed_and_asked_for_twice_are_played_twice(
    external: ExternalRun,
    counter: RunningProxy,
    tasks: list[dict[str, Any]],
    words: list[str],
    record_property: Figure,
) -> None:
    asked = {f"wordle-{index:03d}_0": tasks[index] for index in range(NUM_SAMPLES)}
    trainer = peer.Trainer(external.place)
    generator = peer.Generator(place=external.place, words=words, serving_model_num=7, think_s=0.2, repeat_every=9)
    began, before = time.monotonic(), counter.counts().requests
    with generator, external.worker("worker-a") as killed, external.worker("worker-b"):
        for sample_id, task in asked.items():
            _accepted(trainer.ask(peer.rollout_request(sample_id, task)), sample_id)
        assert trainer.collect(lambda: len(trainer.responses) >= NUM_SAMPLES // 4, patience_s=PATIENCE_S)
        killed.kill()
        killed.wait()
        assert trainer.collect(lambda: len(trainer.responses) == NUM_SAMPLES, patience_s=PATIENCE_S), _missing(external)
        took_s = time.monotonic() - began
        first = external.samples()
        turns = sum(len(external.calls(sample)) for samples in first.values() for sample in samples)
        time.sleep(1.5)  # the counter writes once a second
        url, services = _num_requests(counter.counts().requests - before)
        _check_occurrence(external, trainer, asked, index=0)
        rewards = {sample_id: responses[0] for sample_id, responses in trainer.responses.items()}

        trainer.responses.clear()
        for sample_id, task in asked.items():
            _accepted(trainer.ask(peer.rollout_request(sample_id, task)), sample_id)
        assert trainer.collect(lambda: len(trainer.responses) == NUM_SAMPLES, patience_s=PATIENCE_S), _missing(external)
        _check_occurrence(external, trainer, asked, index=1)
    assert not generator.errors and not generator.broken
    samples = external.samples()
    assert sum(map(len, samples.values())) == 2 * NUM_SAMPLES
    assert {sample.state for group in samples.values() for sample in group} == {SampleState.REPORTED}
    num_again = sum(sample.attempt > 1 for group in first.values() for sample in group)
    assert num_again >= 1, "the killed worker held no rollout"
    scores = {response["rewards"]["aggregate_score"] for response in rewards.values()}
    assert scores == {0.0, 1.0}
    record_property(
        "figure",
        f"64 Wordle conversations through the Lambda functions, one of two workers killed: {took_s:.1f} s "
        f"({NUM_SAMPLES / took_s:.1f} a second), {turns} turns, {num_again} rollouts played again, "
        f"a turn {url / turns:.1f} requests to the function URL, {services / turns:.1f} of the functions to services; "
        f"load {os.getloadavg()[0]:.0f}",
    )


def test_answers_that_are_malformed_late_or_come_twice_are_survived(
    external: ExternalRun, tasks: list[dict[str, Any]], words: list[str]
) -> None:
    asked = {f"malformed-{index:03d}_0": tasks[index] for index in range(16)}
    trainer = peer.Trainer(external.place)
    generator = peer.Generator(place=external.place, words=words, malform_every=2, repeat_every=1)
    spoiled = set(list(asked)[::4])
    generator.spoiled |= spoiled
    with generator, external.worker("worker-c"):
        for sample_id, task in asked.items():
            _accepted(trainer.ask(peer.rollout_request(sample_id, task)), sample_id)
        assert trainer.collect(lambda: len(trainer.responses) == len(asked), patience_s=PATIENCE_S), _missing(external)
        _check_occurrence(external, trainer, asked, index=0)
    assert not generator.errors and not generator.broken
    samples = external.samples()
    # An answer that can't be used is a failure of the generation: the sample is played again.
    assert {sample_id for sample_id in asked if samples[sample_id][0].attempt > 1} == spoiled


def test_functions_and_containers_serve_a_run_side_by_side(
    external: ExternalRun, tasks: list[dict[str, Any]], words: list[str]
) -> None:
    asked = {f"beside-{index:03d}_0": tasks[index] for index in range(16)}
    trainer = peer.Trainer(external.place)
    with (
        peer.Generator(place=external.place, words=words) as generator,
        external.container("proxy-0") as url,
        external.worker("worker-e", proxy_url=url),
        external.worker("worker-f"),
    ):
        for sample_id, task in asked.items():
            _accepted(trainer.ask(peer.rollout_request(sample_id, task)), sample_id)
        assert trainer.collect(lambda: len(trainer.responses) == len(asked), patience_s=PATIENCE_S), _missing(external)
        _check_occurrence(external, trainer, asked, index=0)
    assert not generator.errors and not generator.broken
    assert "GET" not in external.log_of("proxy-0")


def test_a_rollout_that_always_fails_ends_at_the_low_end_with_its_reason_and_somebody_is_told(
    external: ExternalRun, words: list[str]
) -> None:
    alerts = _subscribed(external)
    trainer = peer.Trainer(external.place)
    broken = {"prompt": "Guess the five-letter word.", "answer": "no word at all"}
    ids = ["failing-0_0", "failing-1_0"]
    with peer.Generator(place=external.place, words=words), external.worker("worker-d"):
        for sample_id in ids:
            request = peer.rollout_request(sample_id, broken)
            request["rewards"] = {"range": [-1.0, 1.0]}
            _accepted(trainer.ask(request), sample_id)
        assert trainer.collect(lambda: len(trainer.responses) == len(ids), patience_s=PATIENCE_S), _missing(external)
    for sample_id in ids:
        for response in trainer.responses[sample_id]:
            assert (response["stop_reason"], response["rewards"]) == ("env_error", {"aggregate_score": -1.0})
        (sample,) = external.samples()[sample_id]
        assert (sample.state, sample.reason) == (SampleState.INVALID, InvalidReason.ENV_ERROR)
        assert (sample.attempt, sample.reward) == (CONFIG.max_attempts, None)
    told = alerts()
    # The second one is counted, not sent.
    assert [(alert["alert"]["kind"], alert["alert"]["run_id"]) for alert in told] == [
        ("rollout_failed", external.run.run_id)
    ]
    assert "env_error" in told[0]["alert"]["summary"] and "given up after 3 attempts" in told[0]["alert"]["summary"]


def test_what_the_functions_log_is_json_with_run_and_role_and_holds_no_secret(external: ExternalRun) -> None:
    lines = [json.loads(line) for line in external.function_logs().splitlines() if line.startswith("{")]
    ours = [line for line in lines if line.get("run") == external.run.run_id]
    assert {line["role"] for line in ours} >= {"proxy", "rollout", "responses"}
    paths = [line["message"] for line in ours if "/v1/chat/completions" in line["message"]]
    assert paths and all("/a/***/v1" in path for path in paths)
    assert external.worker_token not in external.function_logs()


def test_the_roles_of_the_functions_allow_all_that_they_do(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    tasks: list[dict[str, Any]],
    words: list[str],
) -> None:
    asked = {f"strict-{index:03d}_0": tasks[index] for index in range(6)}
    broken = {"prompt": "Guess the five-letter word.", "answer": "no word at all"}
    with running_emulator(tmp_path_factory.mktemp("strict"), {"AUTH": "true"}) as strict:
        for name, value in strict.environ.items():
            monkeypatch.setenv(name, value)
        external = begin_external_run(strict, "strict", CONFIG, tmp_path_factory.mktemp("strict-run"))
        _fit_policies(external)
        alerts, trainer = _subscribed(external), peer.Trainer(external.place)
        with peer.Generator(place=external.place, words=words), external.worker("worker-g"):
            for sample_id, task in [*asked.items(), ("strict-broken_0", broken)]:
                _accepted(trainer.ask(peer.rollout_request(sample_id, task)), sample_id)
            assert trainer.collect(lambda: len(trainer.responses) == len(asked) + 1, patience_s=PATIENCE_S), _missing(
                external
            )
            _check_occurrence(external, trainer, asked, index=0)
        assert [alert["alert"]["kind"] for alert in alerts()] == ["rollout_failed"]
        assert "AccessDenied" not in external.function_logs()


# ---------------------------------------------------------------- what is checked


def _accepted(answer: Any, sample_id: str) -> None:
    assert (answer["status"], answer["sample_id"]) == ("accepted", sample_id), answer


def _check_occurrence(
    external: ExternalRun, trainer: peer.Trainer, asked: dict[str, dict[str, Any]], *, index: int
) -> None:
    """Each sample was told once, or the same twice, and its reward is what the recorded conversation earns."""
    samples = external.samples()
    for sample_id, task in asked.items():
        sample = samples[sample_id][index]
        answers = trainer.responses[sample_id]
        assert all(answer == answers[0] for answer in answers), answers
        assert answers[0]["rewards"]["aggregate_score"] == sample.reward == _earned(external, sample, task["answer"])


def _earned(external: ExternalRun, sample: SampleRecord, answer: str) -> float:
    """By the rules of the game: the word was said within six turns, each of which was told what it is worth."""
    calls = external.calls(sample)
    said = [str(call.reply["content"]) for call in calls]
    assert 1 <= len(said) <= 6 and answer not in said[:-1]
    for word, told in zip(said, calls[1:], strict=False):
        marks = peer.marks(word, answer)
        content = " ".join(letter + mark for letter, mark in zip(word, marks, strict=True))
        assert told.messages == [{"role": "user", "content": content}]
    for call in calls:
        assert call.token_ids == [*map(ord, str(call.reply["content"])), 0]
        assert len(call.logprobs) == len(call.token_ids)
    return 1.0 if said[-1] == answer else 0.0


def _fit_policies(external: ExternalRun) -> None:
    """To what the emulator does otherwise than AWS.

    On AWS the right to send a message is the right to send ten; the emulator asks for one of another name. And it
    speaks plain HTTP, which topic and queues refuse.
    """
    clients = AwsClients(external.settings)
    stack = {"StackName": external.names.stack}
    template = clients.call_now("cloudformation", "get_template", **stack)["TemplateBody"]
    del template["Resources"]["QueuesPolicy"]
    body = {"TemplateBody": json.dumps(template), "Capabilities": ["CAPABILITY_IAM"]}
    clients.call_now("cloudformation", "update_stack", **stack, **body)
    actions = [f"sqs:{action}Batch" for action in ("ChangeMessageVisibility", "DeleteMessage", "SendMessage")]
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    for role in clients.call_now("iam", "list_roles", PathPrefix=external.names.role_path)["Roles"]:
        name = role["RoleName"]
        clients.call_now("iam", "put_role_policy", RoleName=name, PolicyName="batches", PolicyDocument=document)
    topic = clients.call_now("sns", "create_topic", Name=external.settings.topic)["TopicArn"]
    policy = json.loads(clients.call_now("sns", "get_topic_attributes", TopicArn=topic)["Attributes"]["Policy"])
    policy["Statement"] = [each for each in policy["Statement"] if each["Sid"] != "TlsOnly"]
    clients.call_now(
        "sns", "set_topic_attributes", TopicArn=topic, AttributeName="Policy", AttributeValue=json.dumps(policy)
    )
    clients.close()


def _missing(external: ExternalRun) -> str:
    states = {
        f"{sample_id}: {sample.state}/{sample.attempt} {sample.detail or ''}"
        for sample_id, group in external.samples().items()
        for sample in group
        if sample.state is not SampleState.REPORTED
    }
    return f"not all rollouts ended: {sorted(states)}"


def _num_requests(counted: Counter[str]) -> tuple[int, int]:
    """To the function URL, and all others."""
    url = sum(count for name, count in counted.items() if "/_aws/lambda-url/" in name)
    return url, counted.total() - url


def _subscribed(external: ExternalRun) -> Any:
    """A queue behind the topic of alerts, and what it got so far."""
    clients = AwsClients(external.settings)
    topic = clients.call_now("sns", "create_topic", Name=external.settings.topic)["TopicArn"]
    url = clients.call_now("sqs", "create_queue", QueueName=f"{external.settings.name}-told")["QueueUrl"]
    arn = clients.call_now("sqs", "get_queue_attributes", QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]
    principal = {"Service": "sns.amazonaws.com"}
    statement = {"Effect": "Allow", "Principal": principal, "Action": "sqs:SendMessage", "Resource": arn["QueueArn"]}
    policy = {"Policy": json.dumps({"Version": "2012-10-17", "Statement": [statement]})}
    clients.call_now("sqs", "set_queue_attributes", QueueUrl=url, Attributes=policy)
    attributes = {"RawMessageDelivery": "true"}
    clients.call_now(
        "sns", "subscribe", TopicArn=topic, Protocol="sqs", Endpoint=arn["QueueArn"], Attributes=attributes
    )

    def told() -> list[dict[str, Any]]:
        sqs, found = external.place.client("sqs"), []
        while messages := peer.receive(sqs, url):
            found += messages
        clients.close()
        return found

    return told
