"""Samples of one task that are scored together, in the process that plays the environment.

    trainer: a complete group -> group_metadata -> request -> worker: rollouts_of -> reward functions per group
        -> one value a sample, as metrics -> trainer: values_of

The request is one as any other, so that it is leased, repeated and given up as they are; what is asked for is in its
metadata, under a key that no row of data may have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnmill.environment.outcomes import Message, Rollout, Turn
from turnmill.errors import RecordCorrupt
from turnmill.records import Call, FinishReason, Reply, SampleRecord, StopReason, Task, decode, encode

GROUP = "turnmill_group"


@dataclass(frozen=True, kw_only=True)
class _Said:
    """One call of a member."""

    call_id: str
    parent: str | None
    # Those after the parent's reply.
    messages: list[dict[str, Any]]
    reply: dict[str, Any]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One sample of the group."""

    sample_id: str
    # Of its task.
    metadata: dict[str, Any]
    # Its own; what the group adds comes on top.
    reward: float
    metrics: dict[str, float]
    stop_reason: StopReason
    # Consumed by the attempt that was reported, in order of first use.
    said: list[_Said]


@dataclass(frozen=True, kw_only=True)
class _Group:
    members: list[_Member]


def group_metadata(members: Sequence[tuple[SampleRecord, Sequence[Call]]]) -> dict[str, Any]:
    """Metadata of the task that scores these samples; raises `RecordCorrupt` for one without a reward."""
    return {GROUP: decode(encode(_Group(members=[_member(*each) for each in members])), dict)}


def is_group(metadata: Mapping[str, Any]) -> bool:
    """Whether a task is to score a group, and not to be played."""
    return GROUP in metadata


def rollouts_of(metadata: Mapping[str, Any]) -> list[Rollout]:
    """The samples to score; the id of each one's task is the sample's."""
    return [_rollout(member) for member in decode(encode(metadata[GROUP]), _Group).members]


def as_metrics(values: Sequence[float]) -> dict[str, float]:
    """Values as a report holds them: by place, since an id may be no name of a metric."""
    return {str(place): value for place, value in enumerate(values)}


def values_of(metrics: Mapping[str, float], num: int) -> list[float] | None:
    """What `as_metrics` made; None for anything else."""
    names = [str(place) for place in range(num)]
    return [metrics[name] for name in names] if metrics.keys() == set(names) else None


def _member(sample: SampleRecord, calls: Sequence[Call]) -> _Member:
    if sample.reward is None:
        raise RecordCorrupt(f"{sample.key}: reward: expected a number, found None")
    return _Member(
        sample_id=sample.sample_id,
        metadata=sample.request.data,
        reward=sample.reward,
        metrics=sample.metrics,
        stop_reason=StopReason(sample.stop_reason or StopReason.END_OF_CONVERSATION),
        said=[
            _Said(
                call_id=call.call_id,
                parent=call.parent,
                messages=call.messages,
                reply=call.reply,
                finish_reason=call.finish_reason,
            )
            for call in calls
        ],
    )


def _rollout(member: _Member) -> Rollout:
    # Of each call with its reply; a parent comes before its children.
    conversations: dict[str | None, list[Message]] = {None: []}
    turns: list[Turn] = []
    for said in member.said:
        asked = [*conversations[said.parent], *said.messages]
        conversations[said.call_id] = [*asked, said.reply]
        reply = Reply(message=said.reply, finish_reason=said.finish_reason, call_id=said.call_id)
        turns.append(Turn(messages=asked, reply=reply))
    return Rollout(
        task=Task(id=member.sample_id, metadata=member.metadata),
        messages=conversations[member.said[-1].call_id] if member.said else [],
        turns=turns,
        stop_reason=member.stop_reason,
        reward=member.reward,
        metrics=member.metrics,
    )
