"""The environment: an agent with three tools and a shop of its own.

prompt -> request, wait -> responses -> ... -> answer -> parts of the reward
"""

from collections.abc import Iterable
from typing import Any, Literal

from my_custom_env.shop import Response
from my_custom_env.tasks import shop_of, solve
from turnmill.environment import (
    Chat,
    Environment,
    Outcome,
    Rollout,
    ScriptedTurn,
    Talk,
    ToolError,
    ToolLimits,
    call_of,
    metric,
    opening_messages,
    reward,
    talk,
)
from turnmill.errors import DataError
from turnmill.records import Task

# Longest time that may pass at once, seconds of the shop's clock.
MOST_SECONDS = 3600


def load_environment(*, max_turns: int = 20) -> "ApiCalls":
    """The environment; raises `ValueError` for a number of turns that is none."""
    if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
        raise ValueError(f"max_turns must be an integer of at least 1, not {max_turns!r}")
    return ApiCalls(max_turns=max_turns)


class Session:
    """What one rollout's agent has: its tools, and what it did with them."""

    def __init__(self, task: Task) -> None:
        self.shop = shop_of(task.metadata["info"])
        self.responses: list[Response] = []
        self.given: str | None = None
        # None until the talk has ended.
        self.talk: Talk | None = None

    def request(self, method: Literal["GET", "POST"], path: str, token: str = "") -> str:
        """Send one request to the API.

        Args:
            method: GET reads, POST changes
            path: path of the endpoint with its query, such as /orders/1234
            token: token of the request; GET / and POST /token need none
        """
        if not path.startswith("/"):
            raise ToolError("Error: path must begin with /.")
        response = self.shop.request(method, path, token)
        self.responses.append(response)
        return response.text

    def wait(self, seconds: int) -> str:
        """Let time pass.

        Args:
            seconds: how long
        """
        if not 0 < seconds <= MOST_SECONDS:
            raise ToolError(f"Error: seconds must be from 1 to {MOST_SECONDS}.")
        self.shop.now_s += seconds
        return f"{seconds} seconds later."

    def answer(self, text: str) -> str:
        """Give the answer, and nothing but it; this ends the task.

        Args:
            text: the answer, without a sentence around it
        """
        if self.given is None:
            self.given = text
        return "Thank you."


class ApiCalls(Environment):
    """Find the endpoints, call them, get over what fails, answer."""

    def __init__(self, *, max_turns: int) -> None:
        self._limits = ToolLimits(max_turns=max_turns)
        self.rewards = (
            reward(answered, weight=0.5),
            reward(reached, weight=0.2),
            reward(recovered, weight=0.2),
            reward(well_formed, weight=0.1),
            metric(num_requests),
        )

    async def play(self, task: Task, chat: Chat) -> Outcome:
        session = Session(task)
        session.talk = await talk(
            chat,
            opening_messages(task),
            [session.request, session.wait, session.answer],
            limits=self._limits,
            until=lambda: session.given is not None,
        )
        return session.talk.outcome(session)

    def validate(self, task: Task) -> None:
        super().validate(task)
        try:
            answer = solve(task.metadata["info"]).answer
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"task {task.id}: metadata.info is no task of this environment: {error!r}") from error
        if answer != task.metadata.get("answer"):
            raise DataError(f"task {task.id}: metadata.answer must be {answer!r}, which is what the shop says")

    def gold(self, task: Task) -> Iterable[ScriptedTurn]:
        actions: list[dict[str, Any]] = [
            call_of(action.tool, call_id=f"gold{index:05d}", **action.arguments)
            for index, action in enumerate(solve(task.metadata["info"]).actions)
        ]
        return actions


# ---------------------------------------------------------------- the reward, part by part


def answered(rollout: Rollout) -> float:
    """The answer is right, white space, case and a full stop aside."""
    given = rollout.state.given
    return float(given is not None and _plain(given) == _plain(rollout.task.metadata["answer"]))


def reached(rollout: Rollout) -> float:
    """The share of the resources that a solution takes which answered."""
    needed = solve(rollout.task.metadata["info"]).needed
    return len(needed & rollout.state.shop.answered) / len(needed)


def recovered(rollout: Rollout) -> float:
    """The share of the needed resources that fail at first which answered after all."""
    failing = solve(rollout.task.metadata["info"]).failing
    return len(failing & rollout.state.shop.answered) / len(failing)


def well_formed(rollout: Rollout) -> float:
    """The share of calls that a tool could do something with."""
    talked = rollout.state.talk
    return 1 - talked.num_failed_calls / talked.num_calls if talked.num_calls else 0.0


def num_requests(rollout: Rollout) -> float:
    """How many requests it took."""
    return len(rollout.state.responses)


def _plain(text: str) -> str:
    return text.strip().rstrip(".").casefold()
