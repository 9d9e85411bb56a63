"""What worker and player say to one another over the control socket: messages in frames of limited size.

    worker: Load, then Play, Cancel, Ping;  player: Loaded | LoadFailed, then Ended, Pong
    before a run: Load, then Examine, Ping;  player: Loaded | LoadFailed, then Examining, ..., Examined

A frame is its length in 4 bytes and MessagePack, which keeps what JSON has no words for (NaN), so that the worker can
refuse it. What a player says is untrusted: types and sizes are checked here, meanings in `results`.
"""

import asyncio
import struct
from typing import Any

import msgspec

from turnmill.environment.registry import EnvironmentKind
from turnmill.records import EnvironmentChoice, InvalidReason, PreflightReport, PreflightRequest, StopReason, Task

# Longest frame of a player; a result has at most a few kilobytes.
MAX_PLAYER_FRAME = 1 << 20
# Longest frame of a worker: a task has at most some megabytes.
MAX_WORKER_FRAME = 1 << 28
_LENGTH = struct.Struct(">I")


class WireError(Exception):
    """What came is no message: too long, unreadable or not expected."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message: which environment to load."""

    choice: EnvironmentChoice
    kind: EnvironmentKind
    module: str
    # Folder of its package, where it lies in one; of the requirements that were installed for it, if any were.
    package: str | None
    layer: str | None
    # Seconds of one generation call.
    call_timeout_s: float
    # Processes and threads that the player may have, where it has to see to that itself.
    num_processes: int | None = None


class Play(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Play a rollout."""

    # The worker's number for it.
    play: int
    sample_id: str
    metadata: dict[str, Any]
    # Path of its chat at the relay.
    path: str
    limit_s: float
    reward_range: tuple[float, float]


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a rollout; its `Ended` says when it has ended."""

    play: int


class Examine(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Play these tasks without a model, look at the others, and report."""

    request: PreflightRequest
    tasks: list[Task]
    others: list[Task] = []


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say how you are."""


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment is there."""


class LoadFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It can't be loaded; the player ends."""

    detail: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """How a rollout ended, as the player says."""

    play: int
    reward: float | None = None
    reason: InvalidReason | None = None
    metrics: dict[str, float] = {}
    turn_rewards: dict[str, float] = {}
    stop_reason: StopReason | None = None
    detail: str | None = None


class Examining(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What of it is about to be played."""

    what: str


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was found."""

    report: PreflightReport


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by a thread of its own, so also while the environment does not give the event loop back."""

    # Seconds for which the event loop has not turned.
    blocked_s: float
    # The rollout whose code it runs meanwhile, where that can be told; where that code is.
    running: int | None = None
    place: str = ""


WorkerMessage = Load | Play | Cancel | Examine | Ping
PlayerMessage = Loaded | LoadFailed | Ended | Examining | Examined | Pong

_WORKER = msgspec.msgpack.Decoder(WorkerMessage)
_PLAYER = msgspec.msgpack.Decoder(PlayerMessage)


def frame(message: WorkerMessage | PlayerMessage) -> bytes:
    """Raises `UnicodeEncodeError` for text that is none (half a surrogate pair)."""
    content = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(content)) + content


async def read_player(reader: asyncio.StreamReader) -> PlayerMessage | None:
    """The next message of a player, None at the end. Raises `WireError`, and `OSError` for a broken socket."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_PLAYER_FRAME:
            raise WireError(f"a message of {length} bytes, more than {MAX_PLAYER_FRAME}")
        content = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise WireError("its last message was cut") from error
        return None
    message: PlayerMessage = _decode(_PLAYER, content)
    return message


def check_player(data: bytes) -> None:
    """Raises `WireError` for a frame that a worker would not take: its player would be ended for it."""
    if len(data) > MAX_PLAYER_FRAME:
        raise WireError(f"a message of {len(data)} bytes, more than {MAX_PLAYER_FRAME}")
    _decode(_PLAYER, data[_LENGTH.size :])


def decode_worker(content: bytes) -> WorkerMessage:
    """Raises `WireError`."""
    message: WorkerMessage = _decode(_WORKER, content)
    return message


def length_of(head: bytes) -> int:
    """The length of the frame that begins with these 4 bytes; raises `WireError` for one that no worker sends."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_WORKER_FRAME:
        raise WireError(f"a message of {length} bytes, more than {MAX_WORKER_FRAME}")
    return int(length)


def _decode(decoder: Any, content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"an unreadable message: {error}") from error
