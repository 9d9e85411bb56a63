"""Messages as tokens, by the model's own chat template; what was sampled is never tokenized again.

    opening: the whole conversation + generation prompt          (starts a conversation)
    continuation: what follows a sampled reply in the template   (the end-of-turn token if the reply was cut before it,
                  whatever the template puts behind it, the new messages, the generation prompt)

The continuation is found without knowing the template: a stand-in conversation is rendered with the new messages, and
everything behind its reply's end-of-turn token is what the stored tokens lack.

Only the template makes control tokens: where the text of a message spells one, it is cut in two before it is tokenized.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from turnmill.errors import GenerationFailed, InvalidInput
from turnmill.records import encode

# Texts that no template treats specially and no message contains.
_QUESTION = "turnmill-stand-in-question"
_REPLY = "turnmill-stand-in-reply"
_STAND_IN = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _REPLY}]
# Where a text is cut for the tokenizer; Unicode says that this is no character and will never be one.
_CUT = "\ufdd0"
# Rendered texts that are remembered, and tokens of all of them; environments repeat prompts and observations.
_MOST_REMEMBERED, _MOST_REMEMBERED_TOKENS = 4096, 2_000_000


class Renderer:
    """The tokenizer and the chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        """Raises `InvalidInput` for a folder without a usable tokenizer or chat template."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(f"the tokenizer in {folder} can't be loaded: {error}") from error
        if not self._tokenizer.chat_template:
            raise InvalidInput(f"the tokenizer in {folder} has no chat template")
        self._remembered: dict[tuple[str, bytes], list[int]] = {}
        self.num_remembered_tokens = 0
        specials = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        # One that is a single character can't be cut.
        self._specials = {text for text in specials | set(self._tokenizer.all_special_tokens) if len(text) > 1}
        # Before the last character of a special token's text.
        self._cuts = re.compile("|".join(f"(?<={re.escape(t[:-1])})(?={re.escape(t[-1])})" for t in self._specials))
        try:
            plain = self._render(_STAND_IN, None, generation_prompt=False)
        except GenerationFailed as error:
            raise InvalidInput(f"the chat template in {folder} can't render a plain conversation: {error}") from error
        self._before_reply, self._end_text, self._separator = self._split(plain, folder)
        self._end_id = self._only_id(self._end_text, folder)
        self.end_ids: frozenset[int] = frozenset({self._end_id, *self._declared_ends(folder)})

    def opening(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """The tokens of a conversation's first prompt; raises `GenerationFailed` (invalid_request)."""
        return list(self._ids("opening", messages, tools))

    def continuation(
        self, new_messages: Sequence[dict[str, Any]], *, ended: bool, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The tokens between a sampled reply and the next one; `ended` says that the reply has its end token.

        Raises `GenerationFailed` (invalid_request) where the template renders what is stored differently when these
        messages follow, so that no exact continuation exists.
        """
        ids = self._ids("continuation", new_messages, tools)
        return list(ids[1:] if ended else ids)

    def plain(self, text: str) -> list[int]:
        """The tokens of a text that is no conversation; control tokens that it spells are control tokens."""
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    def token_of(self, token_id: int) -> str:
        """One token by itself, as it is printed."""
        text: str = self._tokenizer.decode([token_id])
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens without special ones."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def _ids(self, kind: str, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        key = (kind, encode([messages, tools]))
        ids = self._remembered.get(key)
        if ids is None:
            if kind == "opening":
                ids = self._encode(self._render(messages, tools, generation_prompt=True))
            else:
                ids = self._encode(self._after_reply(messages, tools))
                if ids[0] != self._end_id:
                    raise GenerationFailed("invalid_request", "the end-of-turn token merges with what follows it")
            self._remember(key, ids)
        return ids

    def _remember(self, key: tuple[str, bytes], ids: list[int]) -> None:
        """The oldest ones make room; one that takes all of it is not worth that."""
        if len(ids) > _MOST_REMEMBERED_TOKENS // 2:
            return
        self._remembered[key] = ids
        self.num_remembered_tokens += len(ids)
        while len(self._remembered) > _MOST_REMEMBERED or self.num_remembered_tokens > _MOST_REMEMBERED_TOKENS:
            self.num_remembered_tokens -= len(self._remembered.pop(next(iter(self._remembered))))

    def _after_reply(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """End-of-turn text of the stand-in reply and everything behind it.

        The end token stays in front while the text is tokenized, because what a tokenizer does at the start of a text
        (a space put in front, say) it does not do behind a special token.
        """
        text = self._render([*_STAND_IN, *messages], tools, generation_prompt=True)
        before, found, behind = text.partition(_REPLY)
        behind = behind.lstrip(" ") if not behind.startswith(self._end_text) else behind
        stable = found and behind.startswith(self._end_text + self._separator)
        if not stable or (not tools and not before.startswith(self._before_reply)):
            raise GenerationFailed(
                "invalid_request",
                "the chat template changes earlier turns when messages follow "
                f"(roles {[message.get('role') for message in messages]}): their tokens can't be continued",
            )
        return behind

    def _split(self, plain: str, folder: Path) -> tuple[str, str, str]:
        """(text up to the end of the question, end-of-turn text, text behind it) of the rendered stand-in."""
        before, found, behind = plain.partition(_REPLY)
        question_end = before.find(_QUESTION)
        if not found or question_end < 0:
            raise InvalidInput(f"the chat template in {folder} does not render the text of messages")
        places = sorted((behind.find(token), -len(token), token) for token in self._specials if token in behind)
        if not places:
            raise InvalidInput(f"the chat template in {folder} ends an assistant's turn without a special token")
        place, _, end_text = places[0]
        if behind[:place].strip(" "):
            raise InvalidInput(f"the chat template in {folder} puts text between a reply and its end token")
        return before[: question_end + len(_QUESTION)], end_text, behind[place + len(end_text) :]

    def _only_id(self, text: str, folder: Path) -> int:
        ids = self._encode(text)
        if len(ids) != 1:
            raise InvalidInput(f"the end-of-turn text {text!r} in {folder} is not one token")
        return ids[0]

    def _declared_ends(self, folder: Path) -> set[int]:
        """End tokens that the tokenizer and generation_config.json name."""
        path = folder / "generation_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        named = config.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        return {token for token in [self._tokenizer.eos_token_id, *ids] if token is not None}

    def _render(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generation_prompt: bool
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [self._cut(_plain(message)) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise GenerationFailed("invalid_request", f"the chat template refuses these messages: {error}") from error
        return text

    def _cut(self, value: Any) -> Any:
        """`value` with each text in it cut inside of what would become a special token."""
        if isinstance(value, dict):
            return {key: self._cut(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._cut(item) for item in value]
        if not isinstance(value, str) or not self._specials:
            return value
        if _CUT in value:
            raise GenerationFailed("invalid_request", "a message holds U+FDD0, which is no character")
        return self._cuts.sub(_CUT, value)

    def _encode(self, text: str) -> list[int]:
        # The template has written every special token, a leading one included.
        first, *others = text.split(_CUT)
        ids: list[int] = self._tokenizer.encode(first, add_special_tokens=False)
        for part in others:
            # Behind a special token, for the reason that `_after_reply` gives.
            ids += self._tokenizer.encode(self._end_text + part, add_special_tokens=False)[1:]
        return ids


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text parts joined: most templates know text as a string only, and print anything else."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not (content is None or isinstance(content, str)):
        raise GenerationFailed("invalid_request", "a message needs a role and a text or a list of text parts")
    return {**message, "content": content}
