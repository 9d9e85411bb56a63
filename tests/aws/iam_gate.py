"""A server that does before a proxy what IAM does before the URL of a function: it lets signed requests through.

    request -> signature worked out again, by the letter of the specification -> 403 | the proxy, with what came

Written from the description of Signature Version 4, without the library that signs.
"""

import datetime
import hashlib
import hmac
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote

import aiohttp
from aiohttp import web

REGION = "us-east-1"
# How far the clocks may be apart.
_SKEW = datetime.timedelta(minutes=5)
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d{8})/([^/]+)/([^/]+)/aws4_request, SignedHeaders=([^,]+), "
    r"Signature=([0-9a-f]{64})"
)
_DROPPED = ("authorization", "host", "content-length", "transfer-encoding", "connection")


@dataclass
class Key:
    """What an access key is good for."""

    secret: str
    token: str | None = None
    is_expired: bool = False


@dataclass
class Gate:
    """`backend` is the proxy's URL."""

    backend: str
    keys: dict[str, Key]
    url: str = ""
    # Access keys and paths of the requests that were let through, and why others were not.
    passed: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    # Called with each request that is let through; what it returns is answered instead.
    instead: Callable[[web.Request], web.Response | None] = lambda request: None

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        reason = self._refusal(request, body)
        if reason is not None:
            self.refused.append(reason)
            return web.json_response({"Message": reason}, status=403)
        other = self.instead(request)
        if other is not None:
            return other
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _DROPPED}
        async with (
            aiohttp.ClientSession() as http,
            http.request(request.method, self.backend + request.raw_path, data=body, headers=headers) as answer,
        ):
            kept = {"Content-Type": answer.headers["Content-Type"]}
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)

    def _refusal(self, request: web.Request, body: bytes) -> str | None:
        match = _AUTHORIZATION.fullmatch(request.headers.get("Authorization", ""))
        if match is None:
            return "Missing Authentication Token"
        access_key, date, region, service, names, signature = match.groups()
        key = self.keys.get(access_key)
        if key is None or key.token != request.headers.get("X-Amz-Security-Token"):
            return "The security token included in the request is invalid."
        if key.is_expired:
            return "The security token included in the request is expired"
        stamp = request.headers["X-Amz-Date"]
        signed_at = datetime.datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=datetime.UTC)
        if abs(datetime.datetime.now(datetime.UTC) - signed_at) > _SKEW or stamp[:8] != date:
            return "Signature expired"
        needed = {"host"} | {name.lower() for name in request.headers if name.lower().startswith("x-amz-")}
        if not needed <= set(names.split(";")) or (region, service) != (REGION, "lambda"):
            return "Credential should be scoped to a valid region and service, and all x-amz headers signed"
        scope = f"{date}/{region}/{service}/aws4_request"
        canonical = hashlib.sha256(_canonical(request, names.split(";"), body).encode()).hexdigest()
        expected = _sign(key.secret, scope, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{canonical}")
        if not hmac.compare_digest(expected, signature):
            return "The request signature we calculated does not match the signature you provided."
        self.passed.append(access_key)
        self.paths.append(request.path)
        return None


def _canonical(request: web.Request, names: list[str], body: bytes) -> str:
    path, _, query = request.raw_path.partition("?")
    pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in parse_qsl(query, True))
    return "\n".join(
        [
            request.method,
            # Encoded once more than it is sent, for all services but S3.
            quote(path, safe="/-_.~"),
            "&".join(f"{name}={value}" for name, value in pairs),
            *[f"{name}:{' '.join(','.join(request.headers.getall(name)).split())}" for name in names],
            "",
            ";".join(names),
            hashlib.sha256(body).hexdigest(),
        ]
    )


def _sign(secret: str, scope: str, text: str) -> str:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


@asynccontextmanager
async def guarded(backend: str, **keys: Key) -> AsyncIterator[Gate]:
    gate = Gate(backend, dict(keys))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", gate.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    gate.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield gate
    finally:
        await runner.cleanup()
