"""Wordle: find a five-letter word in six turns.

    opening (metadata.prompt) -> guess -> marks -> guess -> ... -> solved or out of turns

A guess is any five letters a-z; no word list limits it. The reward is 1.0 for the word, else 0.0.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from turnmill.environment.base import Chat, Environment, Message, Outcome, Score, opening_messages
from turnmill.errors import DataError
from turnmill.records import StopReason, Task

INVALID_GUESS = "Not a five-letter word."

_WORD = re.compile(r"[A-Za-z]{5}")


def load_environment(*, max_turns: int = 6) -> "Wordle":
    """The environment with its arguments; raises as `Wordle` does."""
    return Wordle(max_turns=max_turns)


class Wordle(Environment):
    """The game. Raises `ValueError` for a `max_turns` that is no positive integer."""

    def __init__(self, *, max_turns: int = 6) -> None:
        if isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1:
            raise ValueError(f"max_turns must be an integer of at least 1, not {max_turns!r}")
        self.max_turns = max_turns

    async def play(self, task: Task, chat: Chat) -> Outcome:
        answer = answer_of(task)
        messages = opening_messages(task)
        for turn in range(self.max_turns):
            reply = await chat.complete(messages)
            messages.append(reply.message)
            guess = parse_guess(reply.content)
            if guess == answer:
                return Outcome(stop_reason=StopReason.END_OF_CONVERSATION)
            if turn + 1 < self.max_turns:
                content = INVALID_GUESS if guess is None else feedback(guess, answer)
                messages.append({"role": "user", "content": content})
        return Outcome(stop_reason=StopReason.MAX_TURNS)

    async def score(self, task: Task, messages: Sequence[Message]) -> Score:
        """1.0 where a guess was the answer. `greens` is the most right places of one guess.

        A turn is worth the places that its guess has right beyond the best guess before it, as a share of the word.
        """
        answer = answer_of(task)
        said = messages[len(opening_messages(task)) :]
        turns = [message.get("content") or "" for message in said if message["role"] == "assistant"]
        guesses = [parse_guess(turn) for turn in turns]
        valid = [guess for guess in guesses if guess is not None]
        greens = [0 if guess is None else sum(map(operator.eq, guess, answer)) for guess in guesses]
        best = [0, *accumulate(greens, max)]
        metrics = {"turns": len(turns), "greens": best[-1], "invalid_guesses": len(guesses) - len(valid)}
        gained = [(after - before) / len(answer) for before, after in pairwise(best)]
        return Score(reward=1.0 if answer in valid else 0.0, metrics=metrics, turn_rewards=gained)

    def validate(self, task: Task) -> None:
        super().validate(task)
        answer_of(task)

    def gold(self, task: Task) -> Iterable[str]:
        return [answer_of(task)]


def answer_of(task: Task) -> str:
    """`metadata.answer` in lower case; raises `DataError` unless it is five letters a-z."""
    answer = task.metadata.get("answer")
    if not isinstance(answer, str) or not _WORD.fullmatch(answer):
        raise DataError(f"task {task.id}: metadata.answer must be five letters a-z, not {answer!r:.80}")
    return answer.lower()


def parse_guess(text: str) -> str | None:
    """The guess in lower case, or None for a text that is not five letters a-z (white space around it aside)."""
    trimmed = text.strip()
    return trimmed.lower() if _WORD.fullmatch(trimmed) else None


def marks(guess: str, answer: str) -> str:
    """One mark a letter: `+` right place, `?` elsewhere in the word, `-` absent.

    Each letter of the answer is spent once: on right places first, then on the guess's letters from left to right.
    """
    result = ["+" if letter == place else "-" for letter, place in zip(guess, answer, strict=True)]
    unspent = [place for place, mark in zip(answer, result, strict=True) if mark == "-"]
    for index, letter in enumerate(guess):
        if result[index] == "-" and letter in unspent:
            unspent.remove(letter)
            result[index] = "?"
    return "".join(result)


def feedback(guess: str, answer: str) -> str:
    """What the player is told: `c+ r? a- n- e-`."""
    return " ".join(letter + mark for letter, mark in zip(guess, marks(guess, answer), strict=True))
