"""A replica takes no call before its memory was proved to hold what was published; what it says of itself meanwhile."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.generation.bench import (
    CountingEngine,
    ask,
    receive,
    recorded,
    request_for,
    send,
    serving,
    status_of,
    write_weights,
)
from turnmill.errors import WeightsUnproved
from turnmill.ports import RunPorts, Write
from turnmill.records import (
    HEARTBEAT_S,
    ReplicaState,
    ReplicaStatus,
    Sampling,
    Version,
    WeightVersion,
    decode,
    encode,
    replica_key,
)

V1, V2 = (Version(incarnation=1, n=n) for n in (1, 2))


async def publish(ports: RunPorts, model: Path, folder: Path, version: Version, factor: float) -> WeightVersion:
    """Scaled weights, made current."""
    source, digest = write_weights(model, folder / str(version), factor)
    published = await ports.weights.publish(version, source, digest)
    await ports.weights.point(version)
    return published


def flip_a_bit(weights: WeightVersion) -> None:
    """In the last number of the file: all names, shapes and types stay."""
    path = Path(weights.location) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


async def refused(ports: RunPorts, engine: CountingEngine, folder: Path) -> WeightsUnproved:
    """What ends the replica, which has not answered the call that waited for it."""
    with pytest.raises(WeightsUnproved) as raised:
        async with serving(ports, engine, folder) as replica:
            await asyncio.wait_for(replica, 60)
    assert engine.submitted == []
    counts = await ports.generate_request[0].counts()
    assert (counts.available, counts.in_flight) == (1, 0)
    status = await status_of(ports)
    assert (status.state, status.error) == (ReplicaState.STOPPED, str(raised.value))
    return raised.value


async def test_weights_that_were_altered_after_they_were_published_are_never_served(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    published = await publish(ports, random_llama, tmp_path, V1, 1.1)
    flip_a_bit(published)
    await send(ports, request_for("a_0"))
    first = await refused(ports, CountingEngine(random_llama), random_llama)
    assert f"version 1.1: the fingerprint is {(await fingerprint_of(published, random_llama))}" in str(first)
    assert f"published was {published.digest}" in str(first)
    assert not first.is_final and (await status_of(ports)).num_refusals == 1
    # The next process may have been luckier; this one was not.
    second = await refused(ports, CountingEngine(random_llama), random_llama)
    assert second.is_final and (await status_of(ports)).num_refusals == 2
    # Mended, it is served, and the count begins anew.
    await publish(ports, random_llama, tmp_path, V2, 1.2)
    async with serving(ports, CountingEngine(random_llama), random_llama):
        (answer,) = await receive(ports)
    assert answer.call is not None and answer.call.version == "1.2"
    status = await status_of(ports)
    assert (status.error, status.num_refusals) == (None, 0)
    assert list(status.fingerprints) == ["1.2"]


async def fingerprint_of(weights: WeightVersion, folder: Path) -> str:
    engine = CountingEngine(folder)
    engine.load(Path(weights.location), weights.version)
    return engine.fingerprint()


class DeafEngine(CountingEngine):
    """Says that it has loaded a version and keeps the weights that it had."""

    def load(self, folder: Path, version: Version) -> None:
        self._version = version


async def test_an_engine_that_kept_its_old_weights_never_serves_them_under_the_new_name(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    engine = DeafEngine(random_llama)
    with pytest.raises(WeightsUnproved, match=r"does not hold version 1\.1"):
        async with serving(ports, engine, random_llama) as replica:
            await ask(ports, request_for("a_0"))
            published = await publish(ports, random_llama, tmp_path, V1, 1.1)
            await send(ports, request_for("b_0"))
            await asyncio.wait_for(replica, 60)
    assert (await recorded(ports, "a_0")).version == "0.0"
    assert [call.call_id.rpartition("/")[2] for call in engine.submitted] == ["a_0"]
    counts = await ports.generate_request[0].counts()
    assert (counts.available, counts.in_flight) == (1, 0)
    status = await status_of(ports)
    assert list(status.fingerprints) == ["0.0"] and published.digest not in status.fingerprints.values()


async def test_a_base_model_that_is_not_the_trainer_s_is_refused_as_soon_as_that_is_known(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    base = Version(incarnation=0, n=0)
    with pytest.raises(WeightsUnproved, match=r"does not hold version 0\.0"):
        async with serving(ports, CountingEngine(random_llama), random_llama) as replica:
            await ask(ports, request_for("a_0"))
            await publish(ports, random_llama, tmp_path, base, 1.1)
            await asyncio.wait_for(replica, 60)


async def test_what_the_process_before_has_proved_still_counts(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    """Its samples may be trained on when it is gone; the trainer asks who vouches for their version."""
    first = await publish(ports, random_llama, tmp_path, V1, 1.1)
    async with serving(ports, CountingEngine(random_llama), random_llama):
        await ask(ports, request_for("a_0"))
    second = await publish(ports, random_llama, tmp_path, V2, 1.2)
    async with serving(ports, CountingEngine(random_llama), random_llama):
        await ask(ports, request_for("b_0"))
        assert (await status_of(ports)).fingerprints == {"1.1": first.digest, "1.2": second.digest}


# ---------------------------------------------------------------- what it says of itself


async def until(ports: RunPorts, holds: Callable[[ReplicaStatus], bool]) -> ReplicaStatus:
    """The first status seen of which that holds."""
    while True:
        (stored,) = await ports.records.get([replica_key("run", "replica-0")])
        if stored is not None and holds(status := decode(stored.value, ReplicaStatus)):
            return status
        await asyncio.sleep(0.01)


async def test_a_replica_that_waits_for_a_running_call_says_for_which_version(
    ports: RunPorts, random_llama: Path, tmp_path: Path
) -> None:
    engine = CountingEngine(random_llama)
    async with serving(ports, engine, random_llama):
        await send(ports, request_for("a_0", sampling=Sampling(max_new_tokens=400)))
        await engine.have_joined(1)
        joined_at = (await status_of(ports)).joined_at
        await publish(ports, random_llama, tmp_path, V1, 1.1)
        await send(ports, request_for("b_0"))
        status = await until(ports, lambda status: status.next_version is not None)
        assert (status.state, str(status.version), status.next_version) == (ReplicaState.SERVING, "0.0", V1)
        await receive(ports, 2)
        status = await status_of(ports)
        # A swap is no break.
        assert (status.version, status.next_version, status.joined_at) == (V1, None, joined_at)
    assert (await recorded(ports, "a_0")).version == "0.0"
    assert (await recorded(ports, "b_0")).version == "1.1"


async def test_one_of_several_that_is_told_to_end_brings_its_calls_to_their_end(
    ports: RunPorts, random_llama: Path
) -> None:
    engine, stop = CountingEngine(random_llama, num_slots=1), asyncio.Event()
    # Slow enough that it can be watched.
    engine.before_step = lambda: asyncio.run(asyncio.sleep(0.01))
    async with serving(ports, engine, random_llama, stop=stop, num_replicas=2) as replica:
        for call_id in ("a_0", "b_0"):
            await send(ports, request_for(call_id, sampling=Sampling(max_new_tokens=60)))
        await engine.have_joined(1)
        stop.set()
        status = await until(ports, lambda status: status.state is ReplicaState.DRAINING)
        assert not status.is_live(status.updated_at)
        await replica
    assert len(await receive(ports)) == 1
    assert [call.call_id.rpartition("/")[2] for call in engine.submitted] == ["a_0"]
    # The call that was not begun went back at once.
    counts = await ports.generate_request[0].counts()
    assert (counts.available, counts.in_flight) == (1, 0)
    assert (await status_of(ports)).state is ReplicaState.STOPPED


async def test_a_replica_gives_signs_of_life(ports: RunPorts, random_llama: Path) -> None:
    async with serving(ports, CountingEngine(random_llama), random_llama):
        first = await until(ports, lambda status: status.state is ReplicaState.SERVING)
        await asyncio.sleep(1.5 * HEARTBEAT_S)
        second = await status_of(ports)
        assert replace(second, updated_at=first.updated_at) == first
        assert second.updated_at > first.updated_at


async def test_calls_that_others_have_answered_meanwhile_are_not_sampled_again(
    ports: RunPorts, random_llama: Path
) -> None:
    """Their messages were never taken here: nothing in them says that they are old."""
    async with serving(ports, CountingEngine(random_llama), random_llama, index=1, num_replicas=2):
        await send(ports, request_for("a_0"), 1)
        (first,) = await receive(ports)
    await send(ports, request_for("a_0"), 0)
    await send(ports, request_for("b_0"), 0)
    engine = CountingEngine(random_llama)
    async with serving(ports, engine, random_llama, index=0, num_replicas=2):
        answers = await receive(ports, 2)
    assert first in answers
    assert [call.call_id.rpartition("/")[2] for call in engine.submitted] == ["b_0"]


async def test_the_statuses_tell_who_can_be_sent_calls() -> None:
    status = ReplicaStatus(
        run_id="run", replica="replica-0", version=V1, fingerprints={}, updated_at=100.0, pid=1, joined_at=50.0
    )
    assert status.is_live(110.0) and not status.is_live(110.5)
    # A clock that was set back tells nothing.
    assert not status.is_live(80.0)
    assert status.is_live(103.0, gone_after_s=3.0) and not status.is_live(103.5, gone_after_s=3.0)
    for state in set(ReplicaState) - {ReplicaState.SERVING}:
        assert not replace(status, state=state).is_live(100.0)


async def test_a_replica_under_the_name_of_one_that_refused_says_why_until_it_serves(
    ports: RunPorts, random_llama: Path
) -> None:
    before = ReplicaStatus(
        run_id="run",
        replica="replica-0",
        version=V1,
        fingerprints={"1.0": "aa"},
        updated_at=100.0,
        pid=1,
        state=ReplicaState.STOPPED,
        error="its memory does not hold version 1.1",
        num_refusals=1,
    )
    key = replica_key("run", "replica-0")
    await ports.records.write([Write(key=key, value=encode(before), expected=0)])
    async with serving(ports, CountingEngine(random_llama), random_llama):
        status = await until(ports, lambda status: status.pid == os.getpid())
        if status.state is ReplicaState.LOADING:
            assert (status.error, status.num_refusals) == (before.error, 1)
        status = await until(ports, lambda status: status.state is ReplicaState.SERVING)
        assert (status.error, status.num_refusals) == (None, 0)
        assert list(status.fingerprints) == ["1.0", "0.0"]
