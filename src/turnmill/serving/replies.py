"""Sampled tokens as a reply that can be sent while it grows: its text, and at its end the tool calls in it.

tokens -> TextStream -> text that no call will take up -> out           end -> the rest of the text, and the calls
"""

from collections.abc import Sequence

from turnmill.generation.renderer import Renderer
from turnmill.generation.replies import ReadReply, read_text
from turnmill.generation.tool_syntax import ToolSyntax
from turnmill.records import FinishReason
from turnmill.serving.text import TextStream


class ReplyStream:
    """The reply of one call."""

    def __init__(
        self,
        renderer: Renderer,
        syntax: ToolSyntax | None,
        *,
        call_id: str,
        begun: str = "",
        stops: Sequence[str] = (),
    ) -> None:
        """`syntax` None: no calls are read. `begun`: what the prompt made it begin with."""
        self._text = TextStream(renderer.decode if syntax is None else renderer.decode_calls, stops)
        self._syntax = syntax
        self._call_id = call_id
        self._parts = [begun]
        self._num_sent = 0

    @property
    def is_stopped(self) -> bool:
        return self._text.is_stopped

    def feed(self, ids: Sequence[int]) -> str:
        """What can be sent now that these tokens were sampled."""
        part = self._text.feed(ids)
        self._parts.append(part)
        if self._syntax is not None:
            whole = "".join(self._parts)
            self._parts = [whole]
            part = whole[self._num_sent : self._syntax.num_certain(whole)]
        self._num_sent += len(part)
        return part

    def end(self, finish_reason: FinishReason) -> tuple[str, ReadReply]:
        """The rest of the text, and the whole reply."""
        whole = "".join([*self._parts, self._text.end()])
        reason = FinishReason.STOP if self.is_stopped else finish_reason
        reply = read_text(self._syntax, whole, call_id=self._call_id, finish_reason=reason)
        return reply.content[self._num_sent :], reply
