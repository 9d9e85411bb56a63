"""Whether a conversation as it is stored is what its template would make of all of its messages in one go.

    messages -> opening + sampled + continuation + sampled + ...   (stored: append-only, what the model was shown)
             -> the template, once                                 (one go)

Stored tokens rule: training and serving go on from them. Where a template renders earlier turns anew (it strips
thoughts, or moves the tools to the last question), whoever renders in one go shows the model something else.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from turnmill.errors import GenerationFailed
from turnmill.generation.chat_template import ASKED, QUESTION, REPLY
from turnmill.generation.renderer import Renderer
from turnmill.generation.syntax_learning import TOOL, stand_in_call

logger = logging.getLogger(__name__)
# Another question than the first: some templates tell messages apart by what they say.
_LATER = {"role": "user", "content": f"{QUESTION}-later"}
# Characters of each side that a difference shows.
_SHOWN = 240


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation, stored and rendered in one go. Axes: tokens."""

    # What happens in it.
    name: str
    stored_ids: list[int]
    one_go_ids: list[int]
    # Their texts, control tokens included.
    stored: str
    one_go: str
    # Where they are different: the text of each.
    stored_part: str
    one_go_part: str

    @property
    def is_equal(self) -> bool:
        return self.stored_ids == self.one_go_ids

    @property
    def difference(self) -> str:
        """In one line; "" where there is none."""
        if self.is_equal:
            return ""
        stored, one_go = (_shown(text) for text in (self.stored_part, self.one_go_part))
        return f"{self.name}: stored is {stored}, in one go it would be {one_go}"


def compare(
    renderer: Renderer, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None, name: str = ""
) -> Comparison:
    """The conversation of these messages, of which the last is to be answered, and what was said before was sampled.

    Raises `GenerationFailed` where the template refuses.
    """
    stored, one_go = renderer.turn_by_turn(messages, tools), renderer.one_go(messages, tools)
    parts = [_text(renderer, ids) for ids in _different(stored, one_go)]
    return Comparison(
        name=name,
        stored_ids=stored,
        one_go_ids=one_go,
        stored=_text(renderer, stored),
        one_go=_text(renderer, one_go),
        stored_part=parts[0],
        one_go_part=parts[1],
    )


def probe(renderer: Renderer) -> list[Comparison]:
    """What the model's template does with stand-in conversations: turns, thoughts, tool calls; those it renders."""
    conversations: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
        "turns": ([*_turn(1), *_turn(2), _LATER], None)
    }
    if renderer.thoughts is not None:
        before, after = renderer.thoughts
        asked, answered = _turn(1)
        thought = {**answered, "content": f"{before}turnmill-thought{after}{answered['content']}"}
        conversations["thoughts"] = ([asked, thought, _LATER], None)
    if renderer.renders_tools and renderer.syntax is not None:
        num_calls = 1 if renderer.syntax.separator is None else 2
        calls = [stand_in_call(index) for index in range(num_calls)]
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": f"result {call['id']}"} for call in calls]
        called: list[dict[str, Any]] = [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *answers]
        conversations["tool calls"] = (called, [TOOL])
        conversations["a question after tool calls"] = ([*called, _turn(1)[1], _LATER], [TOOL])
    found = []
    for name, (messages, tools) in conversations.items():
        try:
            found.append(compare(renderer, messages, tools, name))
        except GenerationFailed as error:
            logger.info("%s: %s", name, error)
    return found


def warn_of_differences(renderer: Renderer) -> None:
    """Log once what a user of this model should know of its template."""
    differences = [comparison.difference for comparison in probe(renderer) if not comparison.is_equal]
    if differences:
        logger.warning(
            "the model's chat template renders earlier turns anew when others follow; conversations are trained and "
            "served as they were sampled, which differs from a rendering in one go by: %s",
            "; ".join(differences),
        )
    if renderer.renders_tools and renderer.syntax is None:
        logger.warning(
            "the model's chat template tells of tools, but how it writes tool calls is not known here: replies stay "
            "text, and no call can be forced"
        )


def _turn(number: int) -> list[dict[str, Any]]:
    return [ASKED, {"role": "assistant", "content": f"{REPLY}-{number}"}]


def _different(first: list[int], second: list[int]) -> tuple[list[int], list[int]]:
    """Both without what they begin and end with in common."""
    shorter = min(len(first), len(second))
    start = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    end = next((i for i in range(shorter - start) if first[-1 - i] != second[-1 - i]), shorter - start)
    return first[start : len(first) - end], second[start : len(second) - end]


def _text(renderer: Renderer, ids: Sequence[int]) -> str:
    text: str = renderer.template.tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} [...] {text[-_SHOWN // 2 :]}")
