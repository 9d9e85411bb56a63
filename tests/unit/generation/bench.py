"""A replica to talk to: the real engine, real queues, records and weights, and what a proxy does with them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from turnmill.config import Config
from turnmill.generation.engine import EngineCall, EngineResult
from turnmill.generation.renderer import Renderer
from turnmill.generation.replica import run_replica
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.ports import Message, RunPorts
from turnmill.records import (
    Call,
    GenerateRequest,
    GenerateResponse,
    Purpose,
    ReplicaStatus,
    Sampling,
    call_key,
    decode,
    encode,
    replica_key,
)
from turnmill.weights import fingerprint

Plain = Callable[..., list[float]]
OPENING = [{"role": "user", "content": "Guess the five-letter word."}]
FEEDBACK = [{"role": "user", "content": "c+ r- a- n? e-"}]


class CountingEngine(TransformersEngine):
    """The engine, which also remembers what it was asked."""

    def __init__(self, folder: Path, *, num_slots: int = 8) -> None:
        super().__init__(folder, num_slots=num_slots, max_length=512)
        self.submitted: list[EngineCall] = []
        self._joined = asyncio.Event()
        # Called in the engine's thread before each step; tests hold the engine back with it.
        self.before_step: Callable[[], object] = lambda: None

    def submit(self, call: EngineCall) -> None:
        super().submit(call)
        self.submitted.append(call)
        self._joined.set()

    def step(self) -> list[EngineResult]:
        self.before_step()
        return super().step()

    async def have_joined(self, num_calls: int) -> None:
        """Wait until so many calls were submitted in all."""
        while len(self.submitted) < num_calls:
            self._joined.clear()
            await self._joined.wait()


@contextlib.asynccontextmanager
async def serving(
    ports: RunPorts,
    engine: TransformersEngine,
    folder: Path,
    *,
    index: int = 0,
    seed: int = 0,
    stop: asyncio.Event | None = None,
    num_replicas: int = 1,
) -> AsyncIterator["asyncio.Task[None]"]:
    """A running replica, one of so many; it is stopped at the end, or by `stop`, and must have ended well."""
    stop = stop or asyncio.Event()
    task = asyncio.create_task(
        run_replica(
            ports,
            run_id="run",
            name=f"replica-{index}",
            index=index,
            config=Config(seed=seed, max_length=512, generation_replicas=num_replicas),
            engine=engine,
            renderer=Renderer(folder),
            stop=stop,
        )
    )
    try:
        yield task
    finally:
        stop.set()
        if not task.done():
            await task


def request_for(call_id: str, messages: Sequence[dict[str, Any]] = OPENING, **changes: Any) -> GenerateRequest:
    values: dict[str, Any] = {"sampling": Sampling(max_new_tokens=8), "max_length": 512}
    sample_id = call_id.rpartition("_")[0]
    return GenerateRequest(
        sample_id=sample_id, step_id=call_id, messages=list(messages), run_id="run", **{**values, **changes}
    )


async def send(ports: RunPorts, request: GenerateRequest, index: int = 0) -> None:
    body = encode(request)
    dedup_id = f"{request.step_id}/{request.epoch}"
    await ports.generate_request[index].send([Message(body=body, group=request.step_id, dedup_id=dedup_id)])


async def receive(ports: RunPorts, num: int = 1) -> list[GenerateResponse]:
    responses: list[GenerateResponse] = []
    while len(responses) < num:
        leased = await ports.generate_response.lease(max_messages=num, lease_s=30, wait_s=10)
        responses += [decode(item.body, GenerateResponse) for item in leased]
        await ports.generate_response.ack([item.receipt for item in leased])
    return responses


async def ask(ports: RunPorts, request: GenerateRequest, index: int = 0) -> GenerateResponse:
    await send(ports, request, index)
    (response,) = await receive(ports)
    return response


async def status_of(ports: RunPorts, index: int = 0) -> ReplicaStatus:
    """What the replica says of itself."""
    (stored,) = await ports.records.get([replica_key("run", f"replica-{index}")])
    assert stored is not None
    return decode(stored.value, ReplicaStatus)


async def recorded(ports: RunPorts, call_id: str) -> Call:
    sample_id = call_id.rpartition("_")[0]
    (stored,) = await ports.records.get([call_key("run", Purpose.TRAIN, sample_id, call_id)])
    assert stored is not None and stored.version == 1
    call = decode(stored.value, Call)
    assert call.digest == call.expected_digest()
    return call


def sampled(call: Call) -> list[int]:
    return call.token_ids[len(call.token_ids) - call.num_sampled :]


def assert_exact(plain: Plain, folder: Path, path: list[int], call: Call) -> None:
    expected = plain(folder, path, call.num_sampled)
    assert max(abs(a - b) for a, b in zip(expected, call.logprobs, strict=True)) < 1e-5


def write_weights(source: Path, folder: Path, factor: float) -> tuple[Path, str]:
    """A model folder with all tensors scaled, and the fingerprint of them."""
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = {name: tensor * factor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    return folder, fingerprint(
        (name, str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()
    )
