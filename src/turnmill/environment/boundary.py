"""Where an environment's code meets Turnmill: it raises plain Python, and here that becomes data.

    play -> (context full: MAX_LENGTH) -> score -> RolloutResult

A failure is INFRA when the model did not answer, whatever the environment makes of it; else ENV_ERROR when `play`
fails, and REWARD_ERROR when the reward does. None of them is ever a reward of 0.0.
"""

import logging
import traceback
from collections.abc import Sequence
from typing import Any

from turnmill import failpoints
from turnmill.environment.base import (
    CONTEXT_LENGTH_EXCEEDED,
    Chat,
    Environment,
    Message,
    Outcome,
    RewardError,
    Score,
)
from turnmill.errors import BackendUnavailable, GenerationFailed, LeaseLost
from turnmill.records import InvalidReason, Reply, RolloutResult, StopReason, Task
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)

# Longest `detail` of a result, in characters.
_DETAIL_LENGTH = 2000


class WatchedChat:
    """A chat that remembers what an environment could hide: the conversation, open calls, and a model that failed."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        # Calls that wait for an answer now.
        self.num_pending = 0
        # The conversation of the call that ended last.
        self.messages: list[Message] = []
        # The failure that decides the rollout: of the infrastructure, or a lost lease.
        self.failure: Exception | None = None

    async def complete(self, messages: Sequence[Message], **params: Any) -> Reply:
        said = list(messages)
        self.num_pending += 1
        try:
            reply = await self._chat.complete(said, **params)
        except GenerationFailed as error:
            if error.code == CONTEXT_LENGTH_EXCEEDED:
                self.messages = said
            else:
                self.failure = self.failure or error
            raise
        except BackendUnavailable as error:
            self.failure = self.failure or error
            raise
        except LeaseLost as error:
            self.failure = error
            raise
        finally:
            self.num_pending -= 1
        self.messages = [*said, reply.message]
        return reply


async def play_scored(
    environment: Environment, task: Task, chat: WatchedChat, *, reward_range: tuple[float, float] | None = None
) -> RolloutResult:
    """Play `task` once and score it. Raises only `LeaseLost`, and passes a cancellation on.

    `reward_range` is [low, high]; a reward outside it is a REWARD_ERROR.
    """
    outcome: Outcome | None = None
    error: Exception | None = None
    try:
        failpoints.hit(f"play-{task.id}")
        await failpoints.wait("environment-plays")
        outcome = await environment.play(task, chat)
    except Exception as caught:
        error = caught
    if isinstance(chat.failure, LeaseLost):
        raise chat.failure
    if chat.failure is not None:
        return invalid(InvalidReason.INFRA, chat.failure, task)
    if error is not None:
        if not _is_context_full(error):
            reason = InvalidReason.REWARD_ERROR if isinstance(error, RewardError) else InvalidReason.ENV_ERROR
            return invalid(reason, error, task)
        outcome = Outcome(stop_reason=StopReason.MAX_LENGTH)
    if not isinstance(outcome, Outcome):
        wrong = TypeError(f"{type(environment).__name__}.play must return an Outcome, not {type(outcome).__name__}")
        return invalid(InvalidReason.ENV_ERROR, wrong, task)
    try:
        score = await _score(environment, task, chat.messages, outcome, reward_range)
    except Exception as caught:
        return invalid(InvalidReason.REWARD_ERROR, caught, task)
    return RolloutResult(
        reward=score.reward, metrics={**outcome.metrics, **score.metrics}, stop_reason=outcome.stop_reason
    )


async def _score(
    environment: Environment,
    task: Task,
    messages: Sequence[Message],
    outcome: Outcome,
    reward_range: tuple[float, float] | None,
) -> Score:
    if outcome.reward is not None:
        score = Score(reward=outcome.reward)
    else:
        score = await environment.score(task, messages)
    if not isinstance(score, Score):
        raise RewardError(f"{type(environment).__name__}.score must return a Score, not {type(score).__name__}")
    if reward_range is not None and not reward_range[0] <= score.reward <= reward_range[1]:
        raise RewardError(f"reward {score.reward} is outside the range {list(reward_range)} of the request")
    return score


def invalid(reason: InvalidReason, error: BaseException, task: Task) -> RolloutResult:
    """The result of a rollout that `error` ended; the log gets the whole traceback."""
    logger.warning("rollout is invalid: %s", reason, exc_info=error, extra={"at": task.id})
    return RolloutResult(reason=reason, detail=describe(error))


def describe(error: BaseException) -> str:
    """The type, the text and the last frame of an exception, without secrets."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return redact(f"{type(error).__name__}: {error}")[:_DETAIL_LENGTH] + place


def _is_context_full(error: BaseException) -> bool:
    """Also for calls side by side, whose errors come as a group."""
    if isinstance(error, BaseExceptionGroup):
        return all(_is_context_full(inner) for inner in error.exceptions)
    return isinstance(error, GenerationFailed) and error.code == CONTEXT_LENGTH_EXCEEDED
