"""What the check before a run finds out about an environment, without a model."""

import asyncio
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from turnmill.environment.base import Chat, Environment, Message, Outcome, Score, opening_messages
from turnmill.environment.preflight import GARBAGE, choose, preflight
from turnmill.environment.rewards import reward
from turnmill.environment.wordle import Wordle
from turnmill.errors import DataError
from turnmill.records import Check, CheckState, EnvironmentChoice, PreflightReport, PreflightRequest, Task

OK, FAILED, NOT_CHECKED = CheckState.OK, CheckState.FAILED, CheckState.NOT_CHECKED


def request(**changes: Any) -> PreflightRequest:
    values: dict[str, Any] = {
        "environment": EnvironmentChoice(env_id="of-a-test"),
        "data_path": "unused",
        "seed": 0,
        "max_length": 160,
        "play_s": 20.0,
        "total_s": 60.0,
    }
    return PreflightRequest(**{**values, **changes})


def tasks(*answers: Any) -> list[Task]:
    return [
        Task(id=f"t{index}", metadata={"prompt": "Say it.", "answer": answer}) for index, answer in enumerate(answers)
    ]


class Echo(Environment):
    """One turn; 1.0 for the answer."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await chat.complete(opening_messages(task))
        return Outcome()

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        return Score(reward=self.reward(task, str(messages[-1]["content"])))

    def reward(self, task: Task, said: str) -> float:
        return float(said == task.metadata["answer"])


async def report_on(environment: Environment, played: Sequence[Task], **changes: Any) -> PreflightReport:
    return await preflight(environment, played, request(**changes), playing=lambda what: None)


def check_of(report: PreflightReport, name: str) -> Check:
    (found,) = [check for check in report.checks if check.name == name]
    return found


async def test_an_environment_that_tells_gold_from_garbage_passes_each_check() -> None:
    report = await report_on(Echo(), tasks("yes", "no"))
    assert {check.name: check.state for check in report.checks} == {
        "tasks": OK,
        "data": OK,
        "limits": OK,
        "play": OK,
        "reward": OK,
        "gold": OK,
        "varies": OK,
        "full context": OK,
        "repeats": OK,
        "speed": OK,
    }
    assert report.failed == () and report.tasks == ("t0", "t1")
    assert report.mean_rewards == {"gold": 1.0, "garbage": 0.0}
    # Gold twice and garbage of two tasks, and a context that is full at once, and after the only turn.
    assert report.num_turns == 8 and report.seconds_per_turn is not None and report.seconds_per_turn > 0


async def test_wordle_is_played_over_several_turns() -> None:
    report = await report_on(Wordle(), tasks("crane", "slate"))
    assert report.failed == () and report.mean_rewards == {"gold": 1.0, "garbage": 0.0}
    # Garbage takes all six turns.
    assert "after 6 turns at most" in check_of(report, "limits").detail


async def test_gold_that_earns_no_more_than_garbage_fails_and_names_the_tasks() -> None:
    class Blind(Echo):
        def reward(self, task: Task, said: str) -> float:
            return 0.5

    gold = check_of(await report_on(Blind(), tasks("a", "b", "c", "d", "e")), "gold")
    assert gold.state is FAILED
    assert "the gold answer earns 0.5, garbage 0.5, over 5 tasks" in gold.detail
    assert "no more than garbage on t0, t1, t2 and 2 more" in gold.detail and "define `gold`" in gold.detail


async def test_a_task_whose_gold_earns_nothing_is_named_although_the_mean_is_better() -> None:
    class Partly(Echo):
        def reward(self, task: Task, said: str) -> float:
            return float(said != GARBAGE and task.id != "t1")

    gold = check_of(await report_on(Partly(), tasks("a", "b", "c")), "gold")
    assert gold.state is OK and "gold earns no more than garbage on t1" in gold.detail


async def test_without_gold_it_is_told_as_not_checked_and_does_not_fail() -> None:
    bare = [Task(id="t0", metadata={"prompt": "Say anything."})]

    class Open(Echo):
        def reward(self, task: Task, said: str) -> float:
            return 0.3

    report = await report_on(Open(), bare)
    gold = check_of(report, "gold")
    assert gold.state is NOT_CHECKED and "no `answer`" in gold.detail and report.failed == ()


async def test_an_answer_that_is_no_text_is_said_as_json() -> None:
    class Number(Echo):
        def reward(self, task: Task, said: str) -> float:
            return float(said == "42")

    assert check_of(await report_on(Number(), tasks(42)), "gold").state is OK


async def test_an_environment_may_say_what_gold_is() -> None:
    class Boxed(Echo):
        def gold(self, task: Task) -> Iterable[str]:
            return [f"[{task.metadata['answer']}]"]

        def reward(self, task: Task, said: str) -> float:
            return float(said == f"[{task.metadata['answer']}]")

    assert (await report_on(Boxed(), tasks("x"))).failed == ()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "must be finite, not nan"),
        (math.inf, "must be finite, not inf"),
        ("high", "must be a number, not 'high'"),
        (None, "must be a number, not None"),
        (1.5, "outside the range [0.0, 1.0]"),
    ],
)
async def test_a_reward_that_is_none_is_an_error_and_never_zero(value: Any, text: str) -> None:
    """Defect 42: an exception in the reward that looks like 0.0."""

    class Odd(Echo):
        def reward(self, task: Task, said: str) -> float:
            odd: float = value
            return odd

    report = await report_on(Odd(), tasks("a"))
    reward = check_of(report, "reward")
    assert reward.state is FAILED and text in reward.detail and "task t0, garbage" in reward.detail
    assert report.mean_rewards == {} and check_of(report, "gold").state is NOT_CHECKED


async def test_a_reward_function_that_raises_is_shown_with_its_place() -> None:
    """Defect 42: an exception in the reward that looks like 0.0."""

    class Broken(Echo):
        def reward(self, task: Task, said: str) -> float:
            missing: dict[str, float] = {}
            return missing["reward"]

    reward = check_of(await report_on(Broken(), tasks("a")), "reward")
    assert reward.state is FAILED and "KeyError: 'reward'" in reward.detail and "in reward)" in reward.detail


async def test_an_error_in_play_fails_and_names_task_and_script() -> None:
    class Brittle(Echo):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            reply = await chat.complete(opening_messages(task))
            if reply.content == GARBAGE:
                raise ZeroDivisionError("of garbage")
            return Outcome()

    play = check_of(await report_on(Brittle(), tasks("a")), "play")
    assert play.state is FAILED and "task t0, garbage: ZeroDivisionError: of garbage" in play.detail


async def test_more_turns_than_gold_has_are_an_error() -> None:
    class Greedy(Wordle):
        def gold(self, task: Task) -> Iterable[str]:
            return ["wrong"]

    play = check_of(await report_on(Greedy(), tasks("crane")), "play")
    assert play.state is FAILED and "the script ended before call 2" in play.detail


async def test_a_full_context_without_a_reward_fails() -> None:
    class NoScore(Environment):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            reply = await chat.complete(opening_messages(task))
            return Outcome(reward=float(reply.content == task.metadata["answer"]))

    report = await report_on(NoScore(), tasks("a"))
    assert [check.name for check in report.failed] == ["full context"]
    assert "neither `rewards` nor `score`" in report.failed[0].detail


async def test_a_conversation_without_an_end_is_ended_by_the_context() -> None:
    class Chatty(Echo):
        async def play(self, task: Task, chat: Chat) -> Outcome:
            messages = opening_messages(task)
            while True:
                reply = await chat.complete(messages)
                messages += [reply.message, {"role": "user", "content": "more"}]

        async def score(self, task: Task, messages: Sequence[Message]) -> Score:
            return Score(reward=float(any(message["content"] == task.metadata["answer"] for message in messages)))

    report = await report_on(Chatty(), tasks("a"), max_length=50)
    assert report.failed == () and "after 51 turns at most" in check_of(report, "limits").detail


class Deaf(Echo):
    """Asks on and on, whatever it is told."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        for _ in itertools.count():
            try:
                await chat.complete(opening_messages(task))
            except Exception:
                continue
        raise AssertionError


