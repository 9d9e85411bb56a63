"""What a replica says about one call: its record, and the message that follows from the record or from an error."""

import time
from dataclasses import dataclass
from typing import Any

from turnmill.errors import GenerationFailed
from turnmill.generation.engine import EngineResult
from turnmill.records import Call, FinishReason, GenerateRequest, GenerateResponse, Version, call_key


@dataclass(frozen=True, kw_only=True)
class Job:
    """A leased request on its way through the engine."""

    request: GenerateRequest
    receipt: str
    # None without a parent.
    parent: Call | None
    # Tokens of the new messages, as rendered.
    new_ids: list[int]
    # Weights that serve it.
    version: Version

    @property
    def key(self) -> str:
        return request_key(self.request)


def request_key(request: GenerateRequest) -> str:
    """The key of the record that the request asks for."""
    return call_key(request.run_id, request.purpose, request.sample_id, request.step_id)


def call_of(job: Job, result: EngineResult, text: str) -> Call:
    """The sealed record of a call that was sampled; `text` is the decoded reply."""
    request = job.request
    finish_reason = result.finish_reason
    for stop in request.sampling.stop:
        # Stop strings cut the text alone: the tokens are what was sampled.
        head, found, _ = text.partition(stop) if stop else (text, "", "")
        if found:
            text, finish_reason = head, FinishReason.STOP
    trainable = int(request.sampling.is_trainable)
    return Call(
        run_id=request.run_id,
        purpose=request.purpose,
        sample_id=request.sample_id,
        call_id=request.step_id,
        attempt=request.attempt,
        parent=request.parent,
        parent_digest=job.parent.digest if job.parent else "",
        choice=0,
        request_digest=request.request_digest,
        sampling=request.sampling,
        messages=request.messages,
        reply={"role": "assistant", "content": text},
        token_ids=[*job.new_ids, *result.token_ids],
        loss_mask=[0] * len(job.new_ids) + [trainable] * len(result.token_ids),
        logprobs=result.logprobs,
        version=str(job.version),
        finish_reason=finish_reason,
        created_at=time.time(),
    ).sealed()


def response_of(call: Call) -> GenerateResponse:
    """The wake-up that a recorded call gives, in the wire's form."""
    sampled = call.token_ids[len(call.token_ids) - call.num_sampled :]
    choice: dict[str, Any] = {
        "message": call.reply,
        "finish_reason": str(call.finish_reason),
        "logprobs": {
            "content": [
                {"token": f"token_id:{token}", "logprob": logprob}
                for token, logprob in zip(sampled, call.logprobs, strict=True)
            ]
        },
    }
    return GenerateResponse(
        sample_id=call.sample_id,
        step_id=call.call_id,
        data={"choices": [choice], "serving_model_num": Version.parse(call.version).n},
        finish_reason=str(call.finish_reason),
        run_id=call.run_id,
        purpose=call.purpose,
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


def has_ended(call: Call, end_ids: frozenset[int]) -> bool:
    """Its last token ends the turn; else the reply was cut before."""
    return call.num_sampled > 0 and call.token_ids[-1] in end_ids
