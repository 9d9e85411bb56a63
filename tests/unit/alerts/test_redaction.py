"""What is taken out of a text, and that a long one does not hold control up."""

import pytest

from turnmill.alerts import Redactor


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://user:pass@host/x", "see https://***@host/x"),
        ("postgres+psycopg://u:p@db, 1http://u:p@h", "postgres+psycopg://***@db, 1http://***@h"),
        ("https://host/path and a mail to me@host", "https://host/path and a mail to me@host"),
    ],
)
def test_passwords_in_addresses_are_taken_out(text: str, shown: str) -> None:
    assert Redactor()(text) == shown


@pytest.mark.parametrize("word", ["a", "a.b+", "a:", "://", "eyJaaaaaaaa.", "token "])
def test_a_text_of_one_long_word_takes_no_longer_than_any_other(word: str) -> None:
    """Quadratic it would take minutes, on the event loop that serves the conversations: the time-out says so."""
    Redactor()(word * (400_000 // len(word)))
