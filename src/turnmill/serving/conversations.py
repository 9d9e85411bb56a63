"""From messages to tokens, as in training: a conversation that is known goes on after the tokens that were sampled.

messages -> the longest beginning that ends with a reply of ours -> its tokens + continuation (and its KV cache)
         -> none is known                                        -> opening
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from turnmill.conversation.branches import conversation_start, extend_hash, prefix_hashes
from turnmill.errors import GenerationFailed
from turnmill.generation.renderer import Renderer

# Tokens of all conversations that are remembered; the one that was used longest ago is forgotten first.
MAX_REMEMBERED = 1_000_000


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What is sampled after. Axes: the prompt is `context_ids` followed by `new_ids`."""

    # Name of the cache that may hold the context; None without a context.
    prefix_key: str | None
    context_ids: list[int]
    new_ids: list[int]
    # Of the conversation so far; empty for a text.
    hash: bytes
    # Of the remembered conversation that goes on with this; None: it is rendered anew.
    known_hash: bytes | None = None
    # What the reply begins with, at the end of `new_ids`; "" where it is free.
    begun: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + len(self.new_ids)


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation up to a reply of ours."""

    key: str
    ids: list[int]
    # The reply has its end token.
    has_ended: bool


class Conversations:
    """What was said so far, by what it says."""

    def __init__(self, renderer: Renderer, *, max_remembered: int = MAX_REMEMBERED) -> None:
        self.renderer = renderer
        self._max_remembered = max_remembered
        self._num_remembered = 0
        # By the hash of the conversation, the one used longest ago first.
        self._known: dict[bytes, _Known] = {}

    def prompt(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
    ) -> Prompt:
        """Changes nothing that `remember` does, which may be called meanwhile.

        Raises `GenerationFailed` for messages that the chat template refuses, and for tools that it does not render.
        """
        begun = self.renderer.begun(tool_choice, tools)
        hashes = prefix_hashes(messages, conversation_start(tools))
        for index in range(len(messages) - 2, -1, -1):
            known = self._known.get(hashes[index]) if messages[index]["role"] == "assistant" else None
            if known is not None:
                new_ids = self._continuation(messages[index + 1 :], known, tools, begun)
                if new_ids is not None:
                    return Prompt(
                        prefix_key=known.key,
                        context_ids=known.ids,
                        new_ids=new_ids,
                        hash=hashes[-1],
                        known_hash=hashes[index],
                        begun=begun,
                    )
        new_ids = self.renderer.opening(messages, tools, begun)
        return Prompt(prefix_key=None, context_ids=[], new_ids=new_ids, hash=hashes[-1], begun=begun)

    def _continuation(
        self, messages: Sequence[dict[str, Any]], known: _Known, tools: list[dict[str, Any]] | None, begun: str
    ) -> list[int] | None:
        """None where the template renders what was said before differently when these messages follow."""
        try:
            return self.renderer.continuation(messages, ended=known.has_ended, tools=tools, begun=begun)
        except GenerationFailed:
            return None

    def text(self, text: str) -> Prompt:
        """The prompt of a completion that is no conversation."""
        return Prompt(prefix_key=None, context_ids=[], new_ids=self.renderer.plain(text), hash=b"")

    def remember(self, prompt: Prompt, key: str, sampled_ids: Sequence[int], reply: dict[str, Any]) -> None:
        """The prompt was answered with this message; `key` names the cache."""
        ids = [*prompt.context_ids, *prompt.new_ids, *sampled_ids]
        has_ended = bool(sampled_ids) and sampled_ids[-1] in self.renderer.end_ids
        hash_ = extend_hash(prompt.hash, reply)
        self._forget(hash_)
        if prompt.known_hash in self._known:
            # It was used, so that others are forgotten first.
            self._known[prompt.known_hash] = self._known.pop(prompt.known_hash)
        self._known[hash_] = _Known(key=key, ids=ids, has_ended=has_ended)
        self._num_remembered += len(ids)
        while self._num_remembered > self._max_remembered:
            self._forget(next(iter(self._known)))

    def _forget(self, hash_: bytes) -> None:
        known = self._known.pop(hash_, None)
        self._num_remembered -= len(known.ids) if known else 0
