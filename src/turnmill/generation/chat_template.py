"""The chat template of one model folder, and its tokenizer: messages -> text -> tokens.

How a template ends an assistant's turn is found by rendering a stand-in conversation, never by a model's name.

Only the template makes control tokens: where the text of a message spells one, it is cut in two before it is tokenized.
"""

import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from turnmill.errors import GenerationFailed, InvalidInput

# Texts that no template treats specially and no message contains.
QUESTION = "turnmill-stand-in-question"
REPLY = "turnmill-stand-in-reply"
ASKED = {"role": "user", "content": QUESTION}
ANSWERED = [ASKED, {"role": "assistant", "content": REPLY}]
# Where a text is cut for the tokenizer; Unicode says that this is no character and will never be one.
_CUT = "\ufdd0"


class ChatTemplate:
    """Renders and encodes. `end_text`: what ends an assistant's turn, `separator`: what the template puts behind it."""

    def __init__(self, folder: Path) -> None:
        """Raises `InvalidInput` for a folder without a usable tokenizer or chat template."""
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(f"the tokenizer in {folder} can't be loaded: {error}") from error
        if not self.tokenizer.chat_template:
            raise InvalidInput(f"the tokenizer in {folder} has no chat template")
        # Some templates want the arguments of a call as the JSON text that clients send; most want the object.
        self.arguments_as_text = False
        added = self.tokenizer.added_tokens_decoder
        self.special_ids = {token_id for token_id, token in added.items() if token.special}
        # One that is a single character can't be cut.
        texts = {added[token_id].content for token_id in self.special_ids} | set(self.tokenizer.all_special_tokens)
        self.specials = {text for text in texts if len(text) > 1}
        # Before the last character of a special token's text.
        self._cuts = re.compile("|".join(f"(?<={re.escape(t[:-1])})(?={re.escape(t[-1])})" for t in self.specials))
        try:
            plain = self.render(ANSWERED, generation_prompt=False)
        except GenerationFailed as error:
            raise InvalidInput(f"the chat template in {folder} can't render a plain conversation: {error}") from error
        self.end_text, self.separator = self._split(plain, folder)
        self.end_id = self._only_id(self.end_text, folder)
        self.end_ids: frozenset[int] = frozenset({self.end_id, *self._declared_ends(folder)})

    def render(
        self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None, *, generation_prompt: bool
    ) -> str:
        """The text of a conversation, cut; raises `GenerationFailed` (invalid_request) where the template refuses."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._cut(_plain(message, as_text=self.arguments_as_text)) for message in messages],
                tools=self._cut(tools),
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise GenerationFailed("invalid_request", f"the chat template refuses these messages: {error}") from error
        return text

    def encode(self, text: str) -> list[int]:
        """The tokens of a rendered text."""
        # The template has written every special token, a leading one included.
        first, *others = text.split(_CUT)
        ids: list[int] = self.tokenizer.encode(first, add_special_tokens=False)
        return [*ids, *itertools.chain.from_iterable(self._encode_part(part) for part in others)]

    def encode_behind(self, text: str, before: str = "") -> list[int]:
        """The tokens of a text that stands in the midst of others, in the tokens that end with those of `before`."""
        first, *others = text.split(_CUT)
        there, both = self._encode_part(before), self._encode_part(before + first)
        # Where the two would merge, what is there stays.
        ids = both[len(there) :] if both[: len(there)] == there else self._encode_part(first)
        return [*ids, *itertools.chain.from_iterable(self._encode_part(part) for part in others)]

    def _encode_part(self, text: str) -> list[int]:
        """Behind a special token: what a tokenizer does at the start of a text (a space in front) is not done here."""
        ids: list[int] = self.tokenizer.encode(self.end_text + text, add_special_tokens=False)
        return ids[1:]

    def cut(self, text: str) -> str:
        """`text` with a cut inside of what would become a special token."""
        if _CUT in text:
            raise GenerationFailed("invalid_request", "a message holds U+FDD0, which is no character")
        return self._cuts.sub(_CUT, text) if self.specials else text

    def decode(self, ids: Sequence[int], keep: frozenset[int] = frozenset()) -> str:
        """The text of tokens, without special ones but those to keep."""
        if keep:
            shown = [token for token in ids if token not in self.special_ids or token in keep]
            text: str = self.tokenizer.decode(shown, skip_special_tokens=False)
        else:
            text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def first_special(self, text: str) -> tuple[int, str] | None:
        """Where the first special token in a rendered text is, and which it is; of several there, the longest."""
        places = sorted((text.find(token), -len(token), token) for token in self.specials if token in text)
        return (places[0][0], places[0][2]) if places else None

    def _cut(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {self._cut(key): self._cut(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._cut(item) for item in value]
        return self.cut(value) if isinstance(value, str) else value

    def _split(self, plain: str, folder: Path) -> tuple[str, str]:
        """(end-of-turn text, text behind it) of the rendered stand-in."""
        before, found, behind = plain.partition(REPLY)
        if not found or QUESTION not in before:
            raise InvalidInput(f"the chat template in {folder} does not render the text of messages")
        first = self.first_special(behind)
        if first is None:
            raise InvalidInput(f"the chat template in {folder} ends an assistant's turn without a special token")
        place, end_text = first
        if behind[:place].strip(" "):
            raise InvalidInput(f"the chat template in {folder} puts text between a reply and its end token")
        return end_text, behind[place + len(end_text) :]

    def _only_id(self, text: str, folder: Path) -> int:
        ids = self.encode(text)
        if len(ids) != 1:
            raise InvalidInput(f"the end-of-turn text {text!r} in {folder} is not one token")
        return ids[0]

    def _declared_ends(self, folder: Path) -> set[int]:
        """End tokens that the tokenizer and generation_config.json name."""
        path = folder / "generation_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        named = config.get("eos_token_id")
        ids = named if isinstance(named, list) else [named]
        return {token for token in [self.tokenizer.eos_token_id, *ids] if token is not None}


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, its parts joined: most templates know text as a string only, and print anything else."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        content = "".join(part["text"] for part in content)
    if not isinstance(message.get("role"), str) or not (content is None or isinstance(content, str)):
        raise GenerationFailed("invalid_request", "a message needs a role and a text or a list of text parts")
    return content or ""


def _plain(message: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """The message as templates know it: its text as one string, its tool calls in one form."""
    plain = {**message, "content": text_of(message)}
    calls = plain.pop("tool_calls", None)
    return {**plain, "tool_calls": [_plain_call(call, as_text=as_text) for call in calls]} if calls else plain


def _plain_call(call: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    """A call with its keys in one order, because templates print objects as they come.

    Clients send arguments as JSON text; where the object is wanted, what is no JSON object stays the text.
    """
    function = call["function"]
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str) and not as_text:
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    if as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    identified = {"id": call["id"]} if call.get("id") else {}
    return {**identified, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
