"""A verifiers environment as one of ours: it plays and scores uploaded tasks, and its errors are not swallowed.

    Task -> row -> Environment.rollout (PolicyClient) -> state -> score_rollout (watched) -> Outcome

Of verifiers only the rollout and the rubric are used. Where verifiers would score a rollout that failed, or take a
reward function that raises for a score of 0.0, an exception tells `boundary` what went wrong.
"""

import itertools
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from verifiers.envs.environment import Environment as VerifiersBase
from verifiers.envs.multiturn_env import MultiTurnEnv
from verifiers.parsers.parser import Parser
from verifiers.rubrics.rubric import Rubric
from verifiers.types import AssistantMessage, Tool

from turnmill.environment import verifiers_rewards
from turnmill.environment.base import Chat, Environment, Outcome, ScriptedTurn
from turnmill.environment.verifiers_client import MODEL, PolicyClient, given_sampling
from turnmill.environment.verifiers_rows import gold_reply, row_of
from turnmill.errors import DataError, InvalidInput
from turnmill.records import StopReason, Task

logger = logging.getLogger(__name__)

# How rows become prompts, which `row_of` does for them.
_FORMATTING = ("_format_dataset", "_format_dataset_source", "_ensure_prompt")
# Of an environment's own sampling arguments, what belongs to how it plays; how tokens are drawn is the run's affair.
_OF_THE_GAME = ("stop",)


class RolloutFailed(Exception):
    """verifiers ended a rollout with an error that it keeps in the state."""


class VerifiersEnvironment(Environment):
    """Plays tasks with a `MultiTurnEnv` of verifiers, or a subclass such as `SingleTurnEnv` and `ToolEnv`."""

    def __init__(self, env: Any) -> None:
        """Raises `InvalidInput` where `env` can't be played exactly: the text says why."""
        reason = next(_reasons_against(env), None)
        if reason is not None:
            raise InvalidInput(f"{type(env).__name__} of verifiers can't be trained on: {reason}")
        self._env = env
        self._sampling = self._sampling_of_the_game()
        if env.timeout_seconds is not None:
            logger.warning(
                "timeout_seconds = %g of the environment is not used: training_timeout bounds a rollout",
                env.timeout_seconds,
            )
            env.timeout_seconds = None

    async def play(self, task: Task, chat: Chat) -> Outcome:
        state = await self._env.rollout(self._row(task), PolicyClient(chat), MODEL, dict(self._sampling))
        try:
            if state.get("error") is not None:
                raise RolloutFailed(_chain(state["error"])) from _exception(state["error"])
            if state.get("timed_out"):
                raise TimeoutError("the environment ended the rollout by a time limit of its own")
            if state.get("prompt_too_long") and not state["completion"]:
                # The opening alone filled the context: reward functions look at the last message as a matter of course.
                state["completion"] = [AssistantMessage(content="")]
            state["timing"].scoring.start = time.time()
            reward, metrics = await verifiers_rewards.score(self._env.rubric, state)
            state["timing"].scoring.end = time.time()
        finally:
            await self._env.rubric.cleanup(state)
        return Outcome(
            stop_reason=self._stop_reason(state), reward=reward, metrics=metrics, turn_rewards=_turn_rewards(state)
        )

    def validate(self, task: Task) -> None:
        row = self._row(task)
        for tool in row.get("info", {}).get("tool_defs") or ():
            try:
                Tool.model_validate(tool)
            except ValueError as error:
                raise DataError(
                    f"task {task.id}: metadata.info.tool_defs is not as verifiers has it: {error}"
                ) from error

    def gold(self, task: Task) -> Iterable[ScriptedTurn] | None:
        """What the environment's own `gold(row)` says, where it has one; else the answer, as its parser reads it."""
        own = getattr(self._env, "gold", None)
        if callable(own):
            given: Iterable[ScriptedTurn] | None = own(self._row(task))
            return given
        answer = task.metadata.get("answer")
        if answer is None:
            return None
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return itertools.repeat(gold_reply(text, self._parser()))

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return verifiers_rewards.weights(self._env.rubric)

    # ------------------------------------------------------------ the parts

    def _row(self, task: Task) -> dict[str, Any]:
        return row_of(task, system_prompt=self._env.system_prompt, few_shot=self._env.few_shot)

    def _parser(self) -> Any:
        """The environment's, or that of its rewards where it has none of its own."""
        parsers = [self._env.parser, *(leaf.parser for leaf in verifiers_rewards.leaves(self._env.rubric))]
        return next((parser for parser in parsers if type(parser) is not Parser), parsers[0])

    def _sampling_of_the_game(self) -> dict[str, Any]:
        given = given_sampling(self._env.sampling_args)
        left_out = sorted(given.keys() - set(_OF_THE_GAME))
        if left_out:
            logger.warning(
                "sampling_args of the environment are not used, calls use the run's sampling parameters: %s",
                ", ".join(left_out),
            )
        return {name: given[name] for name in _OF_THE_GAME if name in given}

    def _stop_reason(self, state: Any) -> StopReason:
        steps = state["trajectory"]
        if state.get("prompt_too_long") or (steps and steps[-1]["is_truncated"]):
            return StopReason.MAX_LENGTH
        condition = state.get("stop_condition")
        if condition == "max_total_completion_tokens_reached":
            return StopReason.MAX_LENGTH
        # One turn is all that a single-turn environment has: no limit that was met.
        if condition == "max_turns_reached" and self._env.max_turns > 1:
            return StopReason.MAX_TURNS
        return StopReason.END_OF_CONVERSATION


