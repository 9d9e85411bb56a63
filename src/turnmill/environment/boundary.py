"""Where an environment's code meets Turnmill: it raises plain Python, and here that becomes data.

    play -> (context full: MAX_LENGTH) -> rewards or score -> RolloutResult

A failure is INFRA when the model or a judge did not answer, whatever the environment makes of it; else ENV_ERROR when
`play` fails, and REWARD_ERROR when the reward does. None of them is ever a reward of 0.0.
"""

import logging
from collections.abc import Sequence
from typing import Any

from turnmill import failpoints
from turnmill.environment.base import CONTEXT_LENGTH_EXCEEDED, Chat, Environment, is_context_full
from turnmill.environment.groups import as_metrics, is_group, rollouts_of
from turnmill.environment.outcomes import Message, Outcome, RewardError, Rollout, Score, Turn, by_call, place_of
from turnmill.environment.rewards import RewardFunctionFailed, explained, own, weigh, weigh_group
from turnmill.environment.watching import WATCH, Watch
from turnmill.errors import BackendUnavailable, GenerationFailed, LeaseLost
from turnmill.records import InvalidReason, Reply, RolloutResult, StopReason, Task
from turnmill.telemetry import redact

logger = logging.getLogger(__name__)

# Longest `detail` of a result, in characters.
_DETAIL_LENGTH = 2000


class WatchedChat(Watch):
    """A chat that remembers what an environment could hide: conversations, open calls, and a model that failed."""

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self._chat = chat
        # The conversation of the call that ended last.
        self.messages: list[Message] = []
        # Calls that were answered, in the order of the answers.
        self.turns: list[Turn] = []

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
        if params.get("return_token_ids") and reply.tokens is None:
            missing = GenerationFailed("no_token_ids", "an answer came without its tokens, which were asked for")
            self.failure = self.failure or missing
            raise missing
        self.turns.append(Turn(messages=said, reply=reply))
        return reply


async def play_scored(
    environment: Environment, task: Task, chat: WatchedChat, *, reward_range: tuple[float, float] | None = None
) -> RolloutResult:
    """Play `task` once and score it. Raises only `LeaseLost`, and passes a cancellation on.

    `reward_range` is [low, high]; a reward outside it is a REWARD_ERROR.
    """
    token = WATCH.set(chat)
    try:
        result = await _played(environment, task, chat, reward_range)
    finally:
        WATCH.reset(token)
    if isinstance(chat.failure, LeaseLost):
        raise chat.failure
    if chat.failure is not None:
        return invalid(InvalidReason.INFRA, chat.failure, task)
    assert result is not None
    return result


async def _played(
    environment: Environment, task: Task, chat: WatchedChat, reward_range: tuple[float, float] | None
) -> RolloutResult | None:
    """What the environment makes of it; None where `chat.failure` decides."""
    if is_group(task.metadata):
        return await _score_group(environment, task, chat, reward_range)
    outcome: Outcome | None = None
    try:
        failpoints.hit(f"play-{task.id}")
        await failpoints.wait("environment-plays")
        outcome = await environment.play(task, chat)
    except Exception as error:
        if chat.failure is None and not is_context_full(error):
            reason = InvalidReason.REWARD_ERROR if isinstance(error, RewardError) else InvalidReason.ENV_ERROR
            return invalid(reason, error, task)
        outcome = Outcome(stop_reason=StopReason.MAX_LENGTH)
    if chat.failure is not None:
        return None
    if not isinstance(outcome, Outcome):
        wrong = TypeError(f"{type(environment).__name__}.play must return an Outcome, not {type(outcome).__name__}")
        return invalid(InvalidReason.ENV_ERROR, wrong, task)
    rollout = Rollout(
        task=task, messages=chat.messages, turns=chat.turns, stop_reason=outcome.stop_reason, state=outcome.state
    )
    try:
        score = await _score(environment, rollout, outcome, reward_range)
        turn_rewards = _turn_rewards(rollout, outcome, score)
    except Exception as error:
        return None if chat.failure is not None else invalid(InvalidReason.REWARD_ERROR, error, task)
    return RolloutResult(
        reward=score.reward,
        metrics={**outcome.metrics, **score.metrics},
        turn_rewards=turn_rewards,
        stop_reason=outcome.stop_reason,
    )


def _turn_rewards(rollout: Rollout, outcome: Outcome, score: Score) -> dict[str, float]:
    if outcome.turn_rewards and score.turn_rewards:
        raise RewardError(
            "`play` (or `step`) says what turns are worth, and so do reward functions per turn or `score`: it must "
            "come from one of them"
        )
    return by_call(outcome.turn_rewards or score.turn_rewards, rollout.turns)


async def _score_group(
    environment: Environment, task: Task, chat: WatchedChat, reward_range: tuple[float, float] | None
) -> RolloutResult | None:
    """What a group adds to the reward of each of its samples, as metrics."""
    try:
        values = await weigh_group(environment.rewards, rollouts_of(task.metadata))
    except Exception as error:
        return None if chat.failure is not None else invalid(InvalidReason.REWARD_ERROR, error, task)
    # Nobody reads the reward of a score; any will do that the request allows.
    low, high = reward_range or (0.0, 0.0)
    return RolloutResult(
        reward=min(max(0.0, low), high),
        metrics=as_metrics(values),
        stop_reason=StopReason.END_OF_CONVERSATION,
    )


async def _score(
    environment: Environment, rollout: Rollout, outcome: Outcome, reward_range: tuple[float, float] | None
) -> Score:
    name, functions = type(environment).__name__, own(environment.rewards)
    if functions and (outcome.reward is not None or type(environment).score is not Environment.score):
        other = "`play` returned a reward" if outcome.reward is not None else "the class has a `score`"
        raise RewardError(f"{name} has `rewards` and {other}: the reward must come from one of them")
    if outcome.reward is not None:
        score = Score(reward=outcome.reward)
    elif functions:
        score = await weigh(functions, rollout)
    else:
        score = await environment.score(rollout.task, rollout.messages)
    if not isinstance(score, Score):
        raise RewardError(f"{name}.score must return a Score, not {type(score).__name__}")
    if reward_range is not None and not reward_range[0] <= score.reward <= reward_range[1]:
        how = explained(functions, score.metrics)
        raise RewardError(f"reward {score.reward}{how} is outside the range {list(reward_range)} of the request")
    return score


def invalid(reason: InvalidReason, error: BaseException, task: Task) -> RolloutResult:
    """The result of a rollout that `error` ended; the log gets the whole traceback."""
    logger.warning("rollout is invalid: %s", reason, exc_info=error, extra={"at": task.id})
    return RolloutResult(reason=reason, detail=describe(error))


def describe(error: BaseException) -> str:
    """The type, the text and the last frame of an exception, without secrets."""
    # The text of one has the place in the function that raised.
    place = "" if isinstance(error, RewardFunctionFailed) else place_of(error)
    return redact(f"{type(error).__name__}: {error}")[:_DETAIL_LENGTH] + place
