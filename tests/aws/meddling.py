"""A proxy before the emulator that meddles with the very requests that a test names: answers are lost, others come in.

`service_proxy` makes faults at random instead, for whole runs.
"""

import http.client
import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of a service; a `status` of 0 cuts the connection."""

    status: int
    body: bytes


# Has the request, which it may pass on (never, once or several times), and answers.
Meddling = Callable[[Callable[[], Answer]], Answer]
LOST = Answer(status=500, body=b'{"__type": "InternalServerError", "message": "the answer was lost"}')
CUT = Answer(status=0, body=b"")


def lose(instead: Answer, then: Callable[[], None] = lambda: None) -> Meddling:
    """The request is done, then something else happens, and what comes back is no answer."""

    def meddle(pass_on: Callable[[], Answer]) -> Answer:
        assert pass_on().status == 200
        then()
        return instead

    return meddle


def refuse(code: str, *, then: Callable[[], None] = lambda: None, status: int = 400, **more: Any) -> Meddling:
    """The request is not done."""

    def meddle(pass_on: Callable[[], Answer]) -> Answer:
        then()
        error = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "by the test", **more}
        return Answer(status=status, body=json.dumps(error).encode())

    return meddle


def rewrite(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Meddling:
    """The request is done, and its answer is another one."""

    def meddle(pass_on: Callable[[], Answer]) -> Answer:
        answer = pass_on()
        return Answer(status=answer.status, body=json.dumps(change(json.loads(answer.body))).encode())

    return meddle


@dataclass(frozen=True, kw_only=True)
class Meddler:
    """A running proxy."""

    url: str
    # What becomes of the next requests of an operation (`PutItem`); later ones are passed on.
    plans: defaultdict[str, deque[Meddling]] = field(default_factory=lambda: defaultdict(deque))
    # The operations that were asked for, in order.
    seen: list[str] = field(default_factory=list)

    def plan(self, operation: str, *meddlings: Meddling) -> None:
        self.plans[operation].extend(meddlings)


@contextmanager
def meddling_with(url: str) -> Iterator[Meddler]:
    """A proxy before the service at `url`."""
    target = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            operation = self.headers["X-Amz-Target"].rpartition(".")[2]
            meddler.seen.append(operation)
            plan = meddler.plans[operation]

            def pass_on() -> Answer:
                connection = http.client.HTTPConnection(target, timeout=60)
                try:
                    connection.request("POST", self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    return Answer(status=response.status, body=response.read())
                finally:
                    connection.close()

            answer = plan.popleft()(pass_on) if plan else pass_on()
            if answer.status:
                self.send_response(answer.status)
                self.send_header("Content-Type", "application/x-amz-json-1.0")
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: `seen` tells."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    meddler = Meddler(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="meddler")
    thread.start()
    try:
        yield meddler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
