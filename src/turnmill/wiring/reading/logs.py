"""The logs of a run's roles as one: records of all files in the order of time.

files of logs/ -> Tail: whole lines -> Records: lines that belong together -> merged by time

A record is a line that `telemetry` wrote, as text or JSON, and what follows it in its file: a traceback, or what a
library printed. Nothing here writes.
"""

import heapq
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from turnmill.telemetry import redact

# `asctime` of the logging module, in local time, as `configure_logging` has it.
_HEAD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) (\S+) ([A-Z]+) ([\w.]+): (.*)")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LogRecord:
    """One entry of a role's log."""

    role: str
    # Unix time in seconds, to the millisecond; None for what was printed before the first entry of the file.
    time: float | None
    # Empty, like `logger`, for what no logger wrote.
    level: str = ""
    logger: str = ""
    # The id that it is about, where the log keeps it apart (JSON logs do).
    at: str | None = None
    # Its own line first, then those that belong to it.
    lines: tuple[str, ...]


class Tail:
    """The whole lines of a growing file, as they come.

    A file that is not there yet gives nothing. One that was rotated (another file has its name) is read to its end and
    the new one from its beginning; one that became shorter is read from its beginning again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def lines(self, *, to_the_end: bool = False) -> Iterator[str]:
        """What has come since the last call; with `to_the_end` the last line even if nothing ends it."""
        while True:
            if self._file is None:
                try:
                    self._file = self._path.open("rb")
                except FileNotFoundError:
                    return
            is_old = self._is_rotated(self._file)
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0)
                self._rest = b""
            yield from self._new_lines(self._file)
            if not is_old:
                break
            yield from self._last_line()
            self.close()
        if to_the_end:
            yield from self._last_line()

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_rotated(self, file: BinaryIO) -> bool:
        """Another file has the name by now; one whose name is gone is kept, until there is another."""
        try:
            return not os.path.samestat(self._path.stat(), os.fstat(file.fileno()))
        except FileNotFoundError:
            return False

    def _new_lines(self, file: BinaryIO) -> Iterator[str]:
        while chunk := file.read(_CHUNK_BYTES):
            *whole, self._rest = (self._rest + chunk).split(b"\n")
            for line in whole:
                yield _decoded(line)

    def _last_line(self) -> Iterator[str]:
        if self._rest:
            line, self._rest = self._rest, b""
            yield _decoded(line)


def _decoded(line: bytes) -> str:
    return redact(line.rstrip(b"\r").decode(errors="replace"))


class Records:
    """The records of one role's log, as they are complete: when the next one begins, or after a pause."""

    def __init__(self, role: str, path: Path) -> None:
        self.role = role
        self._tail = Tail(path)
        self._held: LogRecord | None = None
        self._more: list[str] = []
        # Of the last record: what follows without a time is of then, and so is what an earlier one is dated.
        self._time: float | None = None

    def read(self, *, pause: bool = False, to_the_end: bool = False) -> Iterator[LogRecord]:
        """What is complete by now; with `pause` all whole lines, `to_the_end` also a last one that nothing ends."""
        grown = False
        for line in self._tail.lines(to_the_end=to_the_end):
            grown = True
            begun = _parsed(self.role, line)
            if begun is None:
                self._more.append(line)
            else:
                yield from self._complete()
                self._time = begun.time
                self._held = begun
        if pause or to_the_end or not grown:
            yield from self._complete()

    def close(self) -> None:
        """Release the file; idempotent."""
        self._tail.close()

    def _complete(self) -> Iterator[LogRecord]:
        held, more = self._held, tuple(self._more)
        self._held, self._more = None, []
        if held is not None:
            yield replace(held, lines=held.lines + more)
        elif more:
            yield LogRecord(role=self.role, time=self._time, lines=more)


def _parsed(role: str, line: str) -> LogRecord | None:
    """The record that begins with this line; None for a line that belongs to the one before."""
    if line.startswith("{"):
        return _parsed_json(role, line)
    if (match := _HEAD.fullmatch(line)) is None:
        return None
    at, thousandths, _, level, logger, message = match.groups()
    try:
        seconds = time.mktime(time.strptime(at, "%Y-%m-%d %H:%M:%S"))
    except (ValueError, OverflowError):
        return None
    return LogRecord(role=role, time=seconds + int(thousandths) / 1000, level=level, logger=logger, lines=(message,))


def _parsed_json(role: str, line: str) -> LogRecord | None:
    try:
        fields = json.loads(line)
        at, message, error = fields.get("at"), fields["message"], fields.get("error")
        return LogRecord(
            role=role,
            time=datetime.fromisoformat(fields["time"]).timestamp(),
            level=str(fields["level"]),
            logger=str(fields["logger"]),
            at=None if at is None else str(at),
            lines=(*str(message).split("\n"), *(str(error).split("\n") if error else ())),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        # Some other program's JSON.
        return None


class MergedLogs:
    """The logs of a folder together; files may come later, or be none yet."""

    def __init__(self, folder: Path, roles: Sequence[str] = ()) -> None:
        """`roles` are names to keep, as `matches` has them; all without any."""
        self._folder = folder
        self._roles = roles
        self._open: dict[str, Records] = {}

    def read(self, *, pause: bool = False, to_the_end: bool = False) -> Iterator[LogRecord]:
        """As `Records.read`, in the order of time; what has none comes with what is before it in its file."""
        for path in sorted(self._folder.glob("*.log")):
            if path.stem not in self._open and matches(path.stem, self._roles):
                self._open[path.stem] = Records(path.stem, path)
        parts = [_in_order(records.read(pause=pause, to_the_end=to_the_end)) for records in self._open.values()]
        for _, record in heapq.merge(*parts, key=lambda item: item[0]):
            yield record

    def close(self) -> None:
        """Release the files; idempotent."""
        for records in self._open.values():
            records.close()


def _in_order(records: Iterator[LogRecord]) -> Iterator[tuple[float, LogRecord]]:
    """With a time that never goes back, so that a clock that was set keeps each file in its own order."""
    latest = float("-inf")
    for record in records:
        latest = max(latest, latest if record.time is None else record.time)
        yield latest, record


def matches(role: str, names: Sequence[str]) -> bool:
    """`replica` names every `replica-<n>`, `replica-0` that one; no name at all names all."""
    return not names or any(role == name or re.fullmatch(re.escape(name) + r"-\d+", role) for name in names)


def roles_of(folder: Path) -> list[str]:
    """The roles that have a log."""
    return sorted(path.stem for path in folder.glob("*.log"))
