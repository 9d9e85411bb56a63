"""What was said in the rollouts of a run, for everybody who only looks: nothing is changed, locked or held up.

sample records + calls -> Conversation -> branches, parent before child
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from turnmill.conversation.branches import in_order
from turnmill.conversation.history import checked_call, checked_sample
from turnmill.errors import NotFound
from turnmill.records import Call, Purpose, Run, SampleRecord, call_prefix, sample_key, sample_prefix
from turnmill.wiring.backend import backend_of

# Fields of records that people ask for.
_OF_SAMPLE = (
    "sample_id purpose task_id state step versions attempt reward group_reward metrics stop_reason reason detail "
    "drop_reason"
).split()
_OF_CALL = (
    "call_id attempt parent choice num_choices tools tool_choice messages reply finish_reason version created_at"
).split()


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One rollout and its calls, those of earlier attempts too."""

    sample: SampleRecord
    # In the order in which they were asked for.
    calls: Sequence[Call]

    def is_used(self, call: Call) -> bool:
        """The attempt that ended the rollout heard it; before that nobody knows, and all are."""
        return not self.sample.calls or call.call_id in self.sample.calls

    def branches(self) -> Iterator[tuple[Call, bool]]:
        """Each call once, those that go on from it behind it; and whether it goes on from the one just before."""
        children: dict[str | None, list[Call]] = {}
        known = {call.call_id for call in self.calls}
        for call in self.calls:
            children.setdefault(call.parent if call.parent in known else None, []).append(call)
        # A stack: a conversation may be longer than Python's.
        waiting, before = children.get(None, [])[::-1], None
        while waiting:
            call = waiting.pop()
            yield call, call.parent is not None and call.parent == before
            waiting += children.get(call.call_id, [])[::-1]
            before = call.call_id

    def as_object(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            **summary_of(self.sample),
            "calls": [
                {
                    **_fields(call, _OF_CALL),
                    "is_used": self.is_used(call),
                    "turn_reward": self.sample.turn_rewards.get(call.call_id),
                    "num_prompt_tokens": len(call.token_ids) - call.num_sampled,
                    "num_sampled_tokens": call.num_sampled,
                    "num_trained_tokens": sum(call.loss_mask),
                }
                for call in self.calls
            ],
        }


def summary_of(sample: SampleRecord) -> dict[str, Any]:
    """A sample without what was said in it."""
    return {**_fields(sample, _OF_SAMPLE), "num_calls": len(sample.calls)}


def read_samples(root: Path, run: Run, purposes: Sequence[Purpose]) -> list[SampleRecord]:
    """All samples of a run for these purposes, oldest first."""
    reader = backend_of(root).reader(run.run_id)
    samples = [
        checked_sample(stored)
        for purpose in purposes
        for stored in reader.records(sample_prefix(run.run_id, purpose), limit=-1)
    ]
    return sorted(samples, key=lambda sample: sample.created_at)


def read_conversations(root: Path, run: Run, sample_id: str, purposes: Sequence[Purpose]) -> list[Conversation]:
    """The rollouts of this id: one for each purpose that has it. Raises `NotFound`."""
    reader = backend_of(root).reader(run.run_id)
    found: list[Conversation] = []
    for purpose in purposes:
        key = sample_key(run.run_id, purpose, sample_id)
        stored = [each for each in reader.records(key, limit=-1) if each.key == key]
        for sample in map(checked_sample, stored):
            prefix = call_prefix(run.run_id, purpose, sample_id)
            calls = [checked_call(each) for each in reader.records(prefix, limit=-1)]
            found.append(Conversation(sample=sample, calls=in_order(calls)))
    if not found:
        raise NotFound(
            f"run {run.run_id} has no rollout {sample_id!r}; `turnmill conversations {run.run_id}` lists what there is"
        )
    return found


def _fields(record: Any, names: Sequence[str]) -> dict[str, Any]:
    found: Mapping[str, Any] = {name: getattr(record, name) for name in names}
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return plain
