"""The interface as it is served: the application, where it listens, and the file that says so."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from turnmill.backends.embedded.files import replacing
from turnmill.control_api.access import Guard, token_of
from turnmill.control_api.errors import on_defect, on_http_error, on_turnmill_error
from turnmill.control_api.routes import Routes
from turnmill.conversation.serving import listening
from turnmill.errors import ConfigError, TurnmillError

ADDRESS_FILE = "control.json"
HOST = "127.0.0.1"
MAX_UPLOAD_BYTES = 1 << 30


def create_app(root: Path, token: str, *, max_upload_bytes: int = MAX_UPLOAD_BYTES) -> Starlette:
    """The ASGI application for the deployment in `root`."""
    app = Starlette(
        routes=Routes(root, max_upload_bytes=max_upload_bytes).table(),
        middleware=[Middleware(Guard, token=token, max_upload_bytes=max_upload_bytes)],
        exception_handlers={
            TurnmillError: on_turnmill_error,
            HTTPException: on_http_error,
            Exception: on_defect,
        },
    )
    # A path with a slash too many is another path.
    app.router.redirect_slashes = False
    return app


def address_file(root: Path) -> Path:
    """Holds `{"url", "pid"}` while the deployment is up."""
    return root.absolute() / ADDRESS_FILE


@asynccontextmanager
async def serve_api(root: Path, *, port: int = 0, max_upload_bytes: int = MAX_UPLOAD_BYTES) -> AsyncIterator[str]:
    """Serve on the running loop; yields the URL, which ROOT/control.json holds as long as that is so.

    Call it while the root is this process's own. Raises `ConfigError` for a port or a token that can't be used.
    """
    app = create_app(root, token_of(root), max_upload_bytes=max_upload_bytes)
    address = address_file(root)
    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(listening(app, host=HOST, port=port, name="control-api"))
        except OSError as error:
            why = os.strerror(error.errno or 0).lower()
            raise ConfigError(f"--port {port}: {HOST}:{port} can't be listened on: {why}") from error
        url = f"http://{HOST}:{bound}"
        with replacing(address, mode=0o600) as file:
            file.write(json.dumps({"url": url, "pid": os.getpid()}).encode() + b"\n")
        stack.callback(address.unlink, missing_ok=True)
        yield url
