"""Sampled tokens as text that can be sent while it grows.

    tokens -> characters that no later token changes -> text in front of which no stop string can begin -> out

A character may take several tokens, and a stop string may be cut anywhere, so both hold text back until it is certain.
"""

from collections.abc import Callable, Sequence

from turnmill.generation.texts import overlap, stop_place

# What a tokenizer shows for bytes that are no character yet.
_INCOMPLETE = "\ufffd"


class TextStream:
    """The text of one call."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stop for stop in stops if stop)
        self._ids: list[int] = []
        # The text up to `_read` is out; decoding begins at `_from`, because a token's text depends on the one before.
        self._from = 0
        self._read = 0
        self._held = ""
        # A stop string came: the text ends in front of it.
        self.is_stopped = False

    def feed(self, ids: Sequence[int]) -> str:
        """What can be sent now that these tokens were sampled."""
        self._ids.extend(ids)
        return self._cut(self._characters(is_end=False), is_end=False)

    def end(self) -> str:
        """The rest of the text."""
        return self._cut(self._characters(is_end=True), is_end=True)

    def _characters(self, *, is_end: bool) -> str:
        before = self._decode(self._ids[self._from : self._read])
        text = self._decode(self._ids[self._from :])
        if text.endswith(_INCOMPLETE) and not is_end:
            return ""
        self._from, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _cut(self, text: str, *, is_end: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + text
        place = stop_place(text, self._stops)
        if place is not None:
            self.is_stopped = True
            self._held = ""
            return text[:place]
        num_held = 0 if is_end else max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
