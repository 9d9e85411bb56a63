"""A replica among others that answer too, messages that come again, new weights, altered records and the end."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.unit.generation.bench import (
    FEEDBACK,
    CountingEngine,
    Plain,
    ask,
    assert_exact,
    receive,
    recorded,
    request_for,
    send,
    serving,
    write_weights,
)
from turnmill.errors import RecordCorrupt
from turnmill.ports import Count, Message, Outbox, RunPorts, Write
from turnmill.records import Purpose, ReplicaStatus, Sampling, Version, call_key, decode, encode, replica_key


async def test_a_request_that_comes_again_is_answered_from_the_record(ports: RunPorts, shipped: Path) -> None:
    engine = CountingEngine(shipped)
    async with serving(ports, engine, shipped):
        first = await ask(ports, request_for("a_0"))
        again = await ask(ports, request_for("a_0", epoch=1))
    assert again == first
    assert len(engine.submitted) == 1
    await recorded(ports, "a_0")


def only_once(action: Callable[[], object]) -> Callable[[], object]:
    left = [action]
    return lambda: left.pop()() if left else None


async def test_two_replicas_that_answer_one_call_leave_one_answer_and_both_go_on_from_it(
    ports: RunPorts, random_llama: Path, plain_logprobs: Plain
) -> None:
    """Their seeds differ here, so each samples tokens of its own; neither samples before both have the call."""
    engines = [CountingEngine(random_llama), CountingEngine(random_llama)]
    both_joined = threading.Barrier(2, timeout=30)
    for engine in engines:
        engine.before_step = only_once(both_joined.wait)
    for index in (0, 1):
        await send(ports, request_for("a_0", epoch=index), index)
    async with (
        serving(ports, engines[0], random_llama, index=0, seed=1),
        serving(ports, engines[1], random_llama, index=1, seed=2),
    ):
        first, second = await receive(ports, 2)
        assert first == second
        root = await recorded(ports, "a_0")
        for index in (0, 1):
            call_id = f"a_{index + 1}"
            await ask(ports, request_for(call_id, FEEDBACK, parent="a_0"), index)
            child = await recorded(ports, call_id)
            assert child.parent_digest == root.digest
            assert_exact(plain_logprobs, random_llama, [*root.token_ids, *child.token_ids], child)
    assert [len(engine.submitted) for engine in engines] == [2, 2]
    # The one whose answer was discarded does not go on from what it sampled.
    assert sorted(engine.submitted[1].context_ids is None for engine in engines) == [False, True]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"parent": "a_9"}, "unknown_parent"),
        ({"max_length": 4}, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_request"),
    ],
)
async def test_a_call_that_can_not_be_answered_gets_an_error_code(
    changes: dict[str, Any], code: str, ports: RunPorts, shipped: Path
) -> None:
    engine = CountingEngine(shipped)
    async with serving(ports, engine, shipped):
        response = await ask(ports, structs.replace(request_for("a_0"), **changes))
        assert response.error is not None and response.error["code"] == code
        assert response.data is None
        # The message is gone and the replica goes on.
        assert (await ask(ports, request_for("b_0"))).error is None
    counts = await ports.generate_request[0].counts()
    assert (counts.available, counts.in_flight, counts.delayed) == (0, 0, 0)


@pytest.mark.parametrize("body", [b'{"sample_id": 5}', b'{"sample_id": "a', b"\xff", b""])
async def test_a_message_that_can_not_be_read_goes_back_and_stops_nobody(
    body: bytes, ports: RunPorts, shipped: Path
) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        await ports.generate_request[0].send([Message(body=body, group="x", dedup_id="x")])
        assert (await ask(ports, request_for("b_0"))).error is None
    counts = await ports.generate_request[0].counts()
    assert counts.available + counts.delayed == 1


@pytest.mark.parametrize("field", ["token_ids", "loss_mask", "logprobs"])
async def test_a_parent_that_was_altered_stops_the_replica(field: str, ports: RunPorts, shipped: Path) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        await ask(ports, request_for("a_0"))
    call = await recorded(ports, "a_0")
    values = list(getattr(call, field))
    values[-1] = 1 - values[-1] if field == "loss_mask" else values[-1] + 1
    changes: dict[str, Any] = {field: values}
    await ports.records.write([Write(key=call.key, value=encode(structs.replace(call, **changes)), expected=1)])
    # Another replica than the one that sampled it, which still knows what it recorded.
    with pytest.raises(RecordCorrupt, match="calls/run/train/a/a_0 does not match its digest"):
        async with serving(ports, CountingEngine(shipped), shipped) as replica:
            await send(ports, request_for("a_1", FEEDBACK, parent="a_0"))
            await replica


async def test_a_path_with_a_missing_call_stops_the_replica(ports: RunPorts, shipped: Path) -> None:
    async with serving(ports, CountingEngine(shipped), shipped):
        await ask(ports, request_for("a_0"))
        await ask(ports, request_for("a_1", FEEDBACK, parent="a_0"))
    root = await recorded(ports, "a_0")
    await ports.records.write([Write(key=root.key, value=None, expected=1)])
    with pytest.raises(RecordCorrupt, match="a_1 does not continue"):
        async with serving(ports, CountingEngine(shipped), shipped) as replica:
            await send(ports, request_for("a_2", FEEDBACK, parent="a_1"))
            await replica


async def test_weights_are_swapped_only_between_calls_and_each_call_has_one_version(
    ports: RunPorts, random_llama: Path, tmp_path: Path, plain_logprobs: Plain
) -> None:
    """Long calls are running when new weights appear; calls that came in meanwhile are served by the new ones."""
    folders = {"0.0": random_llama}
    digests = {}
    for n in (1, 2):
        version = Version(incarnation=1, n=n)
        folders[str(version)], digests[str(version)] = write_weights(random_llama, tmp_path / f"v{n}", 1 + n / 50)
    engine = CountingEngine(random_llama)
    long = Sampling(max_new_tokens=60)
    async with serving(ports, engine, random_llama):
        for n in (1, 2):
            for i in range(4):
                await send(ports, request_for(f"{n}{i}_0", sampling=long))
            await engine.have_joined(8 * (n - 1) + 4)
            version = Version(incarnation=1, n=n)
            await ports.weights.publish(version, folders[str(version)], digests[str(version)])
            await ports.weights.point(version)
            for i in range(4):
                await send(ports, request_for(f"{n}{i}late_0", sampling=long))
            await receive(ports, 8)
            assert (await recorded(ports, f"{n}0_0")).version == ("0.0" if n == 1 else "1.1")
            assert (await recorded(ports, f"{n}0late_0")).version == str(version)
        crossing = await ask(ports, request_for("10_1", FEEDBACK, parent="10_0"))
        assert crossing.call is not None and crossing.call.version == "1.2"
    for n in (1, 2):
        for i in range(4):
            for name in (f"{n}{i}_0", f"{n}{i}late_0"):
                call = await recorded(ports, name)
                assert_exact(plain_logprobs, folders[call.version], call.token_ids, call)
    root, child = await recorded(ports, "10_0"), await recorded(ports, "10_1")
    assert_exact(plain_logprobs, folders["1.2"], [*root.token_ids, *child.token_ids], child)
    (stored,) = await ports.records.get([replica_key("run", "replica-0")])
    assert stored is not None
    status = decode(stored.value, ReplicaStatus)
    assert status.version == Version(incarnation=1, n=2)
    assert list(status.fingerprints) == ["0.0", "1.1", "1.2"]
    assert {key: status.fingerprints[key] for key in digests} == digests


async def test_a_replica_that_starts_late_serves_the_current_version_first(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    folder, digest = write_weights(random_llama, tmp_path / "v", 1.1)
    version = Version(incarnation=2, n=5)
    await ports.weights.publish(version, folder, digest)
    await ports.weights.point(version)
    await send(ports, request_for("a_0"))
    async with serving(ports, CountingEngine(random_llama), random_llama):
        await receive(ports)
    assert (await recorded(ports, "a_0")).version == "2.5"


async def test_a_stopped_replica_gives_running_calls_back(ports: RunPorts, random_llama: Path) -> None:
    engine = CountingEngine(random_llama, num_slots=1)
    async with serving(ports, engine, random_llama):
        for call_id in ("a_0", "b_0"):
            await send(ports, request_for(call_id, sampling=Sampling(max_new_tokens=480)))
        await engine.have_joined(1)
    counts = await ports.generate_request[0].counts()
    assert (counts.available, counts.in_flight) == (2, 0)
    key = call_key("run", Purpose.TRAIN, "a", "a_0")
    assert await ports.records.get([key]) == [None]
    async with serving(ports, CountingEngine(random_llama), random_llama, index=0):
        assert all(response.error is None for response in await receive(ports, 2))


class SlowAnswers:
    """An outbox whose writes of calls wait for `may_write`."""

    def __init__(self, answers: Outbox) -> None:
        self._answers = answers
        self.has_calls = asyncio.Event()
        self.may_write = asyncio.Event()

    async def write(self, entries: Sequence[tuple[Write, Message]], counts: Sequence[Count] = ()) -> list[bool]:
        if entries:
            self.has_calls.set()
            await self.may_write.wait()
        return await self._answers.write(entries, counts)


async def test_a_request_that_comes_again_before_its_answer_is_recorded_is_not_sampled_again(
    ports: RunPorts, shipped: Path
) -> None:
    """As after a pause of the whole process, in which the lease ran out."""
    engine, answers = CountingEngine(shipped), SlowAnswers(ports.answers)
    async with serving(replace(ports, answers=answers), engine, shipped):
        await send(ports, request_for("a_0"))
        await answers.has_calls.wait()
        again = request_for("a_0", epoch=1)
        await ports.generate_request[0].send([Message(body=encode(again), group="other", dedup_id="again")])
        # A message behind it is answered only after it was looked at.
        await send(ports, request_for("b_0"))
        await engine.have_joined(2)
        # It is held: given back it would come again and again, until it is a dead letter.
        counts = await ports.generate_request[0].counts()
        assert (counts.available, counts.in_flight, counts.delayed) == (0, 3, 0)
        answers.may_write.set()
        assert len(await receive(ports, 3)) == 3
    assert sorted(call.call_id for call in engine.submitted) == [
        call_key("run", Purpose.TRAIN, sample_id, f"{sample_id}_0") for sample_id in ("a", "b")
    ]


class OvertakenEngine(CountingEngine):
    """While it is about to load a version, another is made current and this one is removed."""

    before_load: Callable[[], object] = staticmethod(lambda: None)

    def load(self, folder: Path, version: Version) -> None:
        self.before_load()
        super().load(folder, version)


@pytest.mark.parametrize("is_overtaken", [True, False])
async def test_weights_that_were_removed_before_they_were_loaded_stop_the_replica_only_if_they_are_current(
    is_overtaken: bool, ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    engine = OvertakenEngine(random_llama)
    versions = [Version(incarnation=1, n=n) for n in (1, 2)]
    for version in versions:
        source, digest = write_weights(random_llama, tmp_path / str(version), 1 + version.n / 8)
        await ports.weights.publish(version, source, digest)
    await ports.weights.point(versions[0])
    (first,) = [await ports.weights.get(versions[0])]

    def overtake() -> None:
        if is_overtaken:
            asyncio.run(ports.weights.point(versions[1]))
        shutil.rmtree(first.location)

    engine.before_load = only_once(overtake)
    if is_overtaken:
        async with serving(ports, engine, random_llama):
            await ask(ports, request_for("a_0"))
        assert (await recorded(ports, "a_0")).version == "1.2"
    else:
        with pytest.raises(RecordCorrupt, match="can't be read"):
            async with serving(ports, engine, random_llama) as replica:
                await replica
