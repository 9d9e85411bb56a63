"""One generation: how it is drawn, asked for, recorded and answered."""

from typing import Any

import msgspec

from turnmill.records.codec import PROTOCOL_VERSION, digest_of, encode
from turnmill.records.keys import ask_key, call_key
from turnmill.records.outcomes import FinishReason, Purpose

# How the stored forms end, and how one is put into the other.
_END = b'"}'
_CALL = b'"call":'
_NO_CALL = b'"call":null}'
# Role of the one message of a call that continues a plain text: its tokens are those of the text, without a template.
TEXT_ROLE = "text"
# Temperatures from here to 0, which is none, are not sampled with: logits divided by less drown in their own noise.
MIN_TEMPERATURE = 0.01


class Sampling(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How tokens are drawn; the log-prob of a token is log-softmax(logits / temperature) over the full vocabulary."""

    temperature: float = 1.0
    # 0: no limit.
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 4096
    stop: tuple[str, ...] = ()
    # Of the client; joins what a call's random numbers follow from, so that two calls of one seed still differ.
    seed: int | None = None

    @property
    def is_trainable(self) -> bool:
        """Tokens drawn greedily or from a truncated support can't be trained (loss mask 0)."""
        return self.temperature > 0 and self.top_k == 0 and self.top_p == 1.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Proxy -> replica: one call."""

    sample_id: str
    # The call id `<sample>_<c>`.
    step_id: str
    # With a parent: only the messages after the parent's reply. Without: the whole conversation.
    messages: list[dict[str, Any]]
    version: str = PROTOCOL_VERSION
    # Call whose tokens this one continues; None starts a conversation.
    parent: str | None = None
    tools: list[dict[str, Any]] | None = None
    # "auto", "none" (no call is read out of the reply), "required", or "function:<name>": the reply then begins with
    # what opens a call of it, which belongs to the prompt.
    tool_choice: str = "auto"
    # Index among the `n` choices of the request, and how many those are.
    choice: int = 0
    num_choices: int = 1
    sampling: Sampling = Sampling()
    # Delivery epoch: a deliberate re-send has the next one.
    epoch: int = 0
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN
    attempt: int = 1
    # Digest of the messages and of all parameters (replay compares it).
    request_digest: str = ""
    # Most tokens of the conversation, prompt included.
    max_length: int = 0


class AskedCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One of the calls that answer a request, as the log knows it."""

    call_id: str
    # The name of the call in generate_request and generate_response: its id, unless the trainer is a foreign one.
    step_id: str
    # The call is one that an earlier attempt had recorded: nothing is generated.
    is_replay: bool = False
    # {"code": ..., "message": ...}: nothing was generated. A call that is recorded in spite of it is the answer.
    error: dict[str, str] | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One chat request and the calls that answer it: an entry in the log of all that a sample's attempts asked.

    The log is kept where several proxies serve a run: an entry is decided on all entries before it, and appended under
    the next index or not at all, with all its choices. After that only `epoch`, `sent_at` and `replica` (sent once
    more) and the errors of its calls change.
    """

    run_id: str
    purpose: Purpose
    sample_id: str
    # Its place in the sample's log, from 0.
    index: int
    # Attempt that asked.
    attempt: int
    # One a choice; the first one's id is the name of the step.
    calls: tuple[AskedCall, ...]
    parent: str | None
    # As in the generate request: only those after the parent's reply. Empty where all calls are replayed.
    messages: list[dict[str, Any]]
    sampling: Sampling
    request_digest: str
    # Of the whole request: what a transport retry repeats.
    identity: str
    # Idempotency-Key or request id.
    idempotency_key: str | None
    # Random: tells two equal requests that want the same index apart.
    nonce: str
    created_at: float
    # None below a parent, whose conversation has those of its beginning.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    # What the answer is to tell of its tokens, for whoever asks for the step later.
    has_logprobs: bool = False
    has_token_ids: bool = False
    epoch: int = 0
    # When the generate requests were last sent, or were about to be, and to which of several replicas.
    sent_at: float = 0.0
    replica: int = 0

    @property
    def key(self) -> str:
        return ask_key(self.run_id, self.purpose, self.sample_id, self.index)

    @property
    def step_id(self) -> str:
        """What the client asks for where the answer is late."""
        return self.calls[0].call_id

    @property
    def call_keys(self) -> list[str]:
        """Of the records that answer it, one a choice."""
        return [self.key_of(call) for call in self.calls]

    def key_of(self, call: AskedCall) -> str:
        return call_key(self.run_id, self.purpose, self.sample_id, call.call_id)

    def with_error(self, choice: int, error: dict[str, str]) -> "Ask":
        """A copy in which that choice has failed."""
        failed = msgspec.structs.replace(self.calls[choice], error=error)
        return msgspec.structs.replace(self, calls=(*self.calls[:choice], failed, *self.calls[choice + 1 :]))


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generation, as a delta on its parent: tokens are append-only along the path of parents.

    `token_ids` = the rendered new messages (mask 0) followed by what was sampled (mask 1). Axes: T positions.
    """

    run_id: str
    purpose: Purpose
    sample_id: str
    call_id: str
    # Attempt that made it.
    attempt: int
    parent: str | None
    # Digest of the parent, "" without one: a chain over the whole conversation.
    parent_digest: str
    # Index among the `n` choices of the request.
    choice: int
    request_digest: str
    sampling: Sampling
    # New input messages of this call and the assistant's reply.
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    token_ids: list[int]
    # 1 exactly on sampled tokens that may be trained, the end-of-turn token included.
    loss_mask: list[int]
    # Log-prob of each sampled token, for the last len(logprobs) positions of token_ids.
    logprobs: list[float]
    # Weights that sampled it.
    version: str
    finish_reason: FinishReason
    created_at: float
    # How many choices the request asked for: of several, only those are trained that the conversation went on from.
    num_choices: int = 1
    # Rendered in the opening; None below a parent, whose conversation has those of its beginning.
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    digest: str = ""

    @property
    def key(self) -> str:
        return call_key(self.run_id, self.purpose, self.sample_id, self.call_id)

    @property
    def num_sampled(self) -> int:
        return len(self.logprobs)

    def expected_digest(self) -> str:
        """What `digest` must be: over the stored form without it."""
        encoded = encode(self)
        # The digest is the last field and, where it is one, plain text.
        return digest_of(encoded[: len(encoded) - len(self.digest) - len(_END)] + _END)

    def sealed(self) -> "Call":
        """A copy that carries its digest."""
        return msgspec.structs.replace(self, digest=self.expected_digest())

    def seal(self) -> tuple[str, bytes]:
        """Digest and stored form, digest included, of a call that carries none yet."""
        encoded = encode(self)
        digest = digest_of(encoded)
        return digest, encoded[: -len(_END)] + digest.encode() + _END


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Replica -> proxy: the call is recorded (a wake-up), or failed with `error`."""

    sample_id: str
    step_id: str
    # {"choices": [{message, finish_reason, logprobs{content[{token: "token_id:N", logprob}]}}], "serving_model_num"}
    data: dict[str, Any] | None = None
    finish_reason: str | None = None
    version: str = PROTOCOL_VERSION
    # {"code": ..., "message": ...}
    error: dict[str, str] | None = None
    run_id: str = ""
    purpose: Purpose = Purpose.TRAIN
    # The record itself, so that nobody has to read it; our replicas send it in the place of `data`.
    call: Call | None = None

    def with_call(self, stored: bytes) -> bytes:
        """The sent form of this response, which has no `call`, with the stored form of one."""
        return encode(self).removesuffix(_NO_CALL) + _CALL + stored + b"}"
