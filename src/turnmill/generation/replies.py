"""What a client is told of a reply: its text up to a stop string, and the tool calls in it.

    what the reply was begun with + decoded tokens -> [stop strings cut the text, not the tokens] -> content, tool calls

Sampling ends with the token that completes a stop string (`ends_at`); that one, and those that began it, are kept.

A stop string in the midst of a call cuts it as well, and a call that is not whole is text.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from turnmill.generation.renderer import Renderer
from turnmill.generation.texts import stop_place
from turnmill.generation.tool_syntax import ID_LENGTH, ToolSyntax
from turnmill.records import FinishReason

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class ReadReply(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A reply as clients see it."""

    content: str
    # OpenAI form; empty where it calls nothing.
    tool_calls: list[dict[str, Any]]
    finish_reason: FinishReason

    @property
    def message(self) -> dict[str, Any]:
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


def reads_calls(renderer: Renderer, tools: list[dict[str, Any]] | None, tool_choice: str) -> ToolSyntax | None:
    """How the calls of a reply to such a request are read; None where it can have none."""
    return renderer.syntax.knowing(tools) if renderer.syntax is not None and tools and tool_choice != "none" else None


def read_reply(
    renderer: Renderer,
    syntax: ToolSyntax | None,
    token_ids: Sequence[int],
    *,
    call_id: str,
    begun: str = "",
    stops: Sequence[str] = (),
    finish_reason: FinishReason,
) -> ReadReply:
    """The reply that these tokens are; `syntax` None: no calls are read out of it. `begun`: see `Renderer.begun`."""
    text = renderer.decode(token_ids) if syntax is None else renderer.decode_calls(token_ids)
    place = stop_place(text, stops)
    if place is not None:
        text, finish_reason = text[:place], FinishReason.STOP
    return read_text(syntax, begun + text, call_id=call_id, finish_reason=finish_reason)


def ends_at(
    renderer: Renderer, syntax: ToolSyntax | None, stops: Sequence[str]
) -> Callable[[Sequence[int]], bool] | None:
    """Whether sampled tokens hold a stop string, asked after each token; None where nothing is looked for.

    The token that completes it is the last one: what a client does not see must not be gone on from, nor be trained.
    """
    wanted = [stop for stop in stops if stop]
    if not wanted:
        return None
    # Several tokens may make one character, and a cut character changes its neighbours.
    num_looked_at = 4 * max(map(len, wanted)) + 8

    decode = renderer.decode if syntax is None else renderer.decode_calls

    def is_over(token_ids: Sequence[int]) -> bool:
        text = decode(token_ids[-num_looked_at:])
        return any(stop in text for stop in wanted)

    return is_over


def read_text(syntax: ToolSyntax | None, text: str, *, call_id: str, finish_reason: FinishReason) -> ReadReply:
    """As `read_reply`, for a text that was decoded and cut."""
    content, calls = syntax.read(text) if syntax is not None else (text, [])
    shown: list[dict[str, Any]] = []
    taken = {call.id for call in calls}
    for index, call in enumerate(calls):
        # Of two of the same id the first has it.
        own = call.id if call.id is not None and all(call.id != other["id"] for other in shown) else None
        derived = _derived_id(call_id, index, taken) if own is None else own
        function = {"name": call.name, "arguments": call.arguments}
        shown.append({"id": derived, "type": "function", "function": function})
    return ReadReply(
        content=content, tool_calls=shown, finish_reason=FinishReason.TOOL_CALLS if shown else finish_reason
    )


def _derived_id(call_id: str, index: int, taken: set[str | None]) -> str:
    """The same for the same call each time."""
    for salt in range(len(taken) + 1):
        number = int.from_bytes(hashlib.blake2b(f"{call_id}/{index}/{salt}".encode(), digest_size=16).digest())
        letters = []
        for _ in range(ID_LENGTH):
            number, letter = divmod(number, len(_LETTERS))
            letters.append(_LETTERS[letter])
        if "".join(letters) not in taken:
            break
    return "".join(letters)
