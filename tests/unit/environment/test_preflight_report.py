"""The check before a run: what is read of the data, rows that are not played, repetition, time."""

import asyncio
import copy
import itertools
import json
import pickle
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.unit.environment.test_preflight import FAILED, NOT_CHECKED, OK, Echo, check_of, report_on, request, tasks
from turnmill.environment.base import Chat, Environment, Message, Outcome, Score, ScriptedTurn, opening_messages
from turnmill.environment.preflight import preflight, rest
from turnmill.environment.preflight_fields import recorded
from turnmill.errors import DataError
from turnmill.records import CheckState, PreflightReport, Task, encode

WARNING = CheckState.WARNING


def rows(*infos: Any) -> list[Task]:
    return [
        Task(id=f"t{index}", metadata={"prompt": "Say it.", "answer": "yes", "info": info})
        for index, info in enumerate(infos)
    ]


class Needy(Echo):
    """Its reward needs a field of `info`."""

    def reward(self, task: Task, said: str) -> float:
        return float(said == task.metadata["answer"]) * float(task.metadata["info"]["worth"])


# ---------------------------------------------------------------- data


async def test_fields_that_are_read_and_such_as_never_are_are_told() -> None:
    data = check_of(await report_on(Needy(), rows({"worth": 1.0, "source": "a book"})), "data")
    assert data.state is OK
    assert data.detail == "it reads answer, info.worth, prompt; and never info.source"


async def test_of_an_object_that_is_taken_as_a_whole_nothing_is_said_to_be_unread() -> None:
    class Whole(Echo):
        def reward(self, task: Task, said: str) -> float:
            return float(said == task.metadata["answer"] and bool(encode(task.metadata["info"])))

    assert check_of(await report_on(Whole(), rows({"a": 1, "b": 2})), "data").detail == "it reads answer, info, prompt"


async def test_a_row_without_a_field_that_is_needed_is_named_with_the_field() -> None:
    report = await report_on(Needy(), rows({"worth": 1.0}, {"wroth": 1.0}))
    assert {check.name for check in report.failed} == {"data", "reward"}
    assert "task t1: metadata.info.worth is asked for and not there" in check_of(report, "data").detail
    assert "task t1, garbage: KeyError: 'worth'" in check_of(report, "reward").detail


@pytest.mark.parametrize(
    ("look", "read"),
    [
        (lambda row: row["answer"], {"answer"}),
        (lambda row: row.get("answer"), {"answer"}),
        (lambda row: row.get("nothing"), set()),
        (lambda row: "answer" in row, {"answer"}),
        (lambda row: {**row}, {"answer", "info"}),
        (lambda row: dict(row), {"answer", "info"}),
        (lambda row: row | {"more": 1}, {"answer", "info"}),
        (lambda row: list(row.values()), {"answer", "info"}),
        (lambda row: row.copy(), {"answer", "info"}),
        (lambda row: json.dumps(row), {"answer", "info", "info.a"}),
        (lambda row: copy.deepcopy(row), {"answer", "info", "info.a"}),
        (lambda row: row["info"]["a"], {"info", "info.a"}),
        (lambda row: row.pop("answer"), {"answer"}),
    ],
)
def test_each_way_to_read_a_row_is_noticed(look: Any, read: set[str]) -> None:
    task, fields = recorded(Task(id="t", metadata={"answer": "x", "info": {"a": 1}}))
    look(task.metadata)
    assert fields.read == {f"metadata.{name}" for name in read} and not fields.missed


def test_a_row_that_is_watched_is_the_same_dict() -> None:
    plain = {"answer": "x", "info": {"a": [1, None]}}
    task, fields = recorded(Task(id="t", metadata=plain))
    assert task.metadata == plain and isinstance(task.metadata, dict)
    assert encode(task.metadata) == encode(plain) and json.dumps(task.metadata) == json.dumps(plain)
    restored = pickle.loads(pickle.dumps(task.metadata))
    assert type(restored) is dict and type(restored["info"]) is dict
    with pytest.raises(KeyError, match="gone"):
        task.metadata["info"]["gone"]
    assert list(fields.missed) == ["metadata.info.gone"]


# ---------------------------------------------------------------- rows that are not played


class Picky(Echo):
    """Refuses some rows."""

    def validate(self, task: Task) -> None:
        if task.metadata["answer"] == "odd":
            raise DataError(f"task {task.id}: metadata.answer must not be odd")


async def with_others(environment: Environment, others: Sequence[Task], **changes: Any) -> PreflightReport:
    said: list[str] = []
    report = await preflight(environment, tasks("yes"), request(**changes), others=others, playing=said.append)
    assert "the other rows, checking them" in said
    return report


