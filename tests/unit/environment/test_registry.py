"""Environments by id."""

from typing import Any

import pytest

from turnmill.environment import environment_ids, load
from turnmill.environment.wordle import Wordle
from turnmill.errors import InvalidInput


def test_every_known_id_loads() -> None:
    assert environment_ids() == ["wordle"]
    assert isinstance(load("wordle", {"max_turns": 3}), Wordle)


def test_an_unknown_id_is_refused_with_the_closest() -> None:
    with pytest.raises(InvalidInput, match=r"no environment 'wurdle' \(did you mean 'wordle'\?\); known: wordle"):
        load("wurdle", {})


def test_an_unknown_argument_is_refused_with_the_closest() -> None:
    with pytest.raises(InvalidInput, match=r"no argument 'max_turn' \(did you mean 'max_turns'\?\)"):
        load("wordle", {"max_turn": 6})


@pytest.mark.parametrize("value", [0, -1, "6", 1.5, None, True, [6]])
def test_a_number_of_turns_that_is_no_positive_integer_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInput, match="max_turns must be an integer of at least 1"):
        load("wordle", {"max_turns": value})
