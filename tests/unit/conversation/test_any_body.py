"""Whatever a client, an environment or a worker sends is read or refused by name: nothing of it is an error of ours."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.conversation.speech import WEATHER
from turnmill.conversation.branches import request_digest
from turnmill.conversation.messages import Heard
from turnmill.conversation.reports import parse_report
from turnmill.conversation.requests import Offer, parse_chat, parse_text
from turnmill.errors import InvalidRequest
from turnmill.records import encode
from turnmill.serving.requests import parse_wish

# JSON that is none, or that few expect.
RAW = [
    *(b"1e999", b"-0", b"01", b"NaN", b"1" * 5000, b"9" * 40, b'{"a":1,"a":2}', b'"\xff"', b'"\\ud800"'),
    *(b'"\\ud83d\\ude00"', b'"\\u0000"', b"[" * 200 + b"]" * 200, b"[" * 100_000),
]
TEXTS = ["", "a", "user", "assistant", "tool", "developer", "text", "function", "required", "\ufdd0", "é😀", "x" * 300]
NUMBERS = [0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, True, False, None]
KEYS = (
    "model messages tools prompt request_id max_tokens temperature top_p top_k stop seed n stream stream_options "
    "return_token_ids tool_choice logprobs parallel_tool_calls logit_bias functions response_format role content name "
    "tool_calls tool_call_id id type arguments parameters properties required reason detail value bogus"
).split()
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHAT: dict[str, Any] = {
    "model": "turnmill",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain", "tool_call_id": "call12345"},
    ],
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "temperature": 0.7,
    "n": 2,
    "stop": ["x"],
    "seed": 1,
    "max_tokens": 5,
    "logprobs": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
}
# `turnmill serve` tells no tokens, and log-probs only where nothing is streamed.
SERVED = {key: value for key, value in CHAT.items() if key not in ("logprobs", "return_token_ids")}
TEXT: dict[str, Any] = {"model": "turnmill", "prompt": "abc", "max_tokens": 4, "stop": "x", "seed": 3}
REPORT: dict[str, Any] = {
    "id": "task_0",
    "aggregate_reward_score": 0.5,
    "detail": "d",
    "metrics_list": [{"name": "m", "value": 1, "type": "Metric"}],
}


def chat(body: bytes) -> None:
    request = parse_chat(body, Offer(takes_sampling=True), Heard())
    said = request.said.since(0)
    # What becomes of it in the records and in the queues.
    request_digest(said, request.tools, request.sampling, request.tool_choice, request.num_choices)
    encode([said, request.tools, request.request_id, request.sample_id])


def text(body: bytes) -> None:
    encode(parse_text(body, Offer()).said.tail)


def report(body: bytes) -> None:
    encode(parse_report(body).metrics)


def served_chat(body: bytes) -> None:
    parse_wish(body, is_chat=True, temperature=1.0)


def served_text(body: bytes) -> None:
    parse_wish(body, is_chat=False, temperature=1.0)


class Fuzz:
    """Makes bodies of others, by changes that follow from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self, value: dict[str, Any]) -> bytes:
        changed: Any = value
        for _ in range(self._random.choice([0, 1, 1, 1, 2, 3])):
            changed = self._changed(changed)
        written = self._written(changed)
        if self._random.random() < 0.05:
            place = self._random.randrange(len(written) + 1)
            written = written[:place] + bytes([self._random.randrange(256)]) + written[place + 1 :]
        return written

    def _changed(self, value: Any) -> Any:
        """One part of it is another one, is missing, or is there beside others."""
        luck = self._random.random()
        if not value or not isinstance(value, dict | list) or luck < 0.2:
            return self._any()
        if isinstance(value, list):
            index = self._random.randrange(len(value))
            put = [] if luck < 0.3 else [self._any(), value[index]] if luck < 0.4 else [self._changed(value[index])]
            return [*value[:index], *put, *value[index + 1 :]]
        key = self._random.choice(list(value))
        if luck < 0.3:
            return {name: item for name, item in value.items() if name != key}
        if luck < 0.45:
            return {**value, self._random.choice(KEYS): self._any()}
        return {**value, key: self._changed(value[key])}

    def _any(self, depth: int = 0) -> Any:
        kind = self._random.choice(["text", "number", "raw", "list", "object"] if depth < 4 else ["text", "number"])
        if kind == "list":
            return [self._any(depth + 1) for _ in range(self._random.randint(0, 3))]
        if kind == "object":
            return {self._random.choice(KEYS): self._any(depth + 1) for _ in range(self._random.randint(0, 4))}
        choices: dict[str, list[Any]] = {"text": TEXTS, "number": NUMBERS, "raw": RAW}
        return self._random.choice(choices[kind])

    def _written(self, value: Any) -> bytes:
        if isinstance(value, bytes):
            return value
        if isinstance(value, list):
            return b"[" + b",".join(map(self._written, value)) + b"]"
        if isinstance(value, dict):
            items = [json.dumps(key).encode() + b":" + self._written(item) for key, item in value.items()]
            return b"{" + b",".join(items) + b"}"
        return json.dumps(value, ensure_ascii=self._random.random() < 0.5).encode()


@pytest.mark.parametrize(
    ("read", "whole"),
    [(chat, CHAT), (text, TEXT), (report, REPORT), (served_chat, SERVED), (served_text, TEXT)],
    ids=["chat", "text", "report", "served chat", "served text"],
)
def test_whatever_is_sent_is_read_or_refused_by_name(read: Callable[[bytes], None], whole: dict[str, Any]) -> None:
    fuzz, num_read = Fuzz(1), 0
    for _ in range(4000):
        body = fuzz.body(whole)
        try:
            read(body)
            num_read += 1
        except InvalidRequest as refusal:
            # It can be told.
            encode([str(refusal), refusal.param, refusal.code])
    assert 100 < num_read < 3900