async def test_rows_that_are_not_played_are_looked_at_and_bad_ones_named() -> None:
    others = [Task(id=f"o{n}", metadata={"prompt": "x", "answer": "odd" if n == 70 else "even"}) for n in range(90)]
    report = await with_others(Picky(), others)
    (failed,) = report.failed
    assert failed.name == "tasks" and failed.detail == "task o70: metadata.answer must not be odd"
    assert report.num_validated == 90 and report.tasks == ("t0",)


async def test_where_the_time_is_over_it_is_told_how_many_were_looked_at() -> None:
    report = await with_others(Picky(), tasks("a", "b", "c"), total_s=0.0)
    assert report.num_validated == 0 and report.failed == ()
    assert "takes 0 of the 3 other rows (the rest was not looked at)" in check_of(report, "tasks").detail


def test_the_others_are_those_that_are_not_played() -> None:
    many = tasks(*map(str, range(30)))
    assert [task.id for task in rest(many, many[2:])] == ["t0", "t1"]


# ---------------------------------------------------------------- repetition


class Dice(Echo):
    """Says something else each time."""

    def __init__(self, what: str) -> None:
        self._draws = itertools.count()
        self._what = what

    async def play(self, task: Task, chat: Chat) -> Outcome:
        drawn = next(self._draws)
        opening = opening_messages(task)
        if self._what == "observation":
            opening.append({"role": "user", "content": f"You throw {drawn}."})
        tools = [{"type": "function", "function": {"name": f"tool{drawn}"}}] if self._what == "tools" else None
        await chat.complete(opening, **({"tools": tools} if tools else {}))
        if self._what == "calls" and drawn % 2:
            await chat.complete(opening)
        reward = float(chat_says_gold(task, drawn, self._what))
        return Outcome(reward=reward, metrics={"drawn": float(drawn if self._what == "metric" else 0)})

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=0.0)

    def gold(self, task: Task) -> Iterable[ScriptedTurn]:
        return itertools.repeat("yes")


def chat_says_gold(task: Task, drawn: int, what: str) -> bool:
    return what == "reward" and drawn % 2 == 1


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("observation", "call 1 has 'You throw 1.' of user, then 'You throw 2.' of user"),
        ("tools", "call 1 has tools"),
        ("reward", "reward 1.0, then 0.0"),
        ("metric", "metric drawn is 1.0, then 2.0"),
        ("calls", "2 calls, then 1"),
    ],
)
async def test_an_environment_that_draws_unseeded_is_told_by_a_warning(what: str, text: str) -> None:
    repeats = check_of(await report_on(Dice(what), tasks("yes")), "repeats")
    assert repeats.state is WARNING and "task t0, gold: " in repeats.detail and text in repeats.detail
    assert "seeded by the task" in repeats.detail


async def test_draws_that_are_seeded_by_the_task_are_none() -> None:
    class Seeded(Echo):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            await chat.complete(
                [*opening_messages(task), {"role": "user", "content": str(random.Random(task.id).random())}]
            )
            return Outcome()

    report = await report_on(Seeded(), tasks("yes", "no"))
    assert check_of(report, "repeats").state is OK and report.warnings == ()


async def test_without_gold_garbage_is_said_twice() -> None:
    class Open(Echo):
        def reward(self, task: Task, said: str) -> float:
            return 0.3

    repeats = check_of(await report_on(Open(), [Task(id="t0", metadata={"prompt": "Say anything."})]), "repeats")
    assert repeats.state is OK and "on 1 task" in repeats.detail


# ---------------------------------------------------------------- a reward that says nothing, and time


async def test_a_reward_that_is_the_same_whatever_is_said_fails() -> None:
    class Blind(Echo):
        def reward(self, task: Task, said: str) -> float:
            return 0.5

    varies = check_of(await report_on(Blind(), tasks("a", "b")), "varies")
    assert varies.state is FAILED and "each of 4 conversations earns 0.5, whatever is said" in varies.detail


async def test_without_gold_garbage_that_earns_all_is_a_warning_and_no_failure() -> None:
    class Generous(Echo):
        def reward(self, task: Task, said: str) -> float:
            return 1.0

    report = await report_on(Generous(), [Task(id="t0", metadata={"prompt": "Say anything."})])
    assert (
        check_of(report, "gold").state is WARNING
        and "garbage earns the most that there is" in report.warnings[0].detail
    )
    assert check_of(report, "varies").state is NOT_CHECKED and report.failed == ()


async def test_the_slowest_turn_is_named_and_the_median_told() -> None:
    class Slow(Echo):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            reply = await chat.complete(opening_messages(task))
            if task.id == "t1" and reply.content == "no":
                await asyncio.sleep(0.2)
            return Outcome()

    report = await report_on(Slow(), tasks("yes", "no"))
    assert report.longest_turn_s is not None and report.median_turn_s is not None
    assert report.longest_turn_s >= 0.2 > report.median_turn_s
    assert "at most (task t1, " in check_of(report, "speed").detail
