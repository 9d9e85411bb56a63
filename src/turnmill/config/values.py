"""One value: parsed from text, checked against its parameter, shown in a message."""

import difflib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, NoReturn

from turnmill.config.parameters import Parameter
from turnmill.errors import printable

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Beyond it (NaN is never within) a number is no finite float, or about to leave the range in a product.
_LARGEST = 1e300
# Levels of a JSON value.
_DEEPEST = 64


class Unfit(Exception):
    """A value does not fit its parameter; the text says what is allowed."""


def parse(parameter: Parameter, text: str) -> Any:
    """The value written as `text` on the command line or in the environment; `check` it next. Raises `Unfit`."""
    stripped = text.strip()
    if parameter.kind is bool:
        if stripped.lower() not in _BOOLEANS:
            raise Unfit(f"must be one of {', '.join(_BOOLEANS)}")
        return _BOOLEANS[stripped.lower()]
    if parameter.kind is int and _INTEGER.fullmatch(stripped):
        return int(stripped)
    if parameter.kind is float and _NUMBER.fullmatch(stripped):
        return float(stripped)
    if parameter.kind is dict:
        try:
            return json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise Unfit(f"must be a JSON object such as '{{\"max_turns\": 6}}' ({error})") from error
    if parameter.kind is tuple:
        return [name.strip() for name in text.split(",")] if stripped else []
    # Text; or no number at all, which `check` refuses by its type.
    return text


def check(parameter: Parameter, value: Any) -> Any:
    """`value` if it has the parameter's type and is in its range (an integer counts as a number); raises `Unfit`."""
    # `type(...) is`, because a bool is an int to isinstance.
    fits = type(value) is parameter.kind or (parameter.kind is float and type(value) is int)
    if parameter.kind is tuple and type(value) in (list, tuple):
        return _texts(value)
    if not fits:
        raise Unfit(f"must be {parameter.allowed}{suggest(value, parameter.choices)}")
    if parameter.kind is str and not _is_unicode(value):
        raise Unfit("must be Unicode text")
    if parameter.kind is dict and (why := _not_json(value)):
        raise Unfit(f"must be a JSON object: {why}")
    if parameter.choices and value not in parameter.choices:
        raise Unfit(f"must be {parameter.allowed}{suggest(value, parameter.choices)}")
    if parameter.kind in (int, float):
        _check_range(parameter, value)
    return float(value) if parameter.kind is float else value


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    """As they are, if each is a text that says something and none is there twice; raises `Unfit`."""
    texts = tuple(values)
    if not all(type(text) is str and text.strip() and _is_unicode(text) for text in texts):
        raise Unfit("must be a list of texts, none of them empty")
    if len(set(texts)) < len(texts):
        raise Unfit("must be a list of texts, none of them twice")
    return texts


def _check_range(parameter: Parameter, value: float) -> None:
    if not abs(value) <= _LARGEST:
        raise Unfit(f"must be a finite number ({parameter.allowed})")
    too_low = (parameter.ge is not None and value < parameter.ge) or (
        parameter.gt is not None and value <= parameter.gt
    )
    if too_low or (parameter.le is not None and value > parameter.le):
        raise Unfit(f"must be {parameter.allowed}")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _not_json(value: Any) -> str | None:
    """Why `value` can't be stored as JSON; None if it can. Walks without recursion, so depth is no danger."""
    stack = [(value, 1)]
    while stack:
        item, depth = stack.pop()
        if depth > _DEEPEST:
            return f"nested deeper than {_DEEPEST}"
        if isinstance(item, dict):
            stack.extend((child, depth + 1) for pair in item.items() for child in pair)
        elif isinstance(item, list):
            stack.extend((child, depth + 1) for child in item)
        elif isinstance(item, str):
            if not _is_unicode(item):
                return "it holds a lone surrogate, which is no Unicode text"
        elif item is not None and not isinstance(item, (int, float)):
            return f"{item} is not a JSON value"
        elif isinstance(item, float) and not math.isfinite(item):
            return f"{item} is not a finite number"
    return None


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: bytes of another encoding arrive from the environment as surrogates."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def shown(value: Any) -> str:
    """A value as messages show it, cut to fit a line."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    try:
        text = json.dumps(value, default=str, ensure_ascii=False)
    except RecursionError:
        return "a value nested without end"
    return printable(text, limit=80)


def suggest(name: object, names: Iterable[str]) -> str:
    """The end of a message that names the closest match, upper and lower case aside; empty where nothing is close.

    The one name that ends in the text, which is a part of it, is closer than any that is merely spelled like it.
    """
    text = str(name).casefold()
    by_folded = {known.casefold(): known for known in names}
    ending = [folded for folded in by_folded if folded.endswith((f"_{text}", f"-{text}"))]
    if len(ending) == 1:
        return f"; did you mean {by_folded[ending[0]]}?"
    close = [] if len(text) > 80 else difflib.get_close_matches(text, list(by_folded), n=1, cutoff=0.6)
    return f"; did you mean {by_folded[close[0]]}?" if close else ""
