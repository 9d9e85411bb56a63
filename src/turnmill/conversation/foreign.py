"""Samples of a foreign trainer, which asks by v0 messages and knows neither attempts nor parents of calls.

    v0 rollout request -> Occurrence + SampleRecord REQUESTED -> rollout_request -> played as any other sample
    Ask -> a generate_request a choice with the whole conversation, under the ids of the wire

The trainer's sample id stays on the wire. What is played under it is a sample of an id of its own, an occurrence: the
same id asked for again, once what was played under it has ended, is another one. The names of steps count up over the
calls of all attempts and occurrences, so that a late answer is never taken for one to another call.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from turnmill import failpoints
from turnmill.config import Config
from turnmill.conversation.bodies import finite
from turnmill.conversation.history import checked_sample
from turnmill.conversation.reports import Report
from turnmill.conversation.requests import ChatRequest
from turnmill.errors import InvalidInput, InvalidRequest
from turnmill.ports import Message, RunPorts, Write
from turnmill.records import (
    PROTOCOL_VERSION,
    Ask,
    Call,
    GenerateRequest,
    Occurrence,
    Purpose,
    RolloutRequest,
    Run,
    RunKind,
    SampleRecord,
    SampleState,
    decode,
    encode,
    occurrence_key,
    sample_key,
)

# Steps of one occurrence: the next one's count on from there.
MAX_STEPS = 100_000
# Of a sample id: as a part of keys it must fit into any store.
MAX_ID_BYTES = 256


# ---------------------------------------------------------------- rollout requests


async def open_occurrence(ports: RunPorts, run: Run, config: Config, request: Mapping[str, Any]) -> SampleRecord:
    """The sample that a v0 rollout request asks for, on its way to a worker.

    Where it was asked for before and has not ended yet, it is that one: a repeated request is no second rollout. Killed
    in between, the next request for it goes on. Raises `InvalidInput` naming the field that is wrong.
    """
    check_external(run)
    asked = parse_rollout_request(request)
    opened: int | None = None
    while True:
        occurrence, version = await find_occurrence(ports, run.run_id, asked.sample_id)
        if occurrence is not None:
            sample = await _sample_of(ports, config, occurrence)
            if sample.wire_id == occurrence.wire_id and (sample.state.is_open or occurrence.index == opened):
                if sample.state is SampleState.REQUESTED and sample.attempt == 0:
                    await _send(ports, sample)
                return sample
        opened = 0 if occurrence is None else occurrence.index + 1
        entry = Occurrence(
            run_id=run.run_id,
            wire_id=asked.sample_id,
            index=opened,
            request=replace(asked, sample_id=occurrence_id(asked.sample_id, opened), run_id=run.run_id),
        )
        # Whoever is first: the sample of the occurrence that stands then is the answer to both.
        await ports.records.write([Write(key=entry.key, value=encode(entry), expected=version)])
        failpoints.hit("occurrence-opened")


async def find_occurrence(ports: RunPorts, run_id: str, wire_id: str) -> tuple[Occurrence | None, int]:
    """The last occurrence of a foreign sample id and the version of its record; None and 0 where there was none."""
    (stored,) = await ports.records.get([occurrence_key(run_id, wire_id)])
    return (None, 0) if stored is None else (decode(stored.value, Occurrence), stored.version)


def occurrence_id(wire_id: str, index: int) -> str:
    """Id of the sample that is played as an occurrence of a foreign sample id."""
    return wire_id if index == 0 else f"{wire_id}~{index}"


async def _sample_of(ports: RunPorts, config: Config, occurrence: Occurrence) -> SampleRecord:
    """The sample of an occurrence, made where it was not yet; that of another foreign id, where it has the same id."""
    request = occurrence.request
    key = sample_key(occurrence.run_id, Purpose.TRAIN, request.sample_id)
    while True:
        (stored,) = await ports.records.get([key])
        if stored is not None:
            return checked_sample(stored)
        now, first_call = time.time(), occurrence.index * MAX_STEPS
        sample = SampleRecord(
            run_id=occurrence.run_id,
            purpose=Purpose.TRAIN,
            sample_id=request.sample_id,
            task_id=occurrence.wire_id,
            group_id=occurrence.wire_id,
            state=SampleState.REQUESTED,
            created_at=now,
            request=request,
            wire_id=occurrence.wire_id,
            deadline=now + config.max_attempts * config.training_timeout,
            first_call=first_call,
            call_bound=first_call,
        )
        await ports.records.write([Write(key=key, value=encode(sample), expected=0)])
        failpoints.hit("occurrence-requested")


async def _send(ports: RunPorts, sample: SampleRecord) -> None:
    message = Message(body=encode(sample.request), group=sample.sample_id, dedup_id=f"{sample.key}#0")
    await ports.rollout_request.send([message])


def check_external(run: Run) -> None:
    """Raises `InvalidInput` for a run whose trainer is ours."""
    if run.kind is not RunKind.EXTERNAL:
        raise InvalidInput(f"run {run.run_id} is of kind {run.kind}: only one of kind external has a foreign trainer")


def parse_rollout_request(raw: Mapping[str, Any]) -> RolloutRequest:
    """A v0 rollout request; unknown keys are ignored. Raises `InvalidInput` naming the field that is wrong."""
    if not isinstance(raw, Mapping):
        raise InvalidInput("a rollout request must be a JSON object")
    if raw.get("version", PROTOCOL_VERSION) != PROTOCOL_VERSION:
        raise _wrong("version", f"must be {PROTOCOL_VERSION}", raw)
    sample_id, max_length, data = raw.get("sample_id"), raw.get("max_length"), raw.get("data")
    if not isinstance(sample_id, str) or not sample_id.isprintable() or not 0 < len(_utf8(sample_id)) <= MAX_ID_BYTES:
        raise _wrong("sample_id", f"must be a printable text of 1 to {MAX_ID_BYTES} bytes", raw)
    if not isinstance(max_length, int) or isinstance(max_length, bool) or max_length < 1:
        raise _wrong("max_length", "must be a positive number of tokens", raw)
    if not isinstance(data, dict):
        raise _wrong("data", "must be an object: the metadata of the row", raw)
    return RolloutRequest(
        sample_id=sample_id,
        timestamp=_timestamp(raw),
        max_length=max_length,
        rewards={"range": _range(raw)},
        data=data,
        purpose=Purpose.TRAIN,
    )


def _timestamp(raw: Mapping[str, Any]) -> str:
    value = raw.get("timestamp")
    try:
        datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise _wrong("timestamp", "must be a date and time of ISO 8601", raw) from None
    return str(value)


def _range(raw: Mapping[str, Any]) -> list[float]:
    rewards = raw.get("rewards")
    given = rewards.get("range") if isinstance(rewards, dict) else None
    ends = [finite(end) for end in given] if isinstance(given, list) else []
    low, high = ends if len(ends) == 2 else (None, None)
    if low is None or high is None or low > high:
        raise _wrong("rewards", "must be {range: [low, high]} of two finite numbers", raw)
    return [low, high]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _wrong(field: str, what: str, raw: Mapping[str, Any]) -> InvalidRequest:
    found = repr(raw[field])[:60] if field in raw else "missing"
    return InvalidRequest(f"rollout request: {field} {what}; it is {found}", param=field)


# ---------------------------------------------------------------- generate requests


def step_id_of(sample: SampleRecord, call_id: str, number: int) -> str:
    """What the call of this number is named in messages to whoever generates.

    Raises `InvalidRequest` where the sample has made more calls than the names of an occurrence suffice for.
    """
    if sample.wire_id is None:
        return call_id
    if number - sample.call_bound >= MAX_STEPS:
        raise InvalidRequest(f"sample {sample.sample_id} has made {MAX_STEPS} calls, more than are served")
    return f"{sample.wire_id}_{number}"


def check_wire(sample: SampleRecord, request: ChatRequest) -> None:
    """Raises `InvalidRequest` for what v0 has no words for, where a foreign trainer generates."""
    if sample.wire_id is None:
        return
    if request.is_text:
        raise InvalidRequest("completions are not served: a foreign trainer is asked for messages", param="prompt")
    if request.has_token_ids:
        raise InvalidRequest(
            "return_token_ids is not served: a foreign trainer does not tell the tokens of the prompt",
            param="return_token_ids",
            code="unsupported_value",
        )


def generate_request(sample: SampleRecord, ask: Ask, choice: int, path: Sequence[Call]) -> GenerateRequest:
    """What a foreign generator is asked for one choice: the whole conversation, since it knows no calls to go on from.

    `path` are the calls before. The names of tools and the choice among them are ours: v0 ignores keys it doesn't know.
    """
    messages = [message for call in path for message in (*call.messages, call.reply)]
    return GenerateRequest(
        sample_id=sample.wire_id or sample.sample_id,
        step_id=ask.calls[choice].step_id,
        messages=[*messages, *ask.messages],
        tools=path[0].tools if path else ask.tools,
        tool_choice=ask.tool_choice,
        sampling=ask.sampling,
        epoch=ask.epoch,
        run_id=sample.run_id,
        purpose=sample.purpose,
        attempt=ask.attempt,
        request_digest=ask.request_digest,
        max_length=sample.request.max_length,
    )


# ---------------------------------------------------------------- ends


def is_to_be_played_again(sample: SampleRecord, score: float | None, max_attempts: int) -> bool:
    """A foreign trainer replaces no sample that has no score, so another attempt is made while there is one."""
    return sample.wire_id is not None and score is None and sample.attempt - sample.redriven_after < max_attempts


def played_again(sample: SampleRecord, report: Report) -> SampleRecord:
    """The sample as it waits for its next attempt, and why the last one had no score."""
    return replace(sample, state=SampleState.REQUESTED, reason=report.reason, detail=report.detail)
