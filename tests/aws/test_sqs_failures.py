"""Queues on SQS when it fails: lost answers, batches that fail in part, what is refused."""

from collections.abc import Callable, Coroutine

import pytest

from tests.aws.scripted_proxy import fail_entries, lose, pass_on, refuse
from tests.aws.sqs_messages import OpenProxied, bodies, message
from tests.contracts.aws_queue import BUCKET, PREFIX, open_queue
from turnmill.backends.aws.clients import AwsClients
from turnmill.backends.aws.queue import SqsQueue
from turnmill.backends.aws.queue_bodies import Overflow
from turnmill.backends.aws.settings import AwsSettings
from turnmill.errors import BackendUnavailable, InvalidInput, NotFound


async def test_entries_of_a_batch_that_fail_are_sent_again_in_the_order_of_their_group(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [
        fail_entries(0),
        fail_entries(0, code="ThrottlingException", is_senders_fault=True),
    ]
    await queue.send([message("a1", "a"), message("b1", "b"), message("a2", "a")])
    assert proxy.counts["SendMessageBatch"] == 4
    taken = bodies(await queue.take(max_messages=10))
    assert taken.index("a1") < taken.index("a2") and sorted(taken) == ["a1", "a2", "b1"]


async def test_an_entry_that_is_refused_for_what_it_is_is_not_tried_again(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [fail_entries(0, code="InvalidMessageContents", is_senders_fault=True)]
    with pytest.raises(InvalidInput, match="InvalidMessageContents"):
        await queue.send([message("a"), message("b")])
    assert proxy.counts["SendMessageBatch"] == 1


async def test_entries_that_keep_failing_are_unavailability(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    proxy.acts["ChangeMessageVisibilityBatch"] = [fail_entries(0)] * 6
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30)
    with pytest.raises(BackendUnavailable, match=r"1 entries of sqs-.*InternalError"):
        await queue.extend([leased.receipt], 30)


async def test_a_send_whose_answer_is_lost_sends_once(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    proxy.acts["SendMessageBatch"] = [lose]
    await queue.send([message("a"), message("b", dedup_id="b")])
    assert proxy.counts["SendMessageBatch"] == 2
    assert bodies(await queue.take(max_messages=10)) == ["a", "b"]


async def test_a_receive_whose_answer_is_lost_is_repeated_by_the_same_attempt(
    proxied: OpenProxied,
) -> None:
    """SQS gives the same messages to it; the emulator does not know attempts, and leaves them hidden."""
    proxy, queue = proxied()
    await queue.send([message("a")])
    proxy.acts["ReceiveMessage"] = [lose]
    await queue.lease(max_messages=1, lease_s=1)
    first, second = proxy.of("ReceiveMessage")
    assert first["ReceiveRequestAttemptId"] == second["ReceiveRequestAttemptId"]
    [leased] = await queue.lease(max_messages=1, lease_s=1, wait_s=5)
    assert proxy.of("ReceiveMessage")[-1]["ReceiveRequestAttemptId"] != first["ReceiveRequestAttemptId"]
    assert leased.num_receives == 2


async def test_what_sqs_does_not_allow_is_said_with_the_name_of_the_queue(
    proxied: OpenProxied, queue_name: str
) -> None:
    proxy, queue = proxied()
    proxy.acts["GetQueueUrl"] = [refuse(403, "AccessDeniedException")]
    with pytest.raises(InvalidInput, match=f"check queue {queue_name}.fifo"):
        await queue.counts()
    proxy.acts["ReceiveMessage"] = [refuse(403, "InvalidSecurity")]
    with pytest.raises(InvalidInput, match="what the credentials in use may do"):
        await queue.lease(max_messages=1, lease_s=30)
    with pytest.raises(InvalidInput, match="check the bucket"):
        Overflow(AwsClients(AwsSettings(region="us-east-1")), "absent", PREFIX).put(b"x")


async def test_an_ack_whose_answer_is_lost_removes(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    await queue.send([message("a")])
    [leased] = await queue.lease(max_messages=1, lease_s=30)
    proxy.acts["DeleteMessageBatch"] = [lose]
    await queue.ack([leased.receipt])
    assert (await queue.counts()).num_held == 0


async def test_a_later_receive_that_fails_costs_nothing_that_came_before(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied(max_tries=1)
    await queue.send([message(str(number)) for number in range(15)])

    proxy.acts["ReceiveMessage"] = [pass_on, refuse(500, "InternalFailure")]
    assert len(await queue.lease(max_messages=15, lease_s=30)) == 10
    proxy.acts["ReceiveMessage"] = [refuse(500, "InternalFailure")]
    with pytest.raises(BackendUnavailable):
        await queue.take(max_messages=5)
    proxy.acts["DeleteMessageBatch"] = [refuse(500, "InternalFailure")]
    assert len(await queue.take(max_messages=10)) == 5
    assert (await queue.counts()).num_held == 15


async def test_bodies_that_cannot_be_fetched_now_are_there_later(
    queue: SqsQueue, clients: AwsClients, queue_name: str
) -> None:
    no_s3 = AwsClients(AwsSettings(region="us-east-1", endpoint_url="http://127.0.0.1:9"), max_tries=1)
    cut_off = SqsQueue(
        clients, f"{queue_name}.fifo", f"{queue_name}-dead.fifo", overflow=Overflow(no_s3, BUCKET, PREFIX)
    )
    await queue.send([message("small"), message(b"x" * 300_000, "large")])
    with pytest.raises(BackendUnavailable, match="s3 get_object"):
        await cut_off.lease(max_messages=10, lease_s=1000)
    assert [len(item.body) for item in await queue.take(max_messages=10)] == [5, 300_000]


async def test_a_redrive_that_is_cut_off_and_begun_again_delivers_once(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied(max_tries=1)
    await queue.send([message("a", dedup_id="a")])
    for _ in range(3):
        await queue.release([item.receipt for item in await queue.lease(max_messages=1, lease_s=30)])
    proxy.acts["DeleteMessageBatch"] = [refuse(500, "InternalFailure")]
    with pytest.raises(BackendUnavailable):
        await queue.redrive()
    assert len(await queue.dead_letters()) == 1
    assert await queue.redrive() == 1
    assert bodies(await queue.take(max_messages=10)) == ["a"]
    assert (await queue.counts()).num_held == 0


async def test_letters_that_wait_behind_their_group_are_redriven_and_discarded_too(
    queue: SqsQueue, clients: AwsClients, queue_name: str
) -> None:
    url = clients.call_now("sqs", "get_queue_url", QueueName=f"{queue_name}-dead.fifo")["QueueUrl"]
    for number in range(15):
        clients.call_now(
            "sqs",
            "send_message",
            QueueUrl=url,
            MessageBody=str(number),
            MessageGroupId="a",
            MessageDeduplicationId=str(number),
        )
    assert [letter.body for letter in await queue.dead_letters(limit=3)] == [b"0", b"1", b"2"]
    found = await queue.dead_letters()
    assert 10 <= len(found) <= 15
    assert await queue.discard([found[0].letter_id, found[1].letter_id]) == 2
    assert await queue.redrive() == 13
    assert bodies(await queue.take(max_messages=100)) == [str(number) for number in range(2, 15)]


async def test_a_purge_waits_for_the_one_that_somebody_else_has_begun(
    proxied: OpenProxied,
) -> None:
    proxy, queue = proxied()
    await queue.send([message("a"), message("b")])
    proxy.acts["PurgeQueue"] = [refuse(400, "AWS.SimpleQueueService.PurgeQueueInProgress")]
    assert await queue.purge() == 2
    assert proxy.counts["PurgeQueue"] == 2


async def test_a_queue_is_drained_without_a_purge_that_goes_on_for_a_minute(proxied: OpenProxied) -> None:
    proxy, queue = proxied()
    await queue.send([message(str(number), "same" if number < 12 else "") for number in range(25)])
    # The others of its group wait behind it.
    [leased] = await queue.lease(max_messages=1, lease_s=2)
    assert leased.body == b"0"
    assert await queue.drain() == 25
    assert (await queue.counts()).num_held == 0
    assert proxy.counts["PurgeQueue"] == 0


async def test_a_queue_that_is_not_there_is_named(clients: AwsClients) -> None:
    queue = open_queue(clients, "absent")
    with pytest.raises(NotFound, match=r"queue absent\.fifo does not exist"):
        await queue.send([message("a")])
    with pytest.raises(NotFound):
        queue.counts_now()


@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        ("SendMessageBatch", lambda queue: queue.send([message("a")])),
        ("ReceiveMessage", lambda queue: queue.lease(max_messages=1, lease_s=1)),
        ("ReceiveMessage", lambda queue: queue.take(max_messages=1)),
        ("DeleteMessageBatch", lambda queue: queue.ack(["receipt"])),
        ("ChangeMessageVisibilityBatch", lambda queue: queue.extend(["receipt"], 1)),
        ("GetQueueAttributes", lambda queue: queue.counts()),
        ("PurgeQueue", lambda queue: queue.purge()),
    ],
)
async def test_what_is_refused_is_named_as_a_matter_of_configuration_or_as_passing(
    proxied: OpenProxied, operation: str, ask: Callable[[SqsQueue], Coroutine[object, object, object]]
) -> None:
    proxy, queue = proxied()
    proxy.acts[operation] = [refuse(400, "AccessDeniedException")]
    with pytest.raises(InvalidInput, match=r"AccessDenied.*what the credentials in use may do"):
        await ask(queue)
    proxy.acts[operation] = [refuse(400, "KmsThrottled")]
    with pytest.raises(BackendUnavailable, match="KmsThrottled"):
        await ask(queue)


async def test_a_large_body_that_cannot_be_stored_is_a_matter_of_configuration(
    clients: AwsClients, queue_name: str
) -> None:
    no_bucket = Overflow(clients, "there-is-no-such-bucket", PREFIX)
    queue = SqsQueue(clients, f"{queue_name}.fifo", f"{queue_name}-dead.fifo", overflow=no_bucket)
    with pytest.raises(InvalidInput, match="check the bucket"):
        await queue.send([message(b"x" * 300_000, "large")])
