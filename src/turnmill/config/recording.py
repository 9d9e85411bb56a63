"""Who reads which parameter in a real run: what `scripts/generate_reads.py` makes the table of reads from.

    TURNMILL_CONFIG_READS names a folder -> every configuration of that process and its children is a recorded one
        -> first read of a parameter by a module -> one line in the folder's file

Off, which is always but for that script, a configuration is a plain record and nothing is looked at.
"""

import os
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from turnmill.config.parameters import Config, parameter_names

READS = "TURNMILL_CONFIG_READS"
FILE = "reads.tsv"
_NAMES = frozenset(parameter_names())
_OURS, _CONFIG = "turnmill.", "turnmill.config."


class RecordedConfig(Config):
    """Writes down which module reads which parameter, at once, so that no way of ending a process loses it."""

    def __getattribute__(self, name: str) -> Any:
        if name in _NAMES and (reader := _reader(sys._getframe(1))) is not None:
            _note(name, reader)
        return super().__getattribute__(name)


def config_of(values: dict[str, Any]) -> Config:
    """The configuration with these values: a recorded one where the process is told so."""
    return (RecordedConfig if READS in os.environ else Config)(**values)


def read_notes(folder: Path) -> dict[str, set[str]]:
    """The modules that read each parameter, of all processes that wrote into `folder`."""
    found: dict[str, set[str]] = {}
    file = folder / FILE
    for name, reader in _lines(file.read_text(encoding="utf-8").splitlines() if file.exists() else ()):
        found.setdefault(name, set()).add(reader)
    return found


def _lines(lines: Iterable[str]) -> Iterable[tuple[str, str]]:
    for line in lines:
        name, _, reader = line.partition("\t")
        yield name, reader


def _reader(frame: FrameType | None) -> str | None:
    """The module that reads, through a property too; None for a copy, a comparison or a print of the whole."""
    module = _module(frame)
    while frame is not None and module.startswith(_CONFIG):
        frame = frame.f_back
        module = _module(frame)
    return module if module.startswith(_OURS) else None


def _module(frame: FrameType | None) -> str:
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))


@cache
def _note(name: str, reader: str) -> None:
    """A short line that is appended in one write is whole, whoever else appends."""
    handle = os.open(Path(os.environ[READS]) / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{name}\t{reader}\n".encode())
    finally:
        os.close(handle)
