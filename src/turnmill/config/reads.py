"""Which parameters a run of some kind reads, with which choices: a table made by watching real runs, and its check.

    reads.json (scripts/generate_reads.py) -> is a parameter that somebody set read? -> else a problem of the load

An entry of the table, by parameter and kind of run, is a list of ways in which it is read; each says what must hold for
other parameters. `[{}]` is read always, `[]` never.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from turnmill.config.combinations import compared_with
from turnmill.config.parameters import Parameter, describe, parameter_names
from turnmill.records import RunKind

TABLE = Path(__file__).with_name("reads.json")
# What a parameter without choices is, seen from others: something, or 0, false, empty.
ON, OFF = "on", "off"
_KINDS = {
    RunKind.TRAIN: "a training run",
    RunKind.EVAL: "an evaluation",
    RunKind.EXTERNAL: "a run whose trainer is somebody else's",
}
# By parameter the states that it may have, for all of them together.
Way = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """Where one parameter is read."""

    name: str
    # By kind of run.
    ways: Mapping[str, Sequence[Way]]

    @property
    def is_known(self) -> bool:
        """False where no run that was watched reads it: then the table is older than what does."""
        return any(self.ways.values())

    def is_read(self, kind: RunKind, values: Mapping[str, Any]) -> bool:
        """Whether a run of this kind with these parameters reads it."""
        return any(
            all(state_of(name, values[name]) in states for name, states in way.items()) for way in self.ways[kind]
        )

    def conditions(self, kind: RunKind) -> frozenset[str]:
        """The parameters that say whether a run of this kind reads it."""
        return frozenset(name for way in self.ways[kind] for name in way)

    def text(self, kind: RunKind) -> str:
        """With what a run of this kind reads it; empty where it always does."""
        ways = self.ways[kind]
        if any(not way for way in ways):
            return ""
        return ", or ".join(" and ".join(_words(name, states) for name, states in way.items()) for way in ways)

    def problem(self, kind: RunKind, values: Mapping[str, Any], *, told: str, is_from_file: bool) -> str | None:
        """The message for a parameter that was set, `told` with its value and place; None if it is read."""
        others = [other for other in _KINDS if other is not kind and self.ways[other]]
        if self.is_read(kind, values) or not self.is_known:
            return None
        if self.ways[kind]:
            where = f"it is read with {self.text(kind)} alone: set that as well, or leave {self.name} out"
        else:
            where = f"{_KINDS[others[0]]} reads it, and {_KINDS[kind]} does not: leave it out"
        share = "; runs that differ in that need files of their own" if is_from_file else ""
        return f"{told} would do nothing: {where}{share}"


@cache
def reads() -> Mapping[str, Reads]:
    """The table, by parameter."""
    table: dict[str, dict[str, list[dict[str, list[str]]]]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return {name: Reads(name=name, ways=ways) for name, ways in table.items()}


def parameters_of(kind: RunKind) -> frozenset[str]:
    """Those that may be set for a run of this kind, with some choice at least.

    It reads them, or a rule compares them with one that it reads, or the table does not know them yet.
    """
    unread = {name for name, entry in reads().items() if entry.is_known and not entry.ways[kind]}
    read = frozenset(parameter_names()) - unread
    return read.union(*(compared_with(name) for name in read))


def state_of(name: str, value: Any) -> str:
    """What a parameter is, seen from others: its choice, or on or off."""
    if _parameters()[name].choices:
        return str(value)
    return ON if value else OFF


@cache
def _parameters() -> Mapping[str, Parameter]:
    return {parameter.name: parameter for parameter in describe()}


def _words(name: str, states: Sequence[str]) -> str:
    """What must hold for one parameter."""
    kind = _parameters()[name].kind
    if list(states) == [ON]:
        return f"{name} = true" if kind is bool else f"{name} above 0" if kind in (int, float) else f"{name} set"
    if list(states) == [OFF]:
        return f"{name} = false" if kind is bool else f"{name} = 0" if kind in (int, float) else f"{name} not set"
    return f"{name} = {' or '.join(states)}"
