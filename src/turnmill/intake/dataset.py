"""A data file: every row checked in one pass over it, whatever its size.

    bytes -> lines -> rows (`rows.parse_row`) -> Report | tasks

Memory is constant but for 8 bytes a row: the hash of each id, for uniqueness. Lines longer than 8 MiB are skipped
piece by piece. Only when ids repeat, or rows differ in which keys they have, a second pass finds out where.
"""

import errno
import hashlib
import stat
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from turnmill.errors import DataError, printable
from turnmill.intake.rows import OPTIONAL_KEYS, Problem, Row, parse_row
from turnmill.records import Task, encode

MAX_LINE_BYTES = 8 * 1024 * 1024
# Distinct prompts and answers are counted up to here.
DISTINCT_LIMIT = 10_000

_PIECE_BYTES = 64 * 1024
# Different repeated ids that the second pass looks for; all are counted in the first one.
_MAX_REPEATED = 1_000
_UTF8_BOM = b"\xef\xbb\xbf"
_MAGIC = {
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x1f\x8b": "compressed (gzip)",
    b"PK\x03\x04": "compressed (zip)",
    b"(\xb5/\xfd": "compressed (zstd)",
    b"BZh": "compressed (bzip2)",
    b"PAR1": "Parquet",
}


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of a file."""

    num_bytes: int = 0
    # In bytes, line end included.
    longest_line: int = 0
    # Up to `DISTINCT_LIMIT`: then it means that many or more.
    distinct_prompts: int = 0
    distinct_answers: int = 0
    # Keys of metadata beside the prompt.
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Report:
    """What validation found."""

    path: str
    # Lines that are not blank, good or bad.
    num_rows: int
    num_blank: int
    # SHA-256 hex of the file; empty where it was not read.
    digest: str
    # The first ones by line, at most `max_problems`.
    problems: tuple[Problem, ...]
    # All of them.
    num_problems: int
    # What was accepted although unusual: a byte order mark, CRLF, blank lines, no newline at the end.
    notes: tuple[str, ...] = ()
    stats: Stats = field(default_factory=Stats)

    @property
    def ok(self) -> bool:
        return self.num_problems == 0

    def summary(self, *, max_lines: int = 20) -> str:
        """The problems as text, one a line: `file:line:column: field: message [rule]`."""
        many = "1 problem" if self.num_problems == 1 else f"{self.num_problems} problems"
        lines = [f"{self.path}: {many} in the data:"]
        for problem in self.problems[:max_lines]:
            separator = ":" if problem.line is not None else ": "
            lines.append(f"  {self.path}{separator}{problem} [{problem.rule}]")
        if self.num_problems > len(lines) - 1:
            lines.append(f"  and {self.num_problems - len(lines) + 1} more: see `turnmill data validate {self.path}`")
        return "\n".join(lines)


def validate(path: Path, *, max_problems: int = 100, play: Callable[[Task], None] | None = None) -> Report:
    """Check the file; never raises for what is wrong with it, missing files included.

    `play` raises `DataError` for a task that the environment can't play.
    """
    scan = _Scan(path, max_problems)
    return scan.run(take=None if play is None else partial(scan.try_row, play))


def read_tasks(path: Path, *, digest: str | None = None) -> list[Task]:
    """All rows in file order; raises `DataError` with what is wrong. Takes memory for the tasks, of course.

    `digest`: of the file that was validated, where it must be that one.
    """
    tasks: list[Task] = []
    report = _Scan(path, 100).run(take=lambda row: tasks.append(row.task))
    if digest is not None and report.digest != digest:
        raise DataError(f"{path} changed after it was validated; start a new run for the new content")
    if not report.ok:
        raise DataError(report.summary())
    return tasks


# ---------------------------------------------------------------- lines


@dataclass(frozen=True, kw_only=True)
class _Line:
    number: int
    # Byte position in the file.
    offset: int
    # Without its line end; the first `MAX_LINE_BYTES` and a bit where it is longer.
    data: bytes
    num_bytes: int
    # What it ends in: b"", b"\n" or b"\r\n".
    end: bytes


def _lines(handle: BinaryIO, seen: Callable[[bytes], None]) -> Iterator[_Line]:
    """The lines of a file, whose start may be behind a byte order mark; each piece read is shown to `seen` first."""
    number, offset = 0, handle.tell()
    while piece := handle.readline(MAX_LINE_BYTES + 1):
        seen(piece)
        number += 1
        data, num_bytes, last = piece, len(piece), piece
        while len(last) > 0 and not last.endswith(b"\n"):
            last = handle.readline(_PIECE_BYTES)
            seen(last)
            num_bytes += len(last)
        end = b"\r\n" if data.endswith(b"\r\n") else b"\n" if last.endswith(b"\n") else b""
        data = data[: len(data) - len(end)] if data.endswith(b"\n") else data
        yield _Line(number=number, offset=offset, data=data, num_bytes=num_bytes, end=end)
        offset += num_bytes


# ---------------------------------------------------------------- what must hold over all rows


class _Ids:
    """8 bytes a row: 64-bit hashes in 256 arrays by their first byte, so that looking for repeats sorts nothing."""

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(256)]

    def add(self, row_id: str) -> None:
        value = _hash(row_id.encode())
        self._buckets[value >> 56].append(value)

    def repeated(self) -> tuple[int, set[int]]:
        """How many rows repeat an id, and the hashes of (at most 1 000) such ids."""
        num_repeats, hashes = 0, set[int]()
        for bucket in self._buckets:
            once: set[int] = set()
            for value in bucket:
                if value not in once:
                    once.add(value)
                    continue
                num_repeats += 1
                if len(hashes) < _MAX_REPEATED:
                    hashes.add(value)
        return num_repeats, hashes


class _Distinct:
    """Counts different values up to `DISTINCT_LIMIT`."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()

    def add(self, value: bytes) -> None:
        if len(self._hashes) < DISTINCT_LIMIT:
            self._hashes.add(_hash(value))

    def __len__(self) -> int:
        return len(self._hashes)


