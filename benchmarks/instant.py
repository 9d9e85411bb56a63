"""An engine that answers at once: what is left of a turn is the cost of routing it."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from turnmill import assets
from turnmill.generation.engine import EngineCall, EngineResult
from turnmill.intake.dataset import read_tasks
from turnmill.records import FinishReason, Version

BASE_VERSION = Version(incarnation=0, n=0)


def reply_of(folder: Path) -> list[int]:
    """Tokens of a legal guess that is never the answer to a training task (it is one of a held-out task)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    guess = str(read_tasks(assets.wordle_data("eval"))[0].metadata["answer"])
    ids: list[int] = tokenizer.encode(guess, add_special_tokens=False)
    return ids


class InstantEngine:
    """Implements `Engine` without a model: every call is answered with the same tokens by the next step.

    It holds as many conversations as it has slots and forgets the longest unused, like the engine for CPUs.
    """

    def __init__(self, reply: Sequence[int], *, num_slots: int, max_length: int) -> None:
        self._reply = list(reply)
        self._num_slots = num_slots
        self._max_length = max_length
        self._running: list[tuple[EngineCall, int]] = []
        # Tokens of the ended calls that were not named yet, and of the kept conversations by name, oldest first.
        self._ended: OrderedDict[str, int] = OrderedDict()
        self._kept: OrderedDict[str, int] = OrderedDict()

    @property
    def version(self) -> Version:
        return BASE_VERSION

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free(self) -> int:
        return self._num_slots - len(self._running)

    def held_length(self, prefix_key: str) -> int | None:
        return self._kept.get(prefix_key)

    def submit(self, call: EngineCall) -> None:
        held = self._kept.pop(call.prefix_key, None) if call.prefix_key else None
        start = len(call.context_ids or ()) if held is None else held
        self._running.append((call, start + len(call.new_ids)))

    def step(self) -> list[EngineResult]:
        results = []
        for call, num_prompt in self._running:
            ids = [*self._reply, min(call.end_ids)][: call.max_new_tokens]
            self._ended[call.call_id] = num_prompt + len(ids)
            results.append(
                EngineResult(
                    call_id=call.call_id,
                    token_ids=ids,
                    logprobs=[-0.1] * len(ids),
                    finish_reason=FinishReason.STOP,
                )
            )
        self._running.clear()
        _forget_oldest(self._ended, self._num_slots)
        return results

    def keep(self, call_id: str, prefix_key: str) -> None:
        length = self._ended.pop(call_id, None)
        if length is not None:
            self._kept[prefix_key] = length
            _forget_oldest(self._kept, self._num_slots)

    def load(self, folder: Path, version: Version) -> None:
        raise RuntimeError(f"there is nothing to load: {folder}, {version}")

    def fingerprint(self) -> str:
        return "0" * 64


def _forget_oldest(held: "OrderedDict[str, int]", most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)
