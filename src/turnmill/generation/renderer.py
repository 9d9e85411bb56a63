"""Messages as tokens, by the model's own chat template; what was sampled is never tokenized again.

    opening: the conversation up to the reply                    (starts a conversation)
    continuation: what follows a sampled reply in the template   (the end-of-turn token if the reply was cut before it,
                  whatever the template puts behind it, the new messages, the generation prompt)

The continuation is found without knowing the template: a stand-in conversation is rendered with the new messages, and
everything behind its reply's end-of-turn token is what the stored tokens lack. Where tool messages come first, the
stand-in reply calls as many tools, and all of the new messages are rendered in one go: templates group and check them.

An opening that holds replies is rendered turn by turn in the same way, each reply as it was said: so a conversation
that is begun in its midst, by a fork or in another process, has the tokens that it has where it was sampled.

A reply that must call a tool begins with what opens a call, which is a part of the prompt.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from turnmill.errors import GenerationFailed
from turnmill.generation.chat_template import ANSWERED, ASKED, QUESTION, REPLY, ChatTemplate, text_of
from turnmill.generation.syntax_learning import (
    TOOL,
    call_end,
    learn,
    renders_tools,
    reply_start,
    stand_in_call,
    thoughts,
)
from turnmill.records import TEXT_ROLE, encode

# Rendered texts that are remembered, and tokens of all of them; environments repeat prompts and observations.
_MOST_REMEMBERED, _MOST_REMEMBERED_TOKENS = 4096, 2_000_000

Tools = list[dict[str, Any]]


class Renderer:
    """The tokenizer and the chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `InvalidInput` for a folder without a usable tokenizer or chat template."""
        self.template = ChatTemplate(folder)
        # By kind, what the reply begins with, and the digest of messages and tools: tools may be long, and are the same
        # in many entries.
        self._remembered: dict[tuple[str, str, bytes], list[int]] = {}
        self.num_remembered_tokens = 0
        # How the model writes tool calls; None: not found in its template.
        self.syntax = learn(self.template)
        # Its prompts tell which tools there are.
        self.renders_tools = renders_tools(self.template)
        # What stands around a reply's thoughts; None: the template knows none.
        self.thoughts = thoughts(self.template)
        ends = {self.syntax.end_text} if self.syntax is not None else set()
        self.end_ids: frozenset[int] = self.template.end_ids | {
            token for text in ends for token in self.template.encode(text)[:1]
        }
        self.end_texts = {self.template.end_text, *ends}
        self._question = self._rendered_question()
        self._before_reply = self._end_of_prompt()

    def opening(self, messages: Sequence[dict[str, Any]], tools: Tools | None = None, begun: str = "") -> list[int]:
        """The tokens of a conversation's first prompt, and of what its reply begins with.

        Raises `GenerationFailed` (invalid_request).
        """
        return list(self._ids("opening", messages, tools, begun))

    def one_go(self, messages: Sequence[dict[str, Any]], tools: Tools | None = None, begun: str = "") -> list[int]:
        """The tokens that the template makes of all messages at once, earlier replies rendered anew."""
        return self.template.encode(self.template.render(messages, tools, generation_prompt=True) + begun)

    def turn_by_turn(
        self, messages: Sequence[dict[str, Any]], tools: Tools | None = None, begun: str = ""
    ) -> list[int]:
        """The tokens of a conversation whose replies were sampled; the last message is to be answered.

        Raises `GenerationFailed` where the template does not render one of the turns by itself.
        """
        ids: list[int] = []
        start = 0
        for index, message in enumerate(messages):
            if message.get("role") == "assistant":
                ids += self._turn(ids, messages[start:index], tools, "")
                ids += self.said(message, tools)
                start = index + 1
        return ids + self._turn(ids, messages[start:], tools, begun)

    def said(self, message: dict[str, Any], tools: Tools | None = None) -> list[int]:
        """The tokens of a reply as it was said: its text, its calls as the template writes them, its end token."""
        return list(self._ids("said", [message], [TOOL] if tools else None, ""))

    def continuation(
        self, new_messages: Sequence[dict[str, Any]], *, ended: bool, tools: Tools | None = None, begun: str = ""
    ) -> list[int]:
        """The tokens between a sampled reply and the next one; `ended` says that the reply has its end token.

        Raises `GenerationFailed` (invalid_request) where the template renders what is stored differently when these
        messages follow, so that no exact continuation exists.
        """
        if ended and _is_text(new_messages):
            raise GenerationFailed("invalid_request", "the text ended with its end token: nothing can follow")
        ids = self._ids("continuation", new_messages, tools, begun)
        return list(ids[1:] if ended else ids)

    def begun(self, tool_choice: str, tools: Tools | None) -> str:
        """What the reply to a request with this tool choice begins with; "" where it is free.

        Raises `GenerationFailed` (invalid_request) where the choice can't be kept.
        """
        if tool_choice in ("auto", "none"):
            return ""
        if not tools:
            raise GenerationFailed("invalid_request", f"tool_choice {tool_choice} needs tools")
        if self.syntax is None:
            raise GenerationFailed(
                "invalid_request",
                f"tool_choice {tool_choice} is not possible: how this model writes tool calls was not found in its "
                "chat template",
            )
        name = tool_choice.removeprefix("function:") if tool_choice != "required" else None
        functions = [tool.get("function") for tool in tools]
        if name is not None and name not in [item.get("name") for item in functions if isinstance(item, dict)]:
            raise GenerationFailed("invalid_request", f"tool_choice names {name!r}, which is none of the tools")
        return self.syntax.opening(name)

    def plain(self, text: str) -> list[int]:
        """The tokens of a text that is no conversation; control tokens that it spells are control tokens."""
        ids: list[int] = self.template.tokenizer.encode(text)
        return ids

    def token_of(self, token_id: int) -> str:
        """One token by itself, as it is printed."""
        text: str = self.template.tokenizer.decode([token_id])
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens without special ones."""
        return self.template.decode(ids)

    def decode_calls(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens with the special ones that tool calls are written with, and no others."""
        return self.template.decode(ids, self.syntax.special_ids if self.syntax is not None else frozenset())

    # ------------------------------------------------------------ rendering

    def _ids(self, kind: str, messages: Sequence[dict[str, Any]], tools: Tools | None, begun: str) -> list[int]:
        key = (kind, begun, hashlib.blake2b(encode([messages, tools]), digest_size=16).digest())
        ids = self._remembered.get(key)
        if ids is None:
            ids = self._encode(kind, messages, tools, begun)
            self._remember(key, ids)
        return ids

    def _encode(self, kind: str, messages: Sequence[dict[str, Any]], tools: Tools | None, begun: str) -> list[int]:
        if kind == "said":
            text, end_text = self._said(messages[0], tools)
            return self.template.encode_behind(text + end_text, self._before_reply)
        if any(message.get("role") == TEXT_ROLE for message in messages):
            return self._encode_text(kind, messages, tools)
        if tools and not self.renders_tools:
            raise GenerationFailed("invalid_request", "this model's chat template does not tell the model of tools")
        if kind == "opening":
            return self._encode_opening(messages, tools, begun)
        ids = self.template.encode(self._after_reply(messages, tools) + begun)
        if ids[0] not in self.end_ids:
            raise GenerationFailed("invalid_request", "the end-of-turn token merges with what follows it")
        return ids

    def _encode_opening(self, messages: Sequence[dict[str, Any]], tools: Tools | None, begun: str) -> list[int]:
        if any(message.get("role") == "assistant" for message in messages):
            try:
                return self.turn_by_turn(messages, tools, begun)
            except GenerationFailed:
                # Its turns are none by themselves (a reply comes first, for instance): the template may know better.
                return self.one_go(messages, tools, begun)
        return self.one_go(messages, tools, begun)

    def _turn(
        self, before: list[int], messages: Sequence[dict[str, Any]], tools: Tools | None, begun: str
    ) -> list[int]:
        if before:
            return self.continuation(messages, ended=True, tools=tools, begun=begun)
        return self.opening(messages, tools, begun)

    def _said(self, message: dict[str, Any], tools: Tools | None) -> tuple[str, str]:
        """The text of a reply, cut, and what ends its turn; of the tools only counts whether there are any."""
        content = self.template.cut(text_of(message))
        if not message.get("tool_calls"):
            return content, self.template.end_text
        if self.syntax is None:
            return self._reply(message, tools), self.template.end_text
        calls = self._reply({**message, "content": ""}, tools)
        thoughts_end = self.syntax.thoughts_end
        if not self.syntax.mark and not (thoughts_end and content.rstrip().endswith(thoughts_end)):
            # Calls are all that such a reply says.
            return calls, self.syntax.end_text
        if content and not content[-1].isspace():
            _, _, behind = self._reply({**message, "content": REPLY}, tools).partition(REPLY)
            content += behind[: max(0, behind.find(calls))]
        return content + calls, self.syntax.end_text

    def _reply(self, message: dict[str, Any], tools: Tools | None) -> str:
        """The text of a reply that calls as the template renders it, without what ends it."""
        text = self.template.render([ASKED, message], tools, generation_prompt=False)
        start = reply_start(self.template, text, tools)
        end = max(text.rfind(end_text) for end_text in self.end_texts)
        if end < start:
            raise GenerationFailed("invalid_request", "the chat template does not end a reply that calls tools")
        return text[start:end]

    def _encode_text(self, kind: str, messages: Sequence[dict[str, Any]], tools: Tools | None) -> list[int]:
        """A plain text: it begins as the tokenizer begins texts, and goes on with nothing in between."""
        if not _is_text(messages) or tools:
            raise GenerationFailed("invalid_request", "a plain text is one message by itself, without tools")
        text = messages[0]["content"]
        return self.plain(text) if kind == "opening" else self.template.encode_behind(text)

    def _remember(self, key: tuple[str, str, bytes], ids: list[int]) -> None:
        """The oldest ones make room; one that takes all of it is not worth that."""
        if len(ids) > _MOST_REMEMBERED_TOKENS // 2:
            return
        self._remembered[key] = ids
        self.num_remembered_tokens += len(ids)
        while len(self._remembered) > _MOST_REMEMBERED or self.num_remembered_tokens > _MOST_REMEMBERED_TOKENS:
            self.num_remembered_tokens -= len(self._remembered.pop(next(iter(self._remembered))))

    def _after_reply(self, messages: Sequence[dict[str, Any]], tools: Tools | None) -> str:
        """End-of-turn text of the stand-in reply and everything behind it.

        The end token stays in front while the text is tokenized, because what a tokenizer does at the start of a text
        (a space put in front, say) it does not do behind a special token.
        """
        for calls in _stand_in_calls(messages):
            behind = self._after_calls(calls, messages, tools)
            if behind is not None:
                return behind
        text = self.template.render([*ANSWERED, *messages], tools, generation_prompt=True)
        before, found, behind = text.partition(REPLY)
        end_text = self.template.end_text
        behind = behind.lstrip(" ") if not behind.startswith(end_text) else behind
        is_stable = found and behind.startswith(end_text + self.template.separator)
        if not is_stable or (not tools and not self._begins_as_ever(before)):
            raise GenerationFailed(
                "invalid_request",
                "the chat template changes earlier turns when messages follow "
                f"(roles {[message.get('role') for message in messages]}): their tokens can't be continued",
            )
        return behind

    def _begins_as_ever(self, before: str) -> bool:
        """The text in front of a reply is what it is without the messages behind it, up to the end of the question."""
        if not before.startswith(self._question):
            # It may hold the date.
            self._question = self._rendered_question()
        return before.startswith(self._question)

    def _end_of_prompt(self) -> str:
        """What stands between the last control token of a prompt and the reply: white space, in most templates."""
        _, _, text = self.template.render([ASKED], generation_prompt=True).partition(QUESTION)
        while (special := self.template.first_special(text)) is not None:
            text = text[special[0] + len(special[1]) :]
        return text

    def _rendered_question(self) -> str:
        plain = self.template.render(ANSWERED, generation_prompt=False)
        return plain[: plain.find(QUESTION) + len(QUESTION)]

    def _after_calls(self, calls: Tools, messages: Sequence[dict[str, Any]], tools: Tools | None) -> str | None:
        """As `_after_reply`, behind a stand-in reply that calls; None where the template does not render it so."""
        reply = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            text = self.template.render([ASKED, reply, *messages], tools, generation_prompt=True)
        except GenerationFailed:
            return None
        place = call_end(text, len(calls) - 1)
        ends = [end for token in self.end_texts if place >= 0 and (end := text.find(token, place)) >= 0]
        return text[min(ends) :] if ends else None


def _is_text(messages: Sequence[dict[str, Any]]) -> bool:
    return len(messages) == 1 and messages[0].get("role") == TEXT_ROLE and isinstance(messages[0].get("content"), str)


def _stand_in_calls(messages: Sequence[dict[str, Any]]) -> Iterator[Tools]:
    """Calls that the tool messages in front may answer: one for each, or one for all where a template knows only one.

    Nothing where no tool messages come first.
    """
    answers = list(itertools.takewhile(lambda message: message.get("role") == "tool", messages))
    calls = [stand_in_call(index, answer.get("tool_call_id")) for index, answer in enumerate(answers)]
    if calls:
        yield calls
    if len(calls) > 1:
        yield calls[:1]
