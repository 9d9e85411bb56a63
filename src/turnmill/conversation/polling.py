"""Answers that come later: 202 with the id of a step, and what asking for that step says.

    POST -> 202 {"step_id": ...} -> pause -> GET .../<step_id> -> 202 -> pause -> GET -> the answer of the POST

A proxy that may not hold a request until its answer is there (a function that is billed by the second) answers so. Two
forms of the later answer are read: the status and body that the POST would have had, and a report of progress,
`{"status": "pending" | "processing" | "completed" | "failed", "result": ..., "error": ...}`.
"""

import random
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec

from turnmill.records import encode

ACCEPTED = 202
# Longest wish to be kept waiting, seconds: below what lies between client and server has patience for.
_HELD_S = 20.0
# An answer that says no more than which step it will be is shorter.
_MAX_STEP_BYTES = 1024


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """How long to wait before trying or asking again: it doubles each time, up to a limit."""

    # Longest first pause, seconds.
    first_s: float
    # Longest pause of all, seconds.
    most_s: float

    def pause_s(self, count: int) -> float:
        """Half to all of the pause before repetition `count` (1, 2, ...) at random, so that clients spread out."""
        return min(self.most_s, self.first_s * 2.0 ** min(count - 1, 30)) * random.uniform(0.5, 1.0)


# A small model answers within the first pauses; a large one is asked for about once a second.
POLL = Pauses(first_s=0.05, most_s=0.8)


def step_of(status: int, body: bytes) -> str | None:
    """The step to ask for, where an answer to a POST is one that comes later; None: it is there, or unreadable."""
    if status != ACCEPTED and (status != 200 or len(body) > _MAX_STEP_BYTES or b'"step_id"' not in body):
        return None
    try:
        step = _STEP.decode(body)
    except msgspec.DecodeError:
        return None
    return step.step_id if not step.choices else None


def step_path(step_id: str) -> str:
    """What is put behind the path of the POST; an id of any form is one segment of it."""
    return "/" + quote(step_id, safe="")


def preference(timeout_s: float) -> dict[str, str]:
    """Headers of a question that may be held until its answer is there, where a server likes to (RFC 7240)."""
    # The answer has the other half of the time to come.
    wait_s = int(min(_HELD_S, timeout_s / 2))
    return {"Prefer": f"wait={wait_s}"} if wait_s else {}


def finished(status: int, body: bytes, *, step_id: str, kind: str = "chat.completion") -> tuple[int, bytes] | None:
    """Status and body that the POST would have had, from the answer to a question for its step; None: still pending.

    `kind` is the `object` of a finished answer; what such a report leaves out of one is filled in.
    """
    if status == ACCEPTED:
        return None
    if status != 200:
        return status, body
    try:
        step = _STEP.decode(body)
    except msgspec.DecodeError:
        return status, body
    if step.choices or step.status is None:
        return status, body
    if step.status in ("pending", "processing"):
        return None
    if step.status == "failed":
        return _failure(step.error)
    if isinstance(step.result, dict):
        return 200, encode({"id": step_id, "object": kind, "created": int(time.time()), **step.result})
    return status, body


class _Step(msgspec.Struct):
    step_id: str | None = None
    status: str | None = None
    result: Any = None
    error: Any = None
    # Of a finished answer.
    choices: msgspec.Raw = msgspec.Raw()


_STEP = msgspec.json.Decoder(_Step)


def _failure(error: Any) -> tuple[int, bytes]:
    """A failed step as the OpenAI error that the POST would have been answered with."""
    fields = dict(error) if isinstance(error, dict) else {"message": str(error or "the generation failed")}
    code = str(fields.get("code") or "generation_failed")
    is_clients = code == "context_length_exceeded" or code.startswith("invalid")
    shaped = {
        "message": str(fields.get("message") or code),
        "type": "invalid_request_error" if is_clients else "server_error",
        "param": fields.get("param"),
        "code": code,
    }
    return (400 if is_clients else 500), encode({"error": shaped})
