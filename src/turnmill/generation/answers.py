"""What a replica says about one call: its record, and the message that follows from the record or from an error."""

import time

import msgspec

from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineResult
from turnmill.generation.replies import ReadReply
from turnmill.generation.stored import parent_key
from turnmill.ports import Leased
from turnmill.records import Call, GenerateRequest, GenerateResponse, Version, call_key, decode


class Parent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a replica needs of a recorded call to go on from it."""

    key: str
    digest: str
    # Its last token ends the turn; else the reply was cut before.
    has_ended: bool


class Received(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A leased request that could be read."""

    request: GenerateRequest
    # Of the record that it asks for, and of the call that it continues.
    key: str
    parent_key: str | None
    receipt: str
    # It was delivered or sent before, so that it may be answered already.
    is_repeated: bool


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request on its way through the engine."""

    received: Received
    # None without a parent.
    parent: Parent | None
    # Tokens of the new messages, as rendered, and of what the reply begins with.
    new_ids: list[int]
    # Text of the latter; "" where the reply is free.
    begun: str
    # Weights that serve it.
    version: Version


class Sampled(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sampled call in its stored form."""

    digest: str
    value: bytes
    finish_reason: str
    has_ended: bool
    num_sampled: int


def received_of(leased: Leased) -> Received:
    """Raises `msgspec.DecodeError` for a message that is no generate request."""
    request = decode(leased.body, GenerateRequest)
    return Received(
        request=request,
        key=call_key(request.run_id, request.purpose, request.sample_id, request.step_id),
        parent_key=parent_key(request) if request.parent else None,
        receipt=leased.receipt,
        is_repeated=leased.num_receives > 1 or request.epoch > 0,
    )


def parent_of(call: Call, end_ids: frozenset[int]) -> Parent:
    """A recorded call as the parent of others."""
    return Parent(key=call.key, digest=call.digest, has_ended=call.num_sampled > 0 and call.token_ids[-1] in end_ids)


def sampled_of(job: Job, result: EngineResult, reply: ReadReply, end_ids: frozenset[int]) -> Sampled:
    """The record of a call that was sampled; `reply` is what its tokens say."""
    request = job.received.request
    trainable = int(request.sampling.is_trainable)
    call = Call(
        run_id=request.run_id,
        purpose=request.purpose,
        sample_id=request.sample_id,
        call_id=request.step_id,
        attempt=request.attempt,
        parent=request.parent,
        parent_digest=job.parent.digest if job.parent else "",
        choice=request.choice,
        request_digest=request.request_digest,
        sampling=request.sampling,
        messages=request.messages,
        reply=reply.message,
        token_ids=[*job.new_ids, *result.token_ids],
        loss_mask=[0] * len(job.new_ids) + [trainable] * len(result.token_ids),
        logprobs=result.logprobs,
        version=str(job.version),
        finish_reason=reply.finish_reason,
        created_at=time.time(),
        num_choices=request.num_choices,
        tools=None if request.parent else request.tools,
        tool_choice=request.tool_choice,
    )
    digest, value = call.seal()
    has_ended = bool(result.token_ids) and result.token_ids[-1] in end_ids
    return Sampled(
        digest=digest,
        value=value,
        finish_reason=str(reply.finish_reason),
        has_ended=has_ended,
        num_sampled=len(result.token_ids),
    )


def news_of(request: GenerateRequest, sampled: Sampled) -> bytes:
    """The body of the wake-up that brings a recorded call."""
    response = GenerateResponse(
        sample_id=request.sample_id,
        step_id=request.step_id,
        finish_reason=sampled.finish_reason,
        run_id=request.run_id,
        purpose=request.purpose,
    )
    return response.with_call(sampled.value)


def response_of(call: Call) -> GenerateResponse:
    """The wake-up about a call that was recorded before."""
    return GenerateResponse(
        sample_id=call.sample_id,
        step_id=call.call_id,
        finish_reason=str(call.finish_reason),
        run_id=call.run_id,
        purpose=call.purpose,
        call=call,
    )


def refusal_of(request: GenerateRequest, error: GenerationFailed) -> GenerateResponse:
    """The answer to a call that failed."""
    return GenerateResponse(
        sample_id=request.sample_id,
        step_id=request.step_id,
        error={"code": error.code, "message": str(error)},
        run_id=request.run_id,
        purpose=request.purpose,
    )