class Sleepy(Echo):
    """Waits for what never comes."""

    async def play(self, task: Task, chat: Chat) -> Outcome:
        await asyncio.Event().wait()
        return Outcome()


@pytest.mark.parametrize("environment", [Deaf(), Sleepy()], ids=["deaf", "sleepy"])
async def test_an_environment_that_hangs_is_ended_by_its_limit_and_named(environment: Environment) -> None:
    report = await report_on(environment, tasks("a", "b"), play_s=0.1)
    assert [check.name for check in report.failed] == ["limits"]
    assert "task t0, garbage: no end after 0.1 s" in report.failed[0].detail
    assert report.tasks == ("t0",) and check_of(report, "reward").state is NOT_CHECKED


async def test_a_task_that_can_not_be_played_is_named() -> None:
    report = await report_on(Wordle(), [*tasks("crane"), Task(id="bad", metadata={"prompt": "x", "answer": "toolong"})])
    (failed,) = report.failed
    assert failed.name == "tasks" and "task bad: metadata.answer must be five letters" in failed.detail


async def test_a_prompt_that_can_not_fit_is_named_before_it_is_played() -> None:
    long = Task(id="long", metadata={"prompt": "word " * 2000, "answer": "a"})
    (failed,) = (await report_on(Echo(), [long])).failed
    assert failed.name == "tasks" and "leaves no room in max_length = 160" in failed.detail


