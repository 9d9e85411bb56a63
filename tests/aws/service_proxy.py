"""A proxy between AWS clients and an emulator, as a process of its own: it counts requests, and makes faults.

    client -> [throttle | refuse | wait] -> emulator -> [lose the answer | end leases | keep what was deleted] -> client

Which fault meets which request is drawn from a seed, so that a run can be repeated; how often each one was made is
counted, so that a test can show that it did happen. Signatures are not checked by the emulator, which makes this
possible.

    python -m tests.aws.service_proxy UPSTREAM FOLDER '{"throttle": 0.02, ...}'

writes its URL to FOLDER/url and, once a second and at its end, what it counted to FOLDER/counts.json.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import aiohttp
from aiohttp import web

# Of a fault that comes in groups, as an outage does: the client's first retries meet it too.
_BURST = 2
_HOP = ("connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How likely each fault is, 0 to 1, for each request that it fits."""

    # Any service: too many requests (its own error code of each service).
    throttle: float = 0.0
    # DynamoDB: `ProvisionedThroughputExceededException`.
    throughput: float = 0.0
    # Any service: 500 without doing anything.
    refuse: float = 0.0
    # Any service: done, and answered with 500.
    lose: float = 0.0
    # Any service: answered after `slow_s`.
    slow: float = 0.0
    slow_s: float = 2.0
    # Any service: the credentials have expired.
    expire: float = 0.0
    # SQS: told that a message is deleted, which comes again when its lease ends.
    undelete: float = 0.0
    # SQS: a lease that is renewed ends at once.
    end_lease: float = 0.0
    seed: int = 0


@dataclass(kw_only=True)
class Counts:
    """What came by."""

    # By operation, `sqs.SendMessage` for example, and the faults made by name.
    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> str:
        return json.dumps({"requests": dict(self.requests), "faults": dict(self.faults)})


class ServiceProxy:
    """Passes requests on."""

    def __init__(self, upstream: str, faults: Faults, session: aiohttp.ClientSession) -> None:
        self.counts = Counts()
        self._upstream = upstream
        self._faults = faults
        self._session = session
        self._random = random.Random(faults.seed)
        # Answers still to come of a burst, by fault.
        self._bursts: Counter[str] = Counter()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        service, operation = operation_of(request.method, request.path, request.headers, body)
        self.counts.requests[f"{service}.{operation}"] += 1
        refusal = self._refusal(service)
        if refusal is not None:
            return refusal
        if self._draw("slow", self._faults.slow):
            await asyncio.sleep(self._faults.slow_s)
        changed, kept = self._without_deletions(operation, self._with_leases_that_end(operation, body))
        if changed is None:
            status, headers, answer = 200, dict(_JSON), b"{}"
        else:
            status, headers, answer = await self._pass_on(request, changed)
        if kept:
            answer = _as_if_deleted(answer, kept)
        if status < 300 and self._draw("lose", self._faults.lose):
            return _error(service, 500, "InternalFailure", "the answer was lost")
        return web.Response(status=status, headers=headers, body=answer)

    async def _pass_on(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        # The host stays the client's: function URLs and signatures are about it.
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP[:-1]}
        url = f"{self._upstream}{request.raw_path}"
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            content = await answer.read()
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
            return answer.status, kept, content

    def _refusal(self, service: str) -> web.Response | None:
        faults = self._faults
        if self._draw("throttle", faults.throttle, burst=True):
            status, code = _THROTTLED.get(service, (400, "ThrottlingException"))
            return _error(service, status, code, "slow down")
        if service == "dynamodb" and self._draw("throughput", faults.throughput, burst=True):
            return _error(service, 400, "ProvisionedThroughputExceededException", "the level is exceeded")
        if self._draw("refuse", faults.refuse):
            return _error(service, 500, "InternalFailure", "try again")
        if self._draw("expire", faults.expire):
            code = "ExpiredToken" if service in ("s3", "sns", "sts") else "ExpiredTokenException"
            return _error(service, 403 if service in ("s3", "sns", "sts") else 400, code, "the token has expired")
        return None

    def _with_leases_that_end(self, operation: str, body: bytes) -> bytes:
        """A batch of renewals, some of which give the message back."""
        if operation != "ChangeMessageVisibilityBatch" or not self._faults.end_lease:
            return body
        content = json.loads(body)
        for entry in content["Entries"]:
            if entry.get("VisibilityTimeout") and self._draw("end_lease", self._faults.end_lease):
                entry["VisibilityTimeout"] = 0
        return json.dumps(content).encode()

    def _without_deletions(self, operation: str, body: bytes) -> tuple[bytes | None, list[str]]:
        """A batch of deletions without some of them, None where none is left, and the ids of those."""
        if operation != "DeleteMessageBatch" or not self._faults.undelete:
            return body, []
        content = json.loads(body)
        kept = [entry["Id"] for entry in content["Entries"] if self._draw("undelete", self._faults.undelete)]
        content["Entries"] = [entry for entry in content["Entries"] if entry["Id"] not in kept]
        return json.dumps(content).encode() if content["Entries"] else None, kept

    def _draw(self, name: str, chance: float, *, burst: bool = False) -> bool:
        if self._bursts[name]:
            self._bursts[name] -= 1
        elif chance and self._random.random() < chance:
            self._bursts[name] = _BURST - 1 if burst else 0
        else:
            return False
        self.counts.faults[name] += 1
        return True


