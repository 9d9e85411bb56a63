"""An ASGI application served inside somebody else's process: uvicorn's server around connections of our own."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from turnmill.conversation.exchange import Application
from turnmill.conversation.server import Connection
from turnmill.errors import BackendUnavailable

# How long requests may still take when the server ends.
GRACE_S = 5
IDLE_S = 75


@contextmanager
def reserved_port(host: str) -> Iterator[int]:
    """A port that the system chooses and gives to nobody else until this is left, for servers that share it.

    Nobody listens there yet: a server of the same user does with `is_reserved`, and after its death the next one.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port: int = holder.getsockname()[1]
        yield port


@asynccontextmanager
async def listening(
    app: Application,
    *,
    host: str,
    port: int,
    name: str,
    is_reserved: bool = False,
    stop: Callable[[], None] | None = None,
    grace_s: int = GRACE_S,
) -> AsyncIterator[int]:
    """Serve on the running loop; yields the port (chosen by the system for 0, or that of `reserved_port`).

    On leaving, `stop` is called, and what is being answered then has `grace_s` to end. Raises `OSError` for an address
    that can't be had.
    """
    listener = socket.create_server((host, port), backlog=2048, reuse_port=is_reserved)
    listener.setblocking(False)
    bound: int = listener.getsockname()[1]
    config = uvicorn.Config(
        app,
        http=_Connection,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=grace_s,
    )
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]), name=f"{name}-server")
    listens = asyncio.create_task(server.listens.wait(), name=f"{name}-listens")
    await asyncio.wait([running, listens], return_when=asyncio.FIRST_COMPLETED)
    listens.cancel()
    if running.done():
        running.result()
        raise BackendUnavailable(f"the server on {host}:{port} ended at once")
    try:
        yield bound
    finally:
        if stop is not None:
            stop()
        server.should_exit = True
        server.stopped.set()
        await running


class _Connection(Connection):
    """Our connection as uvicorn makes it. It writes no access log: its lines would hold the secrets in the paths."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(
            config.loaded_app,
            connections=server_state.connections,
            tasks=server_state.tasks,
            idle_s=config.timeout_keep_alive,
            loop=_loop or asyncio.get_running_loop(),
        )


class _Server(uvicorn.Server):
    """A server inside somebody else's process: it leaves the signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()
        self.stopped = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    async def main_loop(self) -> None:
        """uvicorn's own looks ten times a second whether to end, and keeps a date that nobody here sends."""
        await self.stopped.wait()
