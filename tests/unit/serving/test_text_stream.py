"""Sampled tokens as text that grows: what was sent never changes, and joined it is the whole text."""

from collections.abc import Sequence

import pytest

from turnmill.serving.text import TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def stream(text: str, stops: Sequence[str] = (), size: int = 1) -> tuple[list[str], TextStream]:
    ids = list(text.encode())
    found = TextStream(decode_bytes, stops)
    parts = [found.feed(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*parts, found.end()], found


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("text", ["", "plain words", "Grüße, 世界 👩‍🔬!", "é" * 50])
def test_characters_of_several_tokens_come_whole(text: str, size: int) -> None:
    parts, _ = stream(text, size=size)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one END two", ["END"], "one "),
        ("one EN two", ["END"], "one EN two"),
        ("ends with EN", ["END"], "ends with EN"),
        ("aaab", ["aab"], "a"),
        ("x\n\ny", ["\n\n", "x\n\ny"], "x"),
        ("STOP", ["STOP"], ""),
        ("früh 世界 spät", ["界"], "früh 世"),
    ],
)
def test_the_text_ends_in_front_of_a_stop_string_wherever_tokens_cut_it(
    text: str, stops: list[str], expected: str, size: int
) -> None:
    parts, found = stream(text, stops, size)
    assert "".join(parts) == expected
    assert found.is_stopped is (expected != text)


def test_a_character_that_is_never_finished_is_shown_at_the_end() -> None:
    found = TextStream(decode_bytes)
    assert found.feed([65, 0xE4]) == ""
    assert found.end() == "A\ufffd"
