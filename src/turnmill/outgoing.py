"""One JSON POST to somebody else's server, in a thread: alerts and judges are too few to need a pool of connections.

urllib, because it is in the standard library, checks certificates and honours HTTPS_PROXY. Redirects are not followed:
they would carry a signed body, or a secret, to a place that nobody configured.
"""

import asyncio
import contextlib
import email.utils
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import IO, TypeVar

from turnmill import __version__
from turnmill.errors import DeliveryFailed, printable

T = TypeVar("T")
# Of an answer that is only ever shown, bytes.
_MOST_SHOWN = 2000


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the server said."""

    status: int
    body: str
    retry_after_s: float | None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """None: the redirect itself is the answer."""


_OPENER = urllib.request.build_opener(_NoRedirects)


async def post_json(
    url: str, body: bytes, *, headers: Mapping[str, str] = {}, timeout_s: float, most_bytes: int = _MOST_SHOWN
) -> Answer:
    """Send `body`, and read `most_bytes` of the answer.

    Raises `DeliveryFailed` (naming neither URL nor headers) where no answer came in `timeout_s`.

    A server that trickles its answer is left alone after `timeout_s` too; its thread ends with the connection.
    """
    request = urllib.request.Request(url, data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    request.add_header("User-Agent", f"turnmill/{__version__}")
    for name, value in headers.items():
        request.add_header(name, value)
    try:
        async with asyncio.timeout(timeout_s):
            return await _in_thread(lambda: _post(request, timeout_s, most_bytes))
    except TimeoutError:
        raise DeliveryFailed(f"no answer within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        raise DeliveryFailed(f"can't be reached: {printable(str(error.reason), limit=200)}") from None
    except (http.client.HTTPException, OSError, ValueError) as error:
        # No text of the error: that of a bad URL or header holds it.
        raise DeliveryFailed(f"the exchange broke off: {type(error).__name__}") from None


def check_status(answer: Answer, expected: tuple[int, ...]) -> None:
    """Raises `DeliveryFailed` for another status: final for 3xx and 4xx but 408 and 429, to be repeated otherwise."""
    if answer.status in expected:
        return
    said = f": {printable(answer.body, limit=_MOST_SHOWN)}" if answer.body.strip() else ""
    raise DeliveryFailed(
        f"HTTP {answer.status}{said}",
        is_final=300 <= answer.status < 500 and answer.status not in (408, 429),
        retry_after_s=answer.retry_after_s,
    )


def _post(request: urllib.request.Request, timeout_s: float, most_bytes: int) -> Answer:
    try:
        with _OPENER.open(request, timeout=timeout_s) as response:
            return _answer(response.status, response.headers, response.read(most_bytes))
    except urllib.error.HTTPError as error:
        with error:
            return _answer(error.code, error.headers, error.read(_MOST_SHOWN))


def _answer(status: int, headers: Message, body: bytes) -> Answer:
    return Answer(
        status=status,
        body=body.decode("utf-8", "replace"),
        retry_after_s=_seconds(headers.get("Retry-After")),
    )


def _seconds(retry_after: str | None) -> float | None:
    """Seconds from now (RFC 9110, 10.2.3: a number or a date); None for what is neither."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of `work` in a daemon thread: unlike a pool's, one that hangs does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome)  # type: ignore[arg-type]

    def run() -> None:
        outcome: T | None = None
        failure: BaseException | None = None
        try:
            outcome = work()
        except BaseException as error:  # handed to the one who waits
            failure = error
        # RuntimeError: the loop is closed, and so nobody waits.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, outcome, failure)

    threading.Thread(target=run, name="outgoing", daemon=True).start()
    return await future
