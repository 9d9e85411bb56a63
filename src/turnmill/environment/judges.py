"""Judges: models of somebody else that an environment asks, for its rewards as a rule.

    turnmill.toml -> variables of the worker -> passed_on -> the box of the environment -> judge(name) -> complete

An environment knows a judge by its name; where it is and what secret it wants is the deployment's. A judge that does
not answer is no fault of the policy: it decides the rollout (INFRA), whatever a reward function makes of the error.
"""

import asyncio
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from turnmill.config.judges import JudgeSettings
from turnmill.environment.outcomes import Message
from turnmill.environment.watching import WATCH, JudgeUnavailable
from turnmill.errors import DeliveryFailed, InvalidInput
from turnmill.outgoing import check_status, post_json
from turnmill.records import encode

# Settings of the judges that the run names, as JSON; their secrets are in variables of their own.
JUDGES = "TURNMILL_JUDGE_SETTINGS"
# Of an answer, bytes.
_MOST_ANSWER = 4 * 1024 * 1024
# Pauses between tries, seconds: doubling and jittered, unless the judge says when to come again.
_FIRST_PAUSE_S, _MOST_PAUSE_S = 0.5, 30.0


def settings_variable(judges: Iterable[JudgeSettings]) -> dict[str, str]:
    """The variable by which processes know these judges; {} where there are none. It holds no secret."""
    known = list(judges)
    return {JUDGES: encode(known).decode()} if known else {}


def known_judges(environ: Mapping[str, str]) -> tuple[JudgeSettings, ...]:
    """The judges that a process knows."""
    return msgspec.json.decode(environ.get(JUDGES) or "[]", type=tuple[JudgeSettings, ...])


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """All that a box must be given of `environ` for its judges: their settings and their secrets, and nothing else."""
    names = {judge.api_key_env for judge in known_judges(environ)} | {JUDGES}
    return {name: environ[name] for name in sorted(names) if name in environ}


def check_secrets(judges: Iterable[JudgeSettings], environ: Mapping[str, str]) -> None:
    """Raises `InvalidInput` for a judge whose secret is not there, or can't be sent."""
    for judge in judges:
        secret = environ.get(judge.api_key_env, "") if judge.api_key_env else "none"
        if not secret.strip() or not secret.isprintable() or not secret.isascii():
            raise InvalidInput(
                f"judges: {judge.name}: the variable {judge.api_key_env} with its secret is not set, or holds no secret"
            )


def judge(name: str, environ: Mapping[str, str] = os.environ) -> "Judge":
    """The judge that the deployment calls so, for `load_environment`; raises `InvalidInput` where the run has none."""
    judges = {settings.name: settings for settings in known_judges(environ)}
    if name not in judges:
        raise InvalidInput(
            f"judges: the environment asks {name!r}, and the run has {', '.join(judges) or 'none'}: describe it as "
            f"[[judges]] in turnmill.toml, and name it in the run's parameter judges"
        )
    check_secrets([judges[name]], environ)
    return Judge(judges[name], secret=environ.get(judges[name].api_key_env, ""))


class Judge:
    """One judge; asked from any number of rollouts at once."""

    def __init__(self, settings: JudgeSettings, *, secret: str = "", first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._settings = settings
        self._secret = secret.strip()
        self._first_pause_s = first_pause_s
        self._gate = asyncio.Semaphore(settings.max_concurrent)

    async def complete(self, messages: Sequence[Message], **params: Any) -> str:
        """The text of its answer to `messages`; `params` are further fields of the request.

        Raises `JudgeUnavailable` where it gives none after all tries, or an answer that has no text.
        """
        settings = self._settings
        body = encode({"model": settings.model, "max_tokens": settings.max_tokens, "messages": messages, **params})
        watch = WATCH.get(None)
        if watch is not None:
            watch.num_pending += 1
        try:
            async with self._gate:
                return _text_of(await self._ask(body))
        except (DeliveryFailed, msgspec.DecodeError) as error:
            text = str(error).replace(self._secret, "***") if self._secret else str(error)
            away = JudgeUnavailable(f"judge {settings.name}: {text}")
            if watch is not None:
                watch.failure = watch.failure or away
            raise away from None
        finally:
            if watch is not None:
                watch.num_pending -= 1

    async def _ask(self, body: bytes) -> str:
        """The body of its answer; this is the retry owner."""
        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._settings.max_retries + 1),
            wait=self._pause_s,
            retry=retry_if_exception(lambda error: isinstance(error, DeliveryFailed) and not error.is_final),
            reraise=True,
        )
        return await retrying(self._try, body)

    async def _try(self, body: bytes) -> str:
        headers = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        answer = await post_json(
            self._settings.base_url.rstrip("/") + "/chat/completions",
            body,
            headers=headers,
            timeout_s=self._settings.timeout_s,
            most_bytes=_MOST_ANSWER,
        )
        check_status(answer, (200,))
        return answer.body

    def _pause_s(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, DeliveryFailed) and error.retry_after_s is not None:
            return min(error.retry_after_s, _MOST_PAUSE_S)
        pause_s: float = min(_MOST_PAUSE_S, self._first_pause_s * 2 ** (state.attempt_number - 1))
        return pause_s * random.uniform(0.5, 1.0)


class _Message(msgspec.Struct):
    content: str


class _Choice(msgspec.Struct):
    message: _Message


class _Completion(msgspec.Struct):
    choices: list[_Choice]


def _text_of(body: str) -> str:
    """Raises `msgspec.DecodeError` for what is no completion with a text."""
    completion = msgspec.json.decode(body, type=_Completion)
    if not completion.choices:
        raise msgspec.ValidationError("its answer has no choices")
    return completion.choices[0].message.content