@dataclass(kw_only=True)
class _Presence:
    """Which rows have an optional key."""

    first_with: int | None = None
    num_without: int = 0


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


# ---------------------------------------------------------------- the scan


class _Scan:
    """One validation of one file."""

    def __init__(self, path: Path, max_problems: int) -> None:
        self._path = path
        self._max_problems = max_problems
        self._problems: list[Problem] = []
        self._num_problems = 0
        self._num_rows = self._num_blank = self._num_crlf = self._num_lines = 0
        # The first row is at byte `start_at`.
        self._num_bytes = self._longest_line = self._start_at = 0
        self._notes: list[str] = []
        self._sha256 = hashlib.sha256()
        self._ids = _Ids()
        self._prompts, self._answers = _Distinct(), _Distinct()
        self._presence = {key: _Presence() for key in OPTIONAL_KEYS}

    def run(self, *, take: Callable[[Row], None] | None) -> Report:
        """Scan the file, giving each good row to `take`."""
        is_read = False
        if self._check_place():
            try:
                with self._path.open("rb") as handle:
                    self._first_pass(handle, take)
                    self._second_pass(handle)
                is_read = True
            except OSError as error:
                self._add_file_problem("unreadable", _reason(error))
        self._problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
        return Report(
            path=str(self._path),
            num_rows=self._num_rows,
            num_blank=self._num_blank,
            digest=self._sha256.hexdigest() if is_read else "",
            problems=tuple(self._problems[: self._max_problems]),
            num_problems=self._num_problems,
            notes=tuple(self._notes),
            stats=Stats(
                num_bytes=self._num_bytes,
                longest_line=self._longest_line,
                distinct_prompts=len(self._prompts),
                distinct_answers=len(self._answers),
                keys=tuple(key for key, presence in self._presence.items() if presence.first_with is not None),
            ),
        )

    def _add(self, problem: Problem) -> None:
        self._num_problems += 1
        if len(self._problems) < self._max_problems:
            self._problems.append(problem)

    def _add_file_problem(self, rule: str, message: str, *, line: int | None = None) -> None:
        self._add(Problem(line=line, column=None, field=None, rule=rule, message=message))

    def try_row(self, play: Callable[[Task], None], row: Row) -> None:
        """Ask about a good row; what is said against it is a problem of its line."""
        try:
            play(row.task)
        except DataError as error:
            self._add(Problem(line=row.line, column=None, field=None, rule="environment", message=str(error)))

    def _check_place(self) -> bool:
        """Whether the file is worth opening."""
        try:
            mode = self._path.stat().st_mode
        except OSError as error:
            is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            self._add_file_problem("missing_file" if is_missing else "unreadable", _reason(error))
            return False
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "no regular file"
            self._add_file_problem("not_a_file", f"is {what}; give a .jsonl file")
            return False
        if self._path.suffix != ".jsonl":
            self._add_file_problem("file_name", "the name of a data file must end in .jsonl: one JSON object a line")
            return False
        return True

    # ---------------------------------------------------------------- first pass

    def _first_pass(self, handle: BinaryIO, take: Callable[[Row], None] | None) -> None:
        is_text = self._start(handle)
        last_end = b"\n"
        for line in _lines(handle, self._sha256.update):
            self._num_bytes += line.num_bytes
            self._num_lines += 1
            self._longest_line = max(self._longest_line, line.num_bytes)
            if is_text:
                self._take_line(line, take)
            last_end = line.end
        if not is_text:
            return
        if self._num_rows == 0:
            what = "the file is empty" if self._num_bytes == 0 else "the file has only blank lines"
            self._add_file_problem("empty_file", f"{what}: it must have at least one row")
        if self._num_crlf:
            self._notes.append(f"{self._num_crlf} of {self._num_lines} lines end in CRLF (accepted)")
        if self._num_blank:
            self._notes.append(f"blank lines skipped: {self._num_blank}")
        if last_end == b"":
            self._notes.append("the last line has no newline (accepted)")

    def _start(self, handle: BinaryIO) -> bool:
        """Skip a UTF-8 byte order mark; False (and a problem) if the file is no UTF-8 text at all."""
        head = handle.read(8)
        handle.seek(0)
        if head.startswith(_UTF8_BOM):
            self._sha256.update(handle.read(len(_UTF8_BOM)))
            self._num_bytes = self._start_at = len(_UTF8_BOM)
            self._notes.append("starts with a UTF-8 byte order mark (accepted)")
            return True
        what = next((name for magic, name in _MAGIC.items() if head.startswith(magic)), None)
        if what is None and b"\x00" in head[:4]:
            what = "UTF-16 or UTF-32 without a byte order mark, or binary"
        if what is not None:
            shown = head[:4].hex(" ")
            message = f"the file is {what} (bytes {shown} at byte 0), not UTF-8: save it as UTF-8 text"
            self._add_file_problem("encoding", message, line=1)
        return what is None

    def _take_line(self, line: _Line, take: Callable[[Row], None] | None) -> None:
        self._num_crlf += line.end == b"\r\n"
        if line.num_bytes > MAX_LINE_BYTES:
            self._num_rows += 1
            message = f"the line has {line.num_bytes} bytes, more than {MAX_LINE_BYTES} (8 MiB)"
            self._add_file_problem("line_too_long", message, line=line.number)
            return
        if not line.data.strip():
            self._num_blank += 1
            return
        self._num_rows += 1
        row = parse_row(line.data, line=line.number, offset=line.offset, is_open_end=line.end == b"")
        for problem in row.problems:
            self._add(problem)
        self._note_row(row)
        if take is not None and not row.problems:
            take(row)

    def _note_row(self, row: Row) -> None:
        """Remember what is needed to judge the file as a whole."""
        if row.id is not None:
            self._ids.add(row.id)
        if row.metadata is None:
            return
        if "prompt" in row.metadata:
            self._prompts.add(encode(row.metadata["prompt"]))
        if "answer" in row.metadata:
            self._answers.add(encode(row.metadata["answer"]))
        for key, presence in self._presence.items():
            if key not in row.metadata:
                presence.num_without += 1
            elif presence.first_with is None:
                presence.first_with = row.line

    # ---------------------------------------------------------------- second pass

    def _second_pass(self, handle: BinaryIO) -> None:
        """Find the lines of repeated ids and missing keys, which the first pass only counted."""
        num_repeats, hashes = self._ids.repeated()
        partial = {
            key: presence.first_with
            for key, presence in self._presence.items()
            if presence.first_with is not None and presence.num_without > 0
        }
        if not hashes and not partial:
            return
        self._num_problems += num_repeats + sum(self._presence[key].num_without for key in partial)
        found: list[Problem] = []
        first_lines: dict[bytes, int] = {}
        handle.seek(self._start_at)
        for line in _lines(handle, lambda piece: None):
            if len(found) >= self._max_problems:
                break
            if line.num_bytes > MAX_LINE_BYTES or not line.data.strip():
                continue
            row = parse_row(line.data, line=line.number, is_open_end=line.end == b"")
            if row.id is not None and _hash(row.id.encode()) in hashes:
                self._check_repeat(row.id, row.line, first_lines, found)
            if row.metadata is not None:
                found.extend(_lacks(row, key, first) for key, first in partial.items() if key not in row.metadata)
        self._problems.extend(found)

    def _check_repeat(self, row_id: str, line: int, first_lines: dict[bytes, int], found: list[Problem]) -> None:
        name = hashlib.blake2b(row_id.encode(), digest_size=16).digest()
        first = first_lines.setdefault(name, line)
        if first != line:
            message = f'"{printable(row_id)}" is the id of line {first} already; ids must be unique in the file'
            found.append(Problem(line=line, column=None, field="id", rule="duplicate_id", message=message))


def _lacks(row: Row, key: str, first_with: int) -> Problem:
    message = f"is missing, but line {first_with} has it: give it in all rows or in none"
    return Problem(line=row.line, column=None, field=f"metadata.{key}", rule="all_or_none", message=message)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
