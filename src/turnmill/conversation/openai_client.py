"""`AsyncTurnmillClient`: OpenAI's client for agents in training; its proxy may answer later, or want signatures.

    create -> openai (idempotency key, retries) -> PollingHttpClient: POST -> 200 | 202 -> GET, GET, ... -> completion
                                                    '-> auth signs every request that is sent, a repeated one anew

Agents call it as they call `AsyncOpenAI`. Waiting for an answer belongs to the HTTP client, which `AsyncOpenAI` takes
as `http_client`: it needs nothing of the library that is not public, `with_options` and `copy` share it, and whoever
can't change the client's class passes it to `AsyncOpenAI`, or to a framework that takes an HTTP client.

| failure | who tries again |
|---|---|
| no connection, no answer in time, 408, 429, 503, 5xx without an error in OpenAI's shape | openai, `max_retries` |
| the same while asking for an answer that comes later | this module, `POLL_TRIES` times in a row; then openai |
| an error in OpenAI's shape: the proxy's answer to the call | nobody: it is the same for the same key |

All tries of one call carry the same Idempotency-Key, so that it is sampled once whatever answer is lost.

A stream says that it may be answered later, too: then the deltas are made here, of the answer that is there.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Self

import anyio
import httpx2
import openai

from turnmill.conversation.polling import ACCEPTED, POLL, Pauses, finished, preference, step_of, step_path
from turnmill.conversation.streaming import CONTENT_TYPE, events_of
from turnmill.errors import InvalidInput

POLL_TRIES = 8
# About a minute of pauses: as long as a proxy may take to come back.
MAX_RETRIES = 10
_RETRY = Pauses(first_s=0.25, most_s=8.0)
# A server that is busy says for how long, but not for ever.
_MOST_RETRY_AFTER_S = 30.0
_PASSING = (408, 429, 500, 502, 503, 504)
# `object` of a finished answer, by the end of the path.
_KINDS = {"/chat/completions": "chat.completion", "/completions": "text_completion"}
# Of a POST, and without meaning for the question what became of it.
_POST_ONLY = ("content-length", "content-type", "host", "idempotency-key", "prefer", "transfer-encoding")
# Where a server says with 200 that the answer comes later, this stands at the beginning of what it says.
_STEP_ID, _STEP_ID_WITHIN = b'"step_id"', 200
# By which a server tells openai whether to try again; what a server says comes first.
_RETRY_HEADER = "x-should-retry"
# What openai demands and the proxy, which finds its secret in the path, does not look at.
_NO_KEY = "none"


class PollingHttpClient(httpx2.AsyncClient):
    """An `httpx2.AsyncClient` that waits for completions which a server answers with 202.

    It takes all arguments of one, with openai's defaults: 600 s for an exchange, 5 s to connect.
    """

    def __init__(
        self, *, poll_interval_s: float = POLL.most_s, max_wait_s: float | None = None, **options: Any
    ) -> None:
        """`poll_interval_s` is the longest pause between two questions for an answer; the first ones are shorter.

        `max_wait_s` bounds the wait for one answer; None: the request's read time-out does.
        """
        if poll_interval_s <= 0 or (max_wait_s is not None and max_wait_s <= 0):
            raise InvalidInput("poll_interval_s and max_wait_s must be greater than 0 seconds")
        options.setdefault("timeout", openai.DEFAULT_TIMEOUT)
        options.setdefault("limits", openai.DEFAULT_CONNECTION_LIMITS)
        options.setdefault("follow_redirects", True)
        super().__init__(**options)
        self._pauses = Pauses(first_s=min(POLL.first_s, poll_interval_s), most_s=poll_interval_s)
        self._max_wait_s = max_wait_s

    async def send(self, request: httpx2.Request, *, stream: bool = False, **options: Any) -> httpx2.Response:
        """The answer, also where it comes later; raises as any other client, and `openai.APITimeoutError`."""
        kind = _kind_of(request)
        if stream and kind is not None and "prefer" not in request.headers and _stream_options(request) is not None:
            request.headers.update(preference(_longest_s(request.extensions["timeout"]["read"], self._max_wait_s)))
        response = await super().send(request, stream=stream, **options)
        status = response.status_code
        if request.method == "POST" and (
            status == ACCEPTED or (status == 200 and not stream and _STEP_ID in response.content[:_STEP_ID_WITHIN])
        ):
            step_id = step_of(status, await response.aread())
            if kind is not None and step_id is not None:
                response = await self._answer_of(request, step_id, kind, options)
            elif kind is not None and status == ACCEPTED:
                why = "the answer comes later, but nothing says where"
                raise openai.APIResponseValidationError(response, response.text, message=why)
        if response.status_code >= 400 and _RETRY_HEADER not in response.headers:
            response.headers[_RETRY_HEADER] = "true" if _may_pass(response, await response.aread()) else "false"
        return response

    async def _answer_of(
        self, request: httpx2.Request, step_id: str, kind: str, options: Mapping[str, Any]
    ) -> httpx2.Response:
        question = self._question(request, step_id)
        with anyio.move_on_after(self._max_wait_s or question.extensions["timeout"]["read"]):
            response, status, body = await self._ask(question, step_id, kind, options)
            stream_options = _stream_options(request)
            if status != 200 or stream_options is None:
                return _as_answer(request, response, status, body)
            events = events_of(json.loads(body), has_usage=bool(stream_options.get("include_usage")))
            return _as_answer(request, response, status, events, content_type=CONTENT_TYPE)
        # None of httpx's: openai would begin anew after one of them.
        raise openai.APITimeoutError(request=request)

    async def _ask(
        self, question: httpx2.Request, step_id: str, kind: str, options: Mapping[str, Any]
    ) -> tuple[httpx2.Response, int, bytes]:
        """The answer that is final, with the status and body that the POST would have had."""
        num_asked = num_failed = 0
        pause_s = self._pauses.pause_s(1)
        while True:
            await anyio.sleep(pause_s)
            try:
                response = await super().send(question, **options)
            except httpx2.TransportError:
                num_failed += 1
                if num_failed >= POLL_TRIES:
                    raise
                pause_s = _RETRY.pause_s(num_failed)
                continue
            answer = finished(response.status_code, response.content, step_id=step_id, kind=kind)
            if answer is None:
                num_asked += 1
                num_failed = 0
                pause_s = self._pauses.pause_s(num_asked + 1)
            elif _may_pass(response, response.content) and num_failed + 1 < POLL_TRIES:
                num_failed += 1
                pause_s = _retry_after_s(response) or _RETRY.pause_s(num_failed)
            else:
                return response, *answer

    def _question(self, request: httpx2.Request, step_id: str) -> httpx2.Request:
        path, query = request.url.raw_path.split(b"?")[0], request.url.query
        raw_path = path + step_path(step_id).encode() + (b"?" + query if query else b"")
        headers = [(name, value) for name, value in request.headers.multi_items() if name not in _POST_ONLY]
        timeout = httpx2.Timeout(**request.extensions["timeout"])
        headers += preference(_longest_s(timeout.read, self._max_wait_s)).items()
        return self.build_request("GET", request.url.copy_with(raw_path=raw_path), headers=headers, timeout=timeout)


class AsyncTurnmillClient(openai.AsyncOpenAI):
    """OpenAI's client for a proxy of Turnmill: what an agent can do with `AsyncOpenAI`, it can do with this.

    `base_url` is that of a rollout (`<proxy>/a/<secret>/v1`), or `<proxy>/v1` with the secret as `api_key`.
    """

    def __init__(
        self,
        *,
        base_url: str | httpx2.URL | None = None,
        auth: httpx2.Auth | None = None,
        poll_interval_s: float = POLL.most_s,
        max_wait_s: float | None = None,
        report_secret: str | None = None,
        http_client: PollingHttpClient | None = None,
        **options: Any,
    ) -> None:
        """Of `AsyncOpenAI`, with these of its own:

        `auth` signs every request, where the proxy asks for it. `poll_interval_s` and `max_wait_s` are explained at
        `PollingHttpClient`; one that is given as `http_client` has been told all three. `report_secret` is the one
        that belongs to the rollout, for `report_rollout`; keep it from the agent's code.
        """
        if base_url is None and not os.environ.get("OPENAI_BASE_URL"):
            raise InvalidInput("base_url is missing: it is the base_url of the rollout, or <proxy>/v1")
        if http_client is None:
            http_client = PollingHttpClient(auth=auth, poll_interval_s=poll_interval_s, max_wait_s=max_wait_s)
        elif not isinstance(http_client, PollingHttpClient):
            raise InvalidInput(
                f"http_client is a {type(http_client).__name__}, which takes a 202 for an answer: pass a "
                "turnmill.PollingHttpClient, which takes the same arguments"
            )
        elif auth is not None:
            raise InvalidInput("auth has no effect beside http_client: make it PollingHttpClient(auth=...)")
        options.setdefault("max_retries", MAX_RETRIES)
        if options.get("api_key") is None:
            # The user's own key is for OpenAI, not for a proxy.
            options["api_key"] = _NO_KEY
        super().__init__(base_url=base_url, http_client=http_client, **options)
        # The library makes a key for each call, and sends it where it is told the header's name: OpenAI has none.
        self._idempotency_header = "Idempotency-Key"
        self._report_secret = report_secret

    def copy(self, *, report_secret: str | None = None, **options: Any) -> Self:
        """As `AsyncOpenAI.copy`; the copy shares the connections."""
        extra = {"report_secret": report_secret or self._report_secret, **options.pop("_extra_kwargs", {})}
        return super().copy(_extra_kwargs=extra, **options)

    with_options = copy

    async def report_rollout(
        self,
        sample_id: str,
        aggregate_reward_score: float | None,
        metrics_list: Mapping[str, float] | Sequence[Mapping[str, Any]] = (),
        *,
        turn_rewards: Mapping[str, float] | None = None,
        reason: str | None = None,
        stop_reason: str | None = None,
        detail: str | None = None,
        report_secret: str | None = None,
    ) -> None:
        """Tell how the rollout ended: its reward, or None and the `reason` why there is none (`env_error`, ...).

        `metrics_list` holds values by name, or items with `name`, `value` and `type` ("Reward" or "Metric");
        `turn_rewards` what single calls are worth, by the ids of their completions. Saying the same again is no error,
        so that it is repeated until it is recorded. Raises `openai.ConflictError` when the attempt is over or was
        reported otherwise, `openai.BadRequestError` for content that the proxy refuses.
        """
        secret = report_secret or self._report_secret
        metrics: Sequence[Mapping[str, Any]] = (
            [{"name": name, "value": value, "type": "Metric"} for name, value in metrics_list.items()]
            if isinstance(metrics_list, Mapping)
            else metrics_list
        )
        optional = {
            "turn_rewards": None if turn_rewards is None else dict(turn_rewards),
            "reason": reason,
            "stop_reason": stop_reason,
            "detail": detail,
        }
        body = {
            "id": sample_id,
            "aggregate_reward_score": aggregate_reward_score,
            "metrics_list": [dict(item) for item in metrics],
            **{name: value for name, value in optional.items() if value is not None},
        }
        headers = {"Authorization": f"Bearer {secret}"} if secret else {"Authorization": openai.Omit()}
        await self.post(self._report_url(), cast_to=object, body=body, options={"headers": headers})

    def _report_url(self) -> str:
        path = self.base_url.path.rstrip("/").removesuffix("/v1")
        root, marker, secret = path.rpartition("/a/")
        if marker and "/" not in secret:
            path = root
        return str(self.base_url.copy_with(raw_path=f"{path}/v1/rollouts/report".encode()))


def _kind_of(request: httpx2.Request) -> str | None:
    """What a finished answer to the request is; None: it is no completion."""
    path = request.url.path
    return next((kind for end, kind in _KINDS.items() if path.endswith(end)), None)


def _stream_options(request: httpx2.Request) -> dict[str, Any] | None:
    """Of a request for a stream, {} where it has none; None: it asks for an answer as a whole."""
    body = json.loads(request.content) if b'"stream"' in request.content else None
    if not isinstance(body, dict) or body.get("stream") is not True:
        return None
    return body.get("stream_options") or {}


def _longest_s(*limits: float | None) -> float:
    """The time that all of these limits allow."""
    return min((limit for limit in limits if limit is not None), default=math.inf)


def _may_pass(response: httpx2.Response, body: bytes) -> bool:
    """The answer is an error of the way to the proxy, or of a proxy that goes, and not the proxy's to the request."""
    status = response.status_code
    if status not in _PASSING:
        return False
    return status in (408, 429, 503) or not _is_shaped(body)


def _is_shaped(body: bytes) -> bool:
    """An error in the form of OpenAI's; not the page of a load balancer, nor `{"Message": ...}` of a function."""
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return isinstance(content, dict) and isinstance(content.get("error"), dict)


def _retry_after_s(response: httpx2.Response) -> float | None:
    """What the server asks for in seconds; None: nothing that can be kept."""
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, _MOST_RETRY_AFTER_S) if seconds > 0 else None


def _as_answer(
    request: httpx2.Request,
    response: httpx2.Response,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
) -> httpx2.Response:
    """The answer to the last question as that to the POST."""
    if body is not response.content:
        kept = ("content-length", "content-encoding", "content-type", "transfer-encoding")
        headers = [(name, value) for name, value in response.headers.multi_items() if name not in kept]
        elapsed = response.elapsed
        response = httpx2.Response(
            status, headers=[*headers, ("content-type", content_type)], content=body, request=request
        )
        response.elapsed = elapsed
    response.request = request
    return response