# ---------------------------------------------------------------- what is refused


def _reasons_against(env: Any) -> Iterator[str]:
    """Why `env` can't be played exactly, the plainest first."""
    if not isinstance(env, MultiTurnEnv):
        yield "SingleTurnEnv, MultiTurnEnv, ToolEnv and classes made from them are played"
        return
    if env.message_type != "chat":
        yield f"its message_type is {env.message_type!r}, and conversations are chats"
    own = [name for name in _FORMATTING if getattr(type(env), name) is not getattr(VerifiersBase, name)]
    if own:
        yield (
            f"it formats its dataset by code of its own ({', '.join(own)}), and uploaded tasks take the place of the "
            "dataset: do it in setup_state"
        )
    if not env.score_rollouts:
        yield "with score_rollouts = False each reward is 0.0"
    yield from _reasons_against_rubric(env.rubric)


def _reasons_against_rubric(rubric: Any) -> Iterator[str]:
    leaves = list(verifiers_rewards.leaves(rubric))
    for leaf in leaves:
        if leaf.has_group_rewards:
            names = ", ".join(verifiers_rewards.name_of(function) for function in leaf._get_group_reward_funcs())
            yield f"{names} compares the rollouts of a group, which are played apart: score each rollout by itself"
        if leaf.has_advantages:
            yield f"{type(leaf).__name__} gives advantages of its own, and the training computes them"
        if _is_own(leaf, "score_group") and not _is_own(leaf, "score_rollout"):
            yield f"{type(leaf).__name__} scores groups (score_group), and rollouts are scored apart: score_rollout"
        if not leaf.funcs and not _is_own(leaf, "score_rollout"):
            yield f"a {type(leaf).__name__} of its rubric has no function: give it one or leave it out"
    if not verifiers_rewards.weights(rubric) and not any(_is_own(leaf, "score_rollout") for leaf in leaves):
        yield "no reward function has a weight, so that each reward is 0.0"


def _is_own(rubric: Any, method: str) -> bool:
    return getattr(type(rubric), method) is not getattr(Rubric, method)


# ---------------------------------------------------------------- what is in a state


def _turn_rewards(state: Any) -> dict[str, float]:
    """Of the steps of the trajectory that the environment or its rubric gave a reward of their own."""
    return {step["response"].id: step["reward"] for step in state["trajectory"] if step.get("reward") is not None}


def _exception(error: object) -> BaseException | None:
    return error if isinstance(error, BaseException) else None


def _chain(error: object) -> str:
    """An error with what it came from, outermost first; those of verifiers often have no text of their own."""
    texts = []
    while isinstance(error, BaseException):
        texts.append(f"{type(error).__name__}: {error}".removesuffix(": "))
        error = error.__cause__
    return " <- ".join(texts) or repr(error)
