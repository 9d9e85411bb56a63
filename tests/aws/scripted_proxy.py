"""A proxy between a client and the emulator that does as it is told, request by request, and keeps what came by.

    client -> the next act for this operation, if any -> emulator -> client

For requests in the JSON protocol. Where faults are drawn by chance, and in numbers, see `service_proxy`.
"""

import json
import threading
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Content = dict[str, Any]
# Status and content.
Answer = tuple[int, Content]
# Asks the emulator.
Forward = Callable[[Content], Answer]
Act = Callable[[Content, Forward], Answer]


class ScriptedProxy:
    """What it does and has seen, by operation: `SendMessageBatch`, for example."""

    def __init__(self) -> None:
        self.url = ""
        self.acts: dict[str, list[Act]] = defaultdict(list)
        self.seen: list[tuple[str, Content]] = []

    @property
    def counts(self) -> Counter[str]:
        """Requests by operation."""
        return Counter(operation for operation, _ in self.seen)

    def of(self, operation: str) -> list[Content]:
        """What came by of one operation."""
        return [content for name, content in self.seen if name == operation]


def pass_on(content: Content, forward: Forward) -> Answer:
    """Done as it is: for the turn of a later one."""
    return forward(content)


def lose(content: Content, forward: Forward) -> Answer:
    """Done, and the answer is lost."""
    forward(content)
    return 500, {"__type": "InternalFailure", "message": "the answer was lost"}


def refuse(status: int, code: str) -> Act:
    """Not done."""
    return lambda content, forward: (status, {"__type": code, "message": "no"})


def fail_entries(*indexes: int, code: str = "InternalError", is_senders_fault: bool = False) -> Act:
    """These entries of a batch are not done, the others are."""

    def act(content: Content, forward: Forward) -> Answer:
        entries = content["Entries"]
        failed = [
            {"Id": entries[index]["Id"], "Code": code, "Message": "no", "SenderFault": is_senders_fault}
            for index in indexes
        ]
        others = [entry for index, entry in enumerate(entries) if index not in indexes]
        status, answer = forward({**content, "Entries": others}) if others else (200, {"Successful": [], "Failed": []})
        return status, {**answer, "Failed": [*answer.get("Failed", []), *failed]}

    return act


@contextmanager
def scripted_proxy(upstream: str) -> Iterator[ScriptedProxy]:
    """A proxy before `upstream`, in a thread of this process; it ends with the block."""
    proxy = ScriptedProxy()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Head and body of an answer are two packets, of which the second one must not wait.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            operation = self.headers.get("X-Amz-Target", "").rpartition(".")[2]
            content: Content = json.loads(body)
            proxy.seen.append((operation, content))

            def forward(changed: Content) -> Answer:
                headers = {
                    name: value for name, value in self.headers.items() if name not in ("Host", "Content-Length")
                }
                return _ask(urllib.request.Request(upstream + self.path, json.dumps(changed).encode(), headers))

            act = proxy.acts[operation].pop(0) if proxy.acts[operation] else None
            status, answer = act(content, forward) if act else forward(content)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.0")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="scripted-proxy")
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _ask(request: urllib.request.Request) -> Answer:
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")
