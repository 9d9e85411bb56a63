"""JSON as data files may hold it: no duplicate keys, no NaN, no endless nesting, nothing that UTF-8 can't write."""

import json
import math
import re
from typing import Any, NoReturn

from turnmill.errors import printable

# Levels of objects and lists; a row is level 1.
MAX_NESTING = 64

# Strings as a whole (an unterminated one too), and brackets. Possessive, so that no text takes quadratic time.
_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+(?P<end>"?)|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")


class NotStrict(ValueError):
    """Text that is not JSON, or JSON that is refused."""

    def __init__(
        self, rule: str, message: str, *, key: str | None = None, column: int | None = None, needle: str = ""
    ) -> None:
        super().__init__(message)
        self.rule = rule
        # The key that it is about, where that is known.
        self.key = key
        # Of the first wrong character, from 1; None where unknown.
        self.column = column
        # What to look for where the parser doesn't tell the column.
        self.needle = needle


def loads(text: str) -> Any:
    """The value; raises `NotStrict` and never `RecursionError`, whatever the text."""
    # Only the rare text with that many brackets is worth a look at its structure.
    if text.count("{") + text.count("[") > MAX_NESTING and (column := _too_deep(text)) is not None:
        raise NotStrict("nesting", f"nested deeper than {MAX_NESTING} levels", column=column)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise NotStrict("json", f"not valid JSON: {error.msg}", column=error.pos + 1) from error
    except NotStrict as error:
        if error.column is None and error.needle and text.count(error.needle) == 1:
            error.column = text.index(error.needle) + 1
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise NotStrict("number", "a number has too many digits: write it as a string") from error
    if "\\u" in text and _SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise NotStrict("unicode", "a lone surrogate (half of a \\uD8xx\\uDCxx pair) is no Unicode text")
    return value


def is_cut_off(text: str) -> bool:
    """Whether `text` ends inside of a string, an object or a list: what a write that broke off leaves."""
    depth = 0
    for token in _TOKEN.finditer(text):
        first = token.group()[0]
        if first == '"':
            if not token["end"]:
                return True
        else:
            depth += 1 if first in "[{" else -1
    return depth > 0


def _too_deep(text: str) -> int | None:
    """Column of the bracket that opens one level too many; None if there is none."""
    depth = 0
    for token in _TOKEN.finditer(text):
        first = token.group()[0]
        if first in "[{":
            depth += 1
            if depth > MAX_NESTING:
                return token.start() + 1
        elif first in "]}":
            depth -= 1
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise NotStrict("duplicate_key", f'the key "{printable(twice)}" is given twice in one object', key=twice)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NotStrict("finite_number", f"{text[:40]} is out of the range of a number", needle=text)
    return number


def _no_constant(name: str) -> NoReturn:
    raise NotStrict("finite_number", f"{name} is not JSON: leave the value out, or write null or a string", needle=name)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
