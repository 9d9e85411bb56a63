"""What a box writes to its standard output: kept in a file of limited size, and cut where it is a flood.

Each line gets the time at which it came, in the form of the other logs of a run, so that they can be read as one. The
clock is the worker's: a box may have another time zone, and may say what it likes.
"""

import time
from collections import deque
from pathlib import Path

from turnmill.errors import printable

_FILE_BYTES = 4 << 20
_TAIL_LINES, _LINE_BYTES = 20, 500
# Between the time and what a box wrote.
_HEAD = " environment INFO output: "
# Bytes that are kept in one second on average, and at once.
_RATE, _BURST = 256 << 10, 1 << 20


class BoxLog:
    """One file and the one before it. Written by one thread at a time; raises `OSError` as files do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allowed = float(_BURST)
        self._at = time.monotonic()
        # Bytes that were written by the box; of them, those since the last line that were not kept.
        self.num_bytes = 0
        self._num_cut = 0
        self.num_cut = 0
        self._is_line_begun = False
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def tail(self) -> str:
        """The last lines, as a terminal may show them."""
        return "\n".join(printable(line.decode(errors="replace"), limit=_LINE_BYTES) for line in self._tail)

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        now = time.monotonic()
        self._allowed = min(_BURST, self._allowed + (now - self._at) * _RATE)
        self._at = now
        if len(data) > self._allowed:
            self._num_cut += len(data)
            self.num_cut += len(data)
            return
        self._allowed -= len(data)
        self._keep(self._cut_note() + data)

    def close(self) -> None:
        """Nothing more comes."""
        if note := self._cut_note():
            self._keep(note)

    def _cut_note(self) -> bytes:
        num_cut, self._num_cut = self._num_cut, 0
        return b"\n[%d bytes of output are not kept: too much at once]\n" % num_cut if num_cut else b""

    def _keep(self, data: bytes) -> None:
        for line in data.splitlines()[-_TAIL_LINES:]:
            self._tail.append(line[:_LINE_BYTES])
        if self._path.exists() and self._path.stat().st_size > _FILE_BYTES:
            self._path.replace(self._path.with_suffix(self._path.suffix + ".1"))
        with self._path.open("ab") as file:
            file.write(self._stamped(data))

    def _stamped(self, data: bytes) -> bytes:
        now = time.time()
        moment = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03d}"
        head = f"{moment}{_HEAD}".encode()
        is_ended = data.endswith(b"\n")
        lines = (data[:-1] if is_ended else data).replace(b"\n", b"\n" + head)
        begin, end = b"" if self._is_line_begun else head, b"\n" if is_ended else b""
        self._is_line_begun = not is_ended
        return begin + lines + end


def without_time(line: str) -> str:
    """A line of such a log, or of another one, as the box wrote it."""
    before, head, said = line.partition(_HEAD)
    return said if head else before
