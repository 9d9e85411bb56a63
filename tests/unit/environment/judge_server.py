"""A judge on 127.0.0.1: OpenAI's chat completions, as strict as the documentation."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "sk-judge-0123456789abcdef"


@dataclass(kw_only=True)
class JudgeServer:
    base_url: str
    # Bodies of the requests that came.
    received: list[Any] = field(default_factory=list)
    # Statuses and headers of the answers to come, before it judges: 200 from then on.
    failures: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    # What it says; None: the text of the last message, in capitals.
    body: str | None = None
    # Unset, it takes requests and does not answer.
    answers: threading.Event = field(default_factory=threading.Event)
    # Counts requests that came.
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    # Requests that were there at once.
    most_at_once: int = 0
    num_now: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def judge_server() -> Iterator[JudgeServer]:
    state = JudgeServer(base_url="")
    state.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["Content-Length"]))
            with state.lock:
                state.num_now += 1
                state.most_at_once = max(state.most_at_once, state.num_now)
            state.arrived.release()
            status, headers, said = self._judged(raw)
            state.answers.wait(30)
            with state.lock:
                state.num_now -= 1
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(said.encode())))
            self.end_headers()
            self.wfile.write(said.encode())

        def _judged(self, raw: bytes) -> tuple[int, dict[str, str], str]:
            if self.path != "/v1/chat/completions":
                return 404, {}, "no such route"
            if self.headers["Authorization"] != f"Bearer {SECRET}":
                return 401, {}, f"wrong key: {self.headers['Authorization']}"
            body = json.loads(raw)
            with state.lock:
                state.received.append(body)
                if state.failures:
                    status, headers = state.failures.pop(0)
                    return status, headers, "overloaded"
            if state.body is not None:
                return 200, {}, state.body
            text = body["messages"][-1]["content"].upper()
            return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Of clients that went away."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    state.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.answers.set()
        server.shutdown()
        server.server_close()
        thread.join()
