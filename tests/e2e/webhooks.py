"""A real receiver of a deployment's alerts, which checks their signatures."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from turnmill.alerts.webhook import SIGNATURE_HEADER, TIMESTAMP_HEADER, verify

SECRET = "a secret of twenty characters"


@contextmanager
def webhook(root: Path) -> Iterator[list[dict[str, Any]]]:
    """Serve, and name the receiver in the deployment's turnmill.toml; what came with a signature that is right."""
    received: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            verify(SECRET, timestamp=self.headers[TIMESTAMP_HEADER], signed=self.headers[SIGNATURE_HEADER], body=body)
            received.append(json.loads(body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/alerts"
    root.mkdir(parents=True, exist_ok=True)
    (root / "turnmill.toml").write_text(f'[[alerts]]\ntype = "webhook"\nurl = "{url}"\nsecret = "{SECRET}"\n')
    try:
        yield received
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
