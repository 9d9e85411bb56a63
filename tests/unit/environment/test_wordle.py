"""Wordle: its marks, whole games by script, and what it refuses."""

import itertools
import random
from collections.abc import Iterable
from typing import Any

import pytest

from turnmill.environment.base import ScriptedChat
from turnmill.environment.boundary import WatchedChat, play_scored
from turnmill.environment.registry import load_built_in
from turnmill.environment.wordle import Wordle, feedback, load_environment, marks
from turnmill.errors import DataError, GenerationFailed
from turnmill.records import EnvironmentChoice, InvalidReason, RolloutResult, StopReason, Task

PROMPT = "Guess the five-letter word."


def a_task(answer: object = "crane", prompt: object = PROMPT) -> Task:
    return Task(id="t_0", metadata={"prompt": prompt, "answer": answer})


async def game(turns: Iterable[str | Exception], task: Task | None = None) -> tuple[RolloutResult, list[Any]]:
    """The result of a scripted game, and the messages of its last call."""
    chat = ScriptedChat(turns)
    result = await play_scored(Wordle(), task or a_task(), WatchedChat(chat))
    return result, chat.calls[-1] if chat.calls else []


# Worked out by hand: right places spend their letter first, then the others from left to right.
BY_HAND = [
    ("crane", "crane", "+++++"),
    ("pious", "crane", "-----"),
    ("nacre", "crane", "????+"),
    ("caner", "crane", "+????"),
    ("eerie", "crane", "--?-+"),
    ("llama", "plant", "-++--"),
    ("allay", "plant", "?+---"),
    ("skill", "plant", "---?-"),
    ("sassy", "glass", "??-+-"),
    ("assay", "glass", "???--"),
    ("geese", "these", "--+++"),
    ("eerie", "these", "?---+"),
    ("mummy", "month", "+----"),
    ("mummy", "gamma", "--++-"),
    ("error", "order", "?+-?+"),
]


@pytest.mark.parametrize(("guess", "answer", "expected"), BY_HAND)
def test_marks_are_those_worked_out_by_hand(guess: str, answer: str, expected: str) -> None:
    assert marks(guess, answer) == expected


def marks_by_search(guess: str, answer: str) -> str:
    """Marks from their definition: search all ways to pair letters of the guess with equal letters of the answer.

    The right way has most right places, then most pairs, then pairs the leftmost letters of the guess.
    """
    best: tuple[int, int, tuple[bool, ...]] | None = None
    found = ""
    for way in itertools.permutations(range(5)):
        pairs = [guess[i] == answer[way[i]] for i in range(5)]
        places = [pairs[i] and way[i] == i for i in range(5)]
        rank = (sum(places), sum(pairs), tuple(pairs))
        if best is None or rank > best:
            best = rank
            found = "".join("+" if place else "?" if pair else "-" for place, pair in zip(places, pairs, strict=True))
    return found


def test_marks_agree_with_a_search_over_all_pairings() -> None:
    rng = random.Random(7)
    for alphabet in ("ab", "abc", "abcdef"):
        for _ in range(150):
            guess, answer = ("".join(rng.choices(alphabet, k=5)) for _ in range(2))
            assert marks(guess, answer) == marks_by_search(guess, answer), (guess, answer)


def test_feedback_is_letter_mark_pairs_joined_by_one_space() -> None:
    assert feedback("crane", "cigar") == "c+ r? a? n- e-"


async def test_a_solved_game_earns_one_and_ends_without_a_further_message() -> None:
    result, last_call = await game(["nacre", "crane"])

    assert (result.reward, result.reason, result.stop_reason) == (1.0, None, StopReason.END_OF_CONVERSATION)
    assert result.metrics == {"turns": 2, "greens": 5, "invalid_guesses": 0}
    assert [(message["role"], message["content"]) for message in last_call] == [
        ("user", PROMPT),
        ("assistant", "nacre"),
        ("user", "n? a? c? r? e+"),
    ]


async def test_six_wrong_guesses_end_the_game_with_zero() -> None:
    result, last_call = await game(["pious", "caner", "pious", "pious", "pious", "pious", "crane"])

    assert (result.reward, result.reason, result.stop_reason) == (0.0, None, StopReason.MAX_TURNS)
    assert result.metrics == {"turns": 6, "greens": 1, "invalid_guesses": 0}
    assert len(last_call) == 11


async def test_the_sixth_guess_still_wins() -> None:
    result, _ = await game([*["pious"] * 5, "crane"])

    assert (result.reward, result.metrics["turns"]) == (1.0, 6)
    assert result.stop_reason is StopReason.END_OF_CONVERSATION