def _as_if_deleted(answer: bytes, ids: list[str]) -> bytes:
    content = json.loads(answer)
    content.setdefault("Successful", []).extend({"Id": each} for each in ids)
    return json.dumps(content).encode()


_JSON = {"Content-Type": "application/x-amz-json-1.0"}
_THROTTLED = {
    "dynamodb": (400, "ThrottlingException"),
    "s3": (503, "SlowDown"),
    "sqs": (400, "RequestThrottled"),
    "sns": (400, "Throttling"),
}
_XML_SERVICES = ("s3", "sns", "sts", "iam", "cloudformation")


def operation_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> tuple[str, str]:
    """Service and operation of a request, as far as its form tells."""
    target = headers.get("X-Amz-Target", "")
    if target:
        prefix, _, operation = target.partition(".")
        return _SERVICES.get(prefix, prefix.lower()), operation
    scope = headers.get("Authorization", "").partition("Credential=")[2].split("/")
    service = scope[3] if len(scope) > 3 else "unsigned"
    if headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
        return service, parse_qs(body.decode("utf-8", "replace")).get("Action", ["?"])[0]
    return service, method if service == "s3" else f"{method} {path}"


_SERVICES = {"AmazonSQS": "sqs", "DynamoDB_20120810": "dynamodb", "Logs_20140328": "logs"}


def _error(service: str, status: int, code: str, message: str) -> web.Response:
    if service == "s3":
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return web.Response(status=status, body=text.encode(), content_type="application/xml")
    if service in _XML_SERVICES:
        error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error>"
        text = f"<ErrorResponse>{error}</ErrorResponse>"
        return web.Response(status=status, body=text.encode(), content_type="text/xml")
    content = json.dumps({"__type": code, "message": message}).encode()
    return web.Response(
        status=status,
        body=content,
        content_type="application/x-amz-json-1.0",
        headers={"x-amzn-query-error": f"{code};Sender"},
    )


# ---------------------------------------------------------------- the process


async def serve(upstream: str, folder: Path, faults: Faults) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
        proxy = ServiceProxy(upstream, faults, session)
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_route("*", "/{path:.*}", proxy.handle)
        # Whoever waits for a message when it ends waits in vain.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=False, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert runner.addresses
        _write(folder / "url", f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            while not stop.is_set():
                _write(folder / "counts.json", proxy.counts.to_json())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), 1.0)
        finally:
            await runner.cleanup()
            _write(folder / "counts.json", proxy.counts.to_json())


def _write(path: Path, text: str) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(text)
    os.replace(aside, path)


@dataclass(frozen=True, kw_only=True)
class RunningProxy:
    """A proxy process."""

    url: str
    folder: Path

    def counts(self) -> Counts:
        """At most a second old; exact once the process has ended."""
        content: dict[str, Any] = json.loads((self.folder / "counts.json").read_text())
        return Counts(requests=Counter(content["requests"]), faults=Counter(content["faults"]))


@contextmanager
def running_proxy(upstream: str, folder: Path, faults: Faults | None = None) -> Iterator[RunningProxy]:
    """A proxy before `upstream`; it ends with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [upstream, str(folder), json.dumps(asdict(faults or Faults()))]
    process = subprocess.Popen([sys.executable, "-m", "tests.aws.service_proxy", *arguments])
    try:
        give_up = time.monotonic() + 30.0
        while not (folder / "url").exists():
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError("the service proxy does not start")
            time.sleep(0.02)
        yield RunningProxy(url=(folder / "url").read_text(), folder=folder)
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), Faults(**json.loads(sys.argv[3]))))
