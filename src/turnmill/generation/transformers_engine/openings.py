"""Conversations that begin alike are prefilled once: the samples of a group share their prompt.

    begin(slot, tokens) -> nobody has them: this slot is their source, it prefills them itself
                        -> another slot has, or is about to: wait until it is `ready`, copy all but the last token
                        -> the slot itself has them, from the conversation before

What a slot holds at a position never changes while its conversation goes on, so a source stays good until the slot is
given to another conversation, or the weights are replaced.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Tokens from which a copy is cheaper than computing them together with others.
_LEAST = 8


class Openings:
    """Which slot holds which beginning."""

    def __init__(self) -> None:
        self._source_of: dict[bytes, int] = {}
        self._opening_of: dict[int, bytes] = {}
        # Slots that wait for the beginning that their conversation shares with another one.
        self._waiting: dict[int, bytes] = {}

    def begin(self, slot: int, tokens: Ints) -> bool:
        """A conversation of these tokens begins in the idle `slot`; True if all but the last one are there already."""
        if len(tokens) <= _LEAST:
            self.drop(slot)
            return False
        opening = tokens[:-1].tobytes()
        source = self._source_of.get(opening)
        if source == slot:
            return True
        self.drop(slot)
        if source is None:
            self._source_of[opening] = slot
            self._opening_of[slot] = opening
        else:
            self._waiting[slot] = opening
        return False

    def waits(self, slot: int) -> bool:
        return slot in self._waiting

    def ready(self, to_prefill: Mapping[int, Ints], length_s: Ints) -> list[tuple[int, list[int]]]:
        """(source, slots that can copy from it now); they wait no longer, and neither do those whose source is gone."""
        by_source: dict[int, list[int]] = {}
        for slot, opening in list(self._waiting.items()):
            source = self._source_of.get(opening)
            if source is None:
                # Prefilled by itself, as the source for those behind it.
                del self._waiting[slot]
                self._source_of[opening] = slot
                self._opening_of[slot] = opening
            elif length_s[source] >= len(to_prefill[slot]) - 1:
                del self._waiting[slot]
                by_source.setdefault(source, []).append(slot)
        return list(by_source.items())

    def drop(self, slot: int) -> None:
        """What the slot holds is no beginning any more."""
        self._waiting.pop(slot, None)
        opening = self._opening_of.pop(slot, None)
        if opening is not None:
            del self._source_of[opening]