@pytest.mark.parametrize(
    "text",
    ["", "cran", "cranes", "cra ne", "cran3", "the word is crane", "crän" + "e", "ſtone", "\u212ariss", "crane."],
)
async def test_an_invalid_guess_is_told_so_and_uses_up_a_turn(text: str) -> None:
    result, last_call = await game([text, "crane"])

    assert last_call[-1] == {"role": "user", "content": "Not a five-letter word."}
    assert result.metrics == {"turns": 2, "greens": 5, "invalid_guesses": 1}
    assert result.reward == 1.0


async def test_a_turn_is_worth_what_its_guess_has_right_beyond_those_before() -> None:
    said = ["pious", "caner", "nonsense!", "crabs", "caner", "crane"]
    messages = [{"role": "user", "content": PROMPT}]
    for guess in said:
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": "marks"}]
    task = Task(id="t", metadata={"prompt": PROMPT, "answer": "crane"})
    score = await Wordle().score(task, messages)
    assert score.turn_rewards == pytest.approx([0.0, 0.2, 0.0, 0.4, 0.0, 0.4])


async def test_garbage_earns_zero_after_six_turns() -> None:
    result, _ = await game(itertools.repeat("I do not know"))

    assert result.reward == 0.0
    assert result.metrics == {"turns": 6, "greens": 0, "invalid_guesses": 6}


@pytest.mark.parametrize("text", ["CRANE", "Crane", "  crane\n", "\tcRaNe "])
async def test_case_and_white_space_around_a_guess_do_not_matter(text: str) -> None:
    result, _ = await game([text])

    assert (result.reward, result.metrics["turns"]) == (1.0, 1)


async def test_a_guess_in_capitals_is_marked_in_lower_case() -> None:
    _, last_call = await game(["NACRE", "crane"])

    assert last_call[-1]["content"] == "n? a? c? r? e+"


async def test_an_answer_in_capitals_is_the_same_word() -> None:
    result, _ = await game(["crane"], a_task("CRANE"))

    assert result.reward == 1.0


async def test_a_prompt_of_messages_opens_the_game_as_it_is_and_is_not_played() -> None:
    prompt = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "An example."},
        {"role": "assistant", "content": "crane"},
        {"role": "user", "content": "Now you."},
    ]
    result, last_call = await game(itertools.repeat("pious"), a_task("crane", prompt))

    assert last_call[:4] == prompt
    assert (result.reward, result.metrics["turns"]) == (0.0, 6)


async def test_a_full_context_ends_the_game_as_valid_and_scored() -> None:
    result, _ = await game(["caner", GenerationFailed("context_length_exceeded", "too long")])

    assert (result.reward, result.reason, result.stop_reason) == (0.0, None, StopReason.MAX_LENGTH)
    assert result.metrics == {"turns": 1, "greens": 1, "invalid_guesses": 0}


async def test_gold_wins() -> None:
    task = a_task("Mummy")
    Wordle().validate(task)
    result, _ = await game(Wordle().gold(task), task)

    assert result.reward == 1.0


@pytest.mark.parametrize("answer", [None, 5, "", "cran", "cranes", "cran3", "crane ", "crän" + "e"])
async def test_a_bad_answer_is_a_data_error_and_in_a_rollout_an_env_error(answer: object) -> None:
    with pytest.raises(DataError, match=r"t_0: metadata\.answer must be five letters"):
        Wordle().validate(a_task(answer))
    result, _ = await game(["crane"], a_task(answer))

    assert (result.reward, result.reason) == (None, InvalidReason.ENV_ERROR)


@pytest.mark.parametrize("prompt", [None, "", "  ", 5, [], ["text"]])
def test_a_bad_prompt_is_a_data_error(prompt: object) -> None:
    with pytest.raises(DataError, match=r"t_0: metadata\.prompt must be"):
        Wordle().validate(a_task(prompt=prompt))


async def test_max_turns_is_an_argument() -> None:
    environment = load_environment(max_turns=2)
    result = await play_scored(environment, a_task(), WatchedChat(ScriptedChat(itertools.repeat("pious"))))

    assert (result.metrics["turns"], result.stop_reason) == (2, StopReason.MAX_TURNS)


def test_the_default_is_six_turns() -> None:
    environment = load_built_in(EnvironmentChoice(env_id="wordle"))

    assert isinstance(environment, Wordle)
    assert environment.max_turns == 6
