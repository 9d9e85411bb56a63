"""`[ceilings]` and `[prices]` of a deployment's `turnmill.toml`.

[ceilings]                          # no run may set more, wherever its parameters come from
usd = 500                           # of one run
generated_tokens = 50_000_000       # of one run
runtime_s = 43200                   # of one run, all attempts together
usd_per_day = 2000                  # of all runs that begin on a day (UTC)

[prices]
file = "prices.toml"                # dollars an hour, in the form of the shipped list; beside turnmill.toml
"ml.p5.48xlarge" = 41.61            # or type by type
"""

import difflib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnmill.errors import printable

_LARGEST = 1e15


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What no run may go beyond; 0 is no ceiling."""

    usd: float = 0.0
    generated_tokens: int = 0
    runtime_s: float = 0.0
    # All runs that began on one day (UTC).
    usd_per_day: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PriceSettings:
    """Prices over the shipped ones."""

    # In the form of the shipped list.
    file: Path | None = None
    # By instance type, over those of the file.
    usd_per_hour: Mapping[str, float] = field(default_factory=dict)


def read_ceilings(table: Any, problems: list[str]) -> Ceilings:
    """The `[ceilings]` table; what is wrong is added to `problems`."""
    known = tuple(Ceilings.__dataclass_fields__)
    if not isinstance(table, dict):
        problems.append("ceilings: must be a table, headed [ceilings]")
        return Ceilings()
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            problems.append(f"ceilings.{printable(key)}: no such key; {_hint(key, known)}")
        elif key == "generated_tokens" and (type(value) is not int or not 0 < value <= _LARGEST):
            problems.append(f"ceilings.{key}: = {printable(repr(value))} must be a whole number greater than 0")
        elif not _is_amount(value) or value == 0:
            problems.append(f"ceilings.{key}: = {printable(repr(value))} must be a number greater than 0")
        else:
            found[key] = value if key == "generated_tokens" else float(value)
    return Ceilings(**found)


def read_prices(table: Any, folder: Path, problems: list[str]) -> PriceSettings:
    """The `[prices]` table of the file in `folder`; what is wrong is added to `problems`."""
    if not isinstance(table, dict):
        problems.append("prices: must be a table, headed [prices]")
        return PriceSettings()
    file: Path | None = None
    found: dict[str, float] = {}
    for key, value in table.items():
        if key == "file":
            if isinstance(value, str) and value:
                file = folder / value
            else:
                problems.append("prices.file: must be the path of a price file")
        elif _is_amount(value):
            found[key] = float(value)
        else:
            problems.append(f"prices.{printable(key)}: = {printable(repr(value))} must be dollars an hour")
    return PriceSettings(file=file, usd_per_hour=found)


def _is_amount(value: Any) -> bool:
    # `type(...) is`, because a bool is an int to isinstance.
    return type(value) in (int, float) and math.isfinite(value) and 0 <= value <= _LARGEST


def _hint(key: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
