"""Places in a text that may still grow: where stop strings end it, and how much of it may be the beginning of more."""

from collections.abc import Sequence


def stop_place(text: str, stops: Sequence[str]) -> int | None:
    """Where the text ends: in front of the stop string that is complete first, however the text came in parts."""
    found = [(place + len(stop), place) for stop in stops if stop and (place := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def overlap(text: str, mark: str) -> int:
    """Characters at the end of `text` that may be the beginning of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
