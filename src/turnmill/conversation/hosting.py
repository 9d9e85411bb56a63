"""The proxy as a server inside somebody else's process; `proxy` alone needs no server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnmill.conversation.proxy import App
from turnmill.conversation.serving import listening


@asynccontextmanager
async def serve(app: App, host: str = "127.0.0.1", port: int = 0, *, is_reserved: bool = False) -> AsyncIterator[int]:
    """Serve on the running loop; yields the port (chosen by the system for 0, or that of `reserved_port`).

    On leaving, calls and lease requests that wait are sent away with 503 before the server closes.
    """
    async with listening(
        app, host=host, port=port, is_reserved=is_reserved, name="proxy", stop=app.sessions.stop
    ) as bound:
        if not app.sessions.base_url:
            app.sessions.base_url = f"http://{host}:{bound}"
        yield bound
