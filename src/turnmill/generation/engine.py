"""What a replica asks of an engine: token ids in, token ids with their log-probs out. No torch, no text, no queues.

An engine keeps the KV caches of conversations. A cache is named by what its content *is*: `keep` gives it the digest of
the recorded call that ends it, and the next call of that conversation names the same digest as its `prefix_key`. A
cache that was never kept (its answer lost against another replica's) is never continued.

Not thread-safe: one owner, which never calls two methods at once. `step` may run in a thread of its own meanwhile.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from turnmill.records import FinishReason, Sampling, Version


class EngineCall(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One generation to run. Axes: a prompt is the stored path followed by `new_ids`."""

    # Unique among all calls of the engine's life.
    call_id: str
    # The call's random numbers follow from these alone, whatever else is in the batch.
    seed_parts: tuple[str, ...]
    # Name of the cache that holds the stored path; None starts a conversation.
    prefix_key: str | None
    # Tokens to append to the stored path before sampling; at least one where there is no stored path.
    new_ids: Sequence[int]
    # The stored path itself; needed only if the engine does not hold `prefix_key`.
    context_ids: Sequence[int] | None = None
    sampling: Sampling
    # Most tokens to sample, at least one; the engine does not look at `sampling.max_new_tokens`.
    max_new_tokens: int
    # Any of them ends the call; it is sampled, and part of the result.
    end_ids: frozenset[int]
    # Asked after each token, with all that were sampled, whether the call is over; None: no text ends it.
    is_over: Callable[[Sequence[int]], bool] | None = None


class EngineResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a call ended. Axes: T sampled tokens."""

    call_id: str
    # T ids, the end token included.
    token_ids: list[int]
    # T log-probs: log-softmax(logits / temperature) over the full vocabulary (temperature 1 for greedy calls).
    logprobs: list[float]
    finish_reason: FinishReason
    # Text when the call failed (then the lists hold what came before); None otherwise.
    error: str | None = None


class Engine(Protocol):
    """Continuous batching over slots; calls join and leave at every step."""

    @property
    def version(self) -> Version:
        """Weights in memory."""
        ...

    @property
    def max_length(self) -> int:
        """Most tokens of one conversation."""
        ...

    @property
    def num_running(self) -> int:
        """Calls that were submitted and have not ended."""
        ...

    @property
    def num_free(self) -> int:
        """Calls that `submit` takes now."""
        ...

    def held_length(self, prefix_key: str) -> int | None:
        """Tokens of the stored path whose cache is held under this name; None where it is not (any more)."""
        ...

    def submit(self, call: EngineCall) -> None:
        """Give the call a slot; its tokens are computed by the next steps.

        Raises `GenerationFailed` for a call that this engine can't run: no new tokens, ids outside of the vocabulary,
        no room, no context. Submitting may evict the longest unused cache, so ask `held_length` again afterwards.
        """
        ...

    def step(self) -> list[EngineResult]:
        """Sample at least one token for every running call; the calls that ended."""
        ...

    def keep(self, call_id: str, prefix_key: str) -> None:
        """Name the cache of an ended call, so that the next one can continue it; nothing happens if it is gone."""
        ...

    def load(self, folder: Path, version: Version) -> None:
        """Replace the weights and forget all caches; only while nothing runs.

        In LoRA mode these are the adapter's. Raises `RecordCorrupt` when the file does not hold exactly the tensors
        that are to be replaced; the old weights stay then.
        """
        ...

    def fingerprint(self) -> str:
        """`weights.fingerprint` of all parameters, computed from the memory that samples."""
        ...


class StreamingEngine(Engine, Protocol):
    """An engine whose calls can be watched while they run, and ended early."""

    def sampled(self, call_id: str, start: int) -> list[int]:
        """The tokens of a running call from the one of index `start` on; none for a call that does not run."""
        ...

    def cancel(self, call_id: str) -> None:
        """End a running call without a result; nothing happens to one that does not run."""
        ...
