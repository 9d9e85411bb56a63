"""Answers of those who generate, put where `SharedSessions` looks for them: what a consumer of generate_response does.

    generate_response -> an error            -> error of its call in the Ask
                      -> of our own replicas -> nothing: the call is recorded already
                      -> a foreign answer    -> Call, by conditional write | an error, where it can't be used

A message may come twice or late: the first record stands, and what belongs to no call that was asked for is dropped.
"""

import json
import logging
import re
import time
from enum import StrEnum
from typing import Any

import msgspec

from turnmill.conversation.bodies import finite
from turnmill.conversation.foreign import find_occurrence
from turnmill.conversation.history import checked_ask, checked_call, read_asks, write_calls
from turnmill.errors import GenerationFailed, RecordCorrupt
from turnmill.ports import RunPorts, Stored, Write
from turnmill.records import (
    Ask,
    Call,
    FinishReason,
    GenerateResponse,
    Run,
    RunKind,
    call_key,
    decode,
    encode,
)

logger = logging.getLogger(__name__)
MALFORMED = "malformed_answer"
_TOKEN = re.compile(r"token_id:(\d{1,9})")
_FINISH = {reason.value: reason for reason in FinishReason}
# What rounding may make of the log-prob of a certain token.
_MAX_LOGPROB = 1e-3


class Outcome(StrEnum):
    """What became of a message of generate_response."""

    # The call was recorded by it.
    RECORDED = "recorded"
    # The call's error was, or that the answer can't be used.
    FAILED = "failed"
    # It was known before.
    KNOWN = "known"
    # No call of that name was asked for by a sample that is played.
    UNKNOWN = "unknown"
    # It is no message of the protocol, and does not say which call it is about.
    UNREADABLE = "unreadable"


async def record_message(ports: RunPorts, run: Run, body: bytes) -> Outcome:
    """`record_response` for a message as it was received, which may hold anything."""
    try:
        return await record_response(ports, run, decode(body, GenerateResponse))
    except msgspec.DecodeError as error:
        failure = _failure_in(body, error)
        if failure is None:
            logger.error("a message in generate_response is unreadable and was dropped: %s", error)
            return Outcome.UNREADABLE
    return await record_response(ports, run, failure)


async def record_response(ports: RunPorts, run: Run, response: GenerateResponse) -> Outcome:
    """Put an answer, or the error in its place, where those who wait for it look. Idempotent."""
    is_foreign = run.kind is RunKind.EXTERNAL
    if response.error is None and not is_foreign:
        return Outcome.KNOWN
    found = await _find_ask(ports, run, response)
    if found is None:
        logger.warning("an answer to no call that was asked for was dropped", extra={"at": response.step_id})
        return Outcome.UNKNOWN
    stored, ask, choice = found
    asked = ask.calls[choice]
    parent_key = None if ask.parent is None else call_key(ask.run_id, ask.purpose, ask.sample_id, ask.parent)
    keys = [ask.key_of(asked), *([parent_key] if parent_key else [])]
    recorded, *parents = await ports.records.get(keys)
    if recorded is not None or asked.error is not None:
        return Outcome.KNOWN
    if response.error is not None:
        return await _fail(ports, stored, ask, choice, response.error)
    parent = None if parent_key is None else _required(parents[0], parent_key)
    try:
        call = call_of(ask, choice, parent, response)
    except GenerationFailed as error:
        logger.error("an answer can't be used: %s", error, extra={"at": keys[0]})
        return await _fail(ports, stored, ask, choice, {"code": error.code, "message": str(error)})
    (is_first,) = await write_calls(ports.records, [call])
    return Outcome.RECORDED if is_first else Outcome.KNOWN


def _failure_in(body: bytes, error: Exception) -> GenerateResponse | None:
    """The failure of the call that a malformed message is about; None where that can't be told."""
    try:
        # Reads what is no JSON but often written: NaN.
        raw = json.loads(body)
        names = {name: raw[name] for name in ("sample_id", "step_id", "run_id", "purpose") if name in raw}
        failure = {"code": MALFORMED, "message": f"the answer is malformed: {error}"}
        return msgspec.convert({**names, "error": failure}, GenerateResponse)
    except (ValueError, TypeError, RecursionError):
        return None


async def _find_ask(ports: RunPorts, run: Run, response: GenerateResponse) -> tuple[Stored, Ask, int] | None:
    """The entry that asked for the call, and the choice that it is."""
    sample_id = response.sample_id
    if run.kind is RunKind.EXTERNAL:
        occurrence, _ = await find_occurrence(ports, run.run_id, sample_id)
        if occurrence is None:
            return None
        sample_id = occurrence.request.sample_id
    for stored in await read_asks(ports.records, run.run_id, response.purpose, sample_id):
        ask = checked_ask(stored)
        for choice, asked in enumerate(ask.calls):
            if asked.step_id == response.step_id and not asked.is_replay:
                return stored, ask, choice
    return None


