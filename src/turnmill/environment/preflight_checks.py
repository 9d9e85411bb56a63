"""What the plays of the check before a run say about an environment: one check each.

plays, refused rows -> tasks | limits | play | reward | gold | varies | full context | data | repeats | speed

A check fails where training on it would be for nothing or would learn an error. It warns where training works and is
not what it looks like.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from turnmill.environment.preflight_plays import Play, ScriptName, count, difference
from turnmill.records import Check, CheckState, InvalidReason, PreflightRequest

# Tasks, and fields, that a line of the report names.
_MOST_NAMED, _MOST_FIELDS = 3, 8
_OF_INFO = "metadata.info."


@dataclass(kw_only=True)
class Findings:
    """All that was found, as it is found."""

    request: PreflightRequest
    plays: list[Play] = field(default_factory=list)
    # Ids of the tasks that were played, or refused before that.
    chosen: list[str] = field(default_factory=list)
    # Rows that were looked at beside them, of how many that there are.
    num_validated: int = 0
    num_others: int = 0
    # What a task or its gold is refused for, one text a task.
    refused: list[str] = field(default_factory=list)
    without_gold: list[str] = field(default_factory=list)
    # Of the metrics that make up the reward.
    weights: Mapping[str, float] = field(default_factory=dict)
    # Why nothing more was played.
    hangs: str | None = None

    def of(self, *scripts: ScriptName) -> list[Play]:
        return [play for play in self.plays if play.script in scripts]

    def rewards(self, script: ScriptName) -> dict[str, float]:
        """By task; of plays that were valid."""
        return {play.task_id: play.result.reward for play in self.of(script) if play.result.reward is not None}

    def pairs(self) -> list[tuple[Play, Play]]:
        """Plays, and the same words said again."""
        first = {play.task_id: play for play in self.of(ScriptName.GARBAGE)}
        first |= {play.task_id: play for play in self.of(ScriptName.GOLD)}
        return [(first[again.task_id], again) for again in self.of(ScriptName.AGAIN)]

    def turn_s(self) -> list[tuple[float, str]]:
        """Seconds of each turn, and which it was."""
        return [
            (seconds, f"{play.name}, after reply {number}")
            for play in self.plays
            for number, seconds in enumerate(play.turn_s, 1)
        ]


def checks_of(findings: Findings) -> tuple[Check, ...]:
    """In the order in which a person would mend what is wrong."""
    plain = findings.of(ScriptName.GOLD, ScriptName.GARBAGE)
    low, high = findings.request.reward_range
    return (
        _tasks(findings),
        _data(findings),
        _limits(findings),
        _valid(findings, "play", plain, (InvalidReason.ENV_ERROR, InvalidReason.INFRA), "no error in play"),
        _valid(
            findings,
            "reward",
            plain,
            (InvalidReason.REWARD_ERROR,),
            f"all rewards are numbers from {low:g} to {high:g}",
        ),
        _gold(findings),
        _varies(findings),
        _valid(
            findings,
            "full context",
            findings.of(ScriptName.FULL_CONTEXT),
            tuple(InvalidReason),
            "a conversation that fills the context has a reward",
        ),
        _repeats(findings),
        _speed(findings),
    )


def failed_by(name: str, wrong: Sequence[str], text: str) -> Check:
    """Failed where something is wrong; `text` says what is right."""
    if not wrong:
        return Check(name=name, state=CheckState.OK, detail=text)
    return Check(name=name, state=CheckState.FAILED, detail=_first_of(wrong))


# ---------------------------------------------------------------- the data


def _tasks(findings: Findings) -> Check:
    text = f"{count(len(findings.chosen), 'task')} can be played"
    if findings.num_others:
        text += f", and the environment takes {findings.num_validated} of the {findings.num_others} other rows"
        if findings.num_validated < findings.num_others:
            text += " (the rest was not looked at)"
    return failed_by("tasks", findings.refused, text)


def _data(findings: Findings) -> Check:
    """What of the rows is read, and what was asked of them in vain by a play that failed."""
    seen = [play.fields for play in findings.plays]
    missed = {
        f"task {play.task_id}: {name} is asked for and not there": None
        for play in findings.plays
        if play.result.reason in (InvalidReason.ENV_ERROR, InvalidReason.REWARD_ERROR)
        for name in play.fields.missed
    }
    if missed:
        return failed_by("data", list(missed), "")
    if not seen:
        return Check(name="data", state=CheckState.NOT_CHECKED, detail="nothing was played")
    read = frozenset().union(*(fields.read for fields in seen))
    unread = frozenset().union(*(fields.present for fields in seen)) - read
    if any(name.startswith(_OF_INFO) for name in read):
        read -= {"metadata.info"}
    else:
        # Of an object that is taken as a whole nobody can tell what is read.
        unread = frozenset(name for name in unread if not name.startswith(_OF_INFO))
    text = f"it reads {_fields(read)}"
    return Check(name="data", state=CheckState.OK, detail=text + (f"; and never {_fields(unread)}" if unread else ""))


def _fields(names: Collection[str]) -> str:
    listed = sorted(name.removeprefix("metadata.") for name in names)
    more = f" and {len(listed) - _MOST_FIELDS} more" if len(listed) > _MOST_FIELDS else ""
    return ", ".join(listed[:_MOST_FIELDS]) + more if listed else "nothing of it"


# ---------------------------------------------------------------- ends


def _limits(findings: Findings) -> Check:
    if findings.hangs is None and not findings.plays:
        return Check(name="limits", state=CheckState.NOT_CHECKED, detail="nothing was played")
    turns = max((play.num_turns for play in findings.plays), default=0)
    text = f"each conversation ends within {findings.request.play_s:g} s, after {count(turns, 'turn')} at most"
    return failed_by("limits", [findings.hangs] if findings.hangs else [], text)


def _valid(findings: Findings, name: str, plays: Sequence[Play], reasons: Sequence[InvalidReason], text: str) -> Check:
    """Failed where a play ended for one of these reasons."""
    if findings.hangs is not None or not plays:
        return Check(name=name, state=CheckState.NOT_CHECKED, detail="nothing was played to its end")
    wrong = [f"{play.name}: {play.result.detail}" for play in plays if play.result.reason in reasons]
    return failed_by(name, wrong, text)


# ---------------------------------------------------------------- rewards


def _gold(findings: Findings) -> Check:
    gold, garbage = findings.rewards(ScriptName.GOLD), findings.rewards(ScriptName.GARBAGE)
    both = [task_id for task_id in gold if task_id in garbage]
    if not both:
        return _no_gold(findings, garbage)
    well, badly = (statistics.fmean(rewards[task_id] for task_id in both) for rewards in (gold, garbage))
    text = f"the gold answer earns {well:.3g}, garbage {badly:.3g}, over {count(len(both), 'task')}"
    no_better = [task_id for task_id in both if gold[task_id] <= garbage[task_id]]
    if no_better:
        text += f"; gold earns no more than garbage on {_named(no_better)}"
    if findings.without_gold:
        text += f"; without gold: {_named(findings.without_gold)}"
    broken = _broken_part(findings, both)
    if well > badly and broken is None:
        return Check(name="gold", state=CheckState.OK, detail=text)
    why = f"; {broken}" if broken else ""
    hint = "; if the answer alone is not what earns the reward, define `gold`"
    return Check(name="gold", state=CheckState.FAILED, detail=text + why + hint)


def _no_gold(findings: Findings, garbage: Mapping[str, float]) -> Check:
    if not findings.without_gold:
        return Check(name="gold", state=CheckState.NOT_CHECKED, detail="no reward to compare")
    why = "the tasks have no `answer` and the environment has no `gold` of its own"
    if garbage and min(garbage.values()) >= findings.request.reward_range[1]:
        text = f"{why}; garbage earns the most that there is, {min(garbage.values()):g}, on each task"
        return Check(name="gold", state=CheckState.WARNING, detail=text)
    return Check(name="gold", state=CheckState.NOT_CHECKED, detail=why)


def _broken_part(findings: Findings, task_ids: Sequence[str]) -> str | None:
    """What is wrong where the part of the reward that weighs most gives gold nothing on any task.

    One that catches its own error and calls it 0.0 looks so, while a lesser part, for the format say, tells gold
    from garbage all the same.
    """
    most = max(findings.weights.values(), default=0.0)
    main = [name for name, weight in findings.weights.items() if weight == most > 0]
    gold = {play.task_id: play.result.metrics for play in findings.of(ScriptName.GOLD)}
    if not main or any(gold[task_id].get(name) != 0 for name in main for task_id in task_ids):
        return None
    return (
        f"of the reward's parts {' and '.join(main)} weighs most, and gives 0 for each gold answer: an error that "
        "it catches itself looks like that"
    )


def _varies(findings: Findings) -> Check:
    """Whether it makes any difference what is said."""
    gold, garbage = findings.rewards(ScriptName.GOLD), findings.rewards(ScriptName.GARBAGE)
    rewards = [*gold.values(), *garbage.values()]
    if len(set(rewards)) > 1:
        text = f"{len(set(rewards))} different rewards, from {min(rewards):.3g} to {max(rewards):.3g}"
        return Check(name="varies", state=CheckState.OK, detail=text)
    if not gold or not garbage:
        return Check(name="varies", state=CheckState.NOT_CHECKED, detail="no reward of gold and of garbage to compare")
    text = f"each of {len(rewards)} conversations earns {rewards[0]:.3g}, whatever is said: there is nothing to learn"
    return Check(name="varies", state=CheckState.FAILED, detail=text)


# ---------------------------------------------------------------- repetition and time


def _repeats(findings: Findings) -> Check:
    """Whether the same words lead to the same conversation, as the replay of an interrupted attempt needs it.

    No failure: such an environment can be trained on, and an attempt that meets a difference goes on live.
    """
    pairs = findings.pairs()
    if findings.hangs is not None or not pairs:
        return Check(name="repeats", state=CheckState.NOT_CHECKED, detail="nothing was played twice to its end")
    others = [f"{first.name}: {text}" for first, again in pairs if (text := difference(first, again)) is not None]
    if not others:
        text = f"the same words lead to the same conversation and reward, on {count(len(pairs), 'task')}"
        return Check(name="repeats", state=CheckState.OK, detail=text)
    text = (
        f"the same words said twice lead to other conversations: {_first_of(others)}; an attempt that is interrupted "
        "can't be replayed, and rewards have noise: draw from a generator that is seeded by the task"
    )
    return Check(name="repeats", state=CheckState.WARNING, detail=text)


def _speed(findings: Findings) -> Check:
    turns = findings.turn_s()
    if not turns:
        return Check(name="speed", state=CheckState.NOT_CHECKED, detail="no turn was played")
    longest, where = max(turns)
    median = statistics.median(seconds for seconds, _ in turns)
    text = f"a turn takes the environment {_seconds(median)} (median), {_seconds(longest)} at most ({where})"
    return Check(name="speed", state=CheckState.OK, detail=text)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _first_of(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return "; ".join(texts[:_MOST_NAMED]) + more


def _named(task_ids: Sequence[str]) -> str:
    more = f" and {len(task_ids) - _MOST_NAMED} more" if len(task_ids) > _MOST_NAMED else ""
    return ", ".join(task_ids[:_MOST_NAMED]) + more