async def test_a_task_check_that_breaks_is_no_crash() -> None:
    class Careless(Echo):
        def validate(self, task: Task) -> None:
            raise IndexError("out of range")

    (failed,) = (await report_on(Careless(), tasks("a"))).failed
    assert "task t0: validate fails: IndexError: out of range" in failed.detail

    class Goldless(Echo):
        def gold(self, task: Task) -> Iterable[str]:
            raise DataError("no gold here")

    (failed,) = (await report_on(Goldless(), tasks("a"))).failed
    assert "task t0: gold fails: DataError: no gold here" in failed.detail


async def test_no_task_is_begun_when_the_time_is_over() -> None:
    report = await report_on(Echo(), tasks("a", "b", "c"), total_s=0.0)
    assert report.tasks == ("t0",) and report.failed == ()


def test_the_first_tasks_and_a_seeded_sample_are_played() -> None:
    many = tasks(*map(str, range(100)))
    chosen = [int(task.id[1:]) for task in choose(many, 7)]
    assert chosen[:4] == [0, 1, 2, 3] and len(chosen) == 12 and chosen == sorted(set(chosen))
    assert choose(many, 7) == choose(many, 7) != choose(many, 8)
    assert choose(many[:3], 7) == many[:3]


class Ranked(Echo):
    """With a part that compares."""

    rewards = (reward(lambda rollouts: [0.5] * len(rollouts), name="rank", per="group"),)


class Misranked(Echo):
    """With one that breaks."""

    rewards = (reward(lambda rollouts: [1.0], name="rank", per="group"),)


@pytest.mark.parametrize(
    ("environment", "asked", "state", "text"),
    [
        (Ranked(), True, OK, "rank can score 8 rollouts"),
        (Ranked(), False, FAILED, "has reward functions per group (rank): set group_rewards = true"),
        (Echo(), True, FAILED, "the environment has no reward function per group"),
        (Misranked(), True, FAILED, "reward function rank: it must return a list"),
    ],
)
async def test_rewards_per_group_must_be_asked_for_and_able_to_score(
    environment: Environment, asked: bool, state: CheckState, text: str
) -> None:
    check = check_of(await report_on(environment, tasks("yes", "no"), group_rewards=asked), "group rewards")
    assert check.state is state and text in check.detail


@pytest.mark.parametrize(("environment", "asked"), [(Ranked(), None), (Echo(), False), (Echo(), None)])
async def test_where_nothing_is_trained_nobody_asks_about_groups(environment: Environment, asked: bool | None) -> None:
    report = await report_on(environment, tasks("yes"), group_rewards=asked)
    assert "group rewards" not in [check.name for check in report.checks] and report.failed == ()