def _required(stored: Stored | None, key: str) -> Call:
    if stored is None:
        raise RecordCorrupt(f"call {key} is gone on from and is not recorded")
    return checked_call(stored)


async def _fail(ports: RunPorts, stored: Stored, ask: Ask, choice: int, error: dict[str, str]) -> Outcome:
    while True:
        failed = ask.with_error(choice, error)
        (ok,) = await ports.records.write([Write(key=ask.key, value=encode(failed), expected=stored.version)])
        if ok:
            return Outcome.FAILED
        # Sent once more, or failed, in this moment.
        (again,) = await ports.records.get([ask.key])
        if again is None:
            return Outcome.UNKNOWN
        stored, ask = again, checked_ask(again)
        if ask.calls[choice].error is not None:
            return Outcome.KNOWN


# ---------------------------------------------------------------- foreign answers


def call_of(ask: Ask, index: int, parent: Call | None, response: GenerateResponse) -> Call:
    """The sealed call of a v0 answer to choice `index`; raises `GenerationFailed` with the part that can't be used.

    Its tokens are those that were sampled: v0 does not tell those of the prompt. And each choice is an answer with one
    choice: v0 knows no request for several.
    """
    data = response.data
    choices = data.get("choices") if data is not None else None
    if data is None or not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _malformed("data.choices must be a list of one choice")
    choice = choices[0]
    reply = _reply(choice.get("message"))
    token_ids, logprobs = _sampled(choice.get("logprobs"))
    return Call(
        run_id=ask.run_id,
        purpose=ask.purpose,
        sample_id=ask.sample_id,
        call_id=ask.calls[index].call_id,
        attempt=ask.attempt,
        parent=ask.parent,
        parent_digest=parent.digest if parent is not None else "",
        choice=index,
        num_choices=len(ask.calls),
        tools=ask.tools,
        tool_choice=ask.tool_choice,
        request_digest=ask.request_digest,
        sampling=ask.sampling,
        messages=ask.messages,
        reply=reply,
        token_ids=token_ids,
        loss_mask=[int(ask.sampling.is_trainable)] * len(token_ids),
        logprobs=logprobs,
        version=_version(data.get("serving_model_num")),
        finish_reason=_finish_reason(choice.get("finish_reason") or response.finish_reason),
        created_at=time.time(),
    ).sealed()


def _reply(message: Any) -> dict[str, Any]:
    """The assistant's message, with the keys that matter."""
    where = "data.choices[0].message"
    message = message if isinstance(message, dict) else {}
    content, tool_calls = message.get("content"), message.get("tool_calls") or []
    if not isinstance(content, str) and not (content is None and tool_calls):
        raise _malformed(f"{where}.content must be a text, or null beside tool_calls")
    if not isinstance(tool_calls, list):
        raise _malformed(f"{where}.tool_calls must be a list")
    reply: dict[str, Any] = {"role": "assistant", "content": content}
    if tool_calls:
        reply["tool_calls"] = [_tool_call(item, f"{where}.tool_calls[{i}]") for i, item in enumerate(tool_calls)]
    return reply


def _tool_call(item: Any, where: str) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(function, dict):
        raise _malformed(f"{where} must have id and function")
    texts = {
        "id": item.get("id"),
        "function.name": function.get("name"),
        "function.arguments": function.get("arguments"),
    }
    for name, value in texts.items():
        if not isinstance(value, str):
            raise _malformed(f"{where}.{name} must be a text, not {_short(value)}")
    called = {"name": function["name"], "arguments": function["arguments"]}
    return {"id": item["id"], "type": "function", "function": called}


def _sampled(logprobs: Any) -> tuple[list[int], list[float]]:
    """Token ids and log-probs, by position."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        raise _malformed("data.choices[0].logprobs.content must be a list of at least one token")
    token_ids: list[int] = []
    values: list[float] = []
    for index, item in enumerate(content):
        where = f"data.choices[0].logprobs.content[{index}]"
        token, logprob = (item.get("token"), finite(item.get("logprob"))) if isinstance(item, dict) else (None, None)
        match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
        if match is None:
            raise _malformed(f"{where}.token must be token_id:N, not {_short(token)}")
        if logprob is None or logprob > _MAX_LOGPROB:
            raise _malformed(f"{where}.logprob must be a finite number of at most 0")
        token_ids.append(int(match[1]))
        values.append(logprob)
    return token_ids, values


def _version(number: Any) -> str:
    if not isinstance(number, int | str) or isinstance(number, bool) or number == "":
        raise _malformed(f"data.serving_model_num must be the number of the weights, not {_short(number)}")
    return str(number)


def _finish_reason(value: Any) -> FinishReason:
    reason = _FINISH.get(value) if isinstance(value, str) else None
    if reason is None:
        raise _malformed(f"finish_reason must be one of {', '.join(_FINISH)}, not {_short(value)}")
    return reason


def _malformed(what: str) -> GenerationFailed:
    return GenerationFailed(MALFORMED, f"the answer is malformed: {what}")


def _short(value: Any) -> str:
    return repr(value)[:60]
