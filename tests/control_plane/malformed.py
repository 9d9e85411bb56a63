"""Uploads that can't be trained, each wrong in a way of its own, and where its report must say so."""

import json
from dataclasses import dataclass

from turnmill import assets

GOOD = assets.wordle_data("train").read_bytes()
ROWS = GOOD.splitlines(keepends=True)


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """An upload with one thing wrong in it."""

    name: str
    data: bytes
    # What the report must say of it.
    rule: str
    line: int | None
    sidecar: str | None = None


def _row(line: int, **changes: object) -> bytes:
    """A row of the good file with other values; None removes a key."""
    value = {**json.loads(ROWS[line - 1]), **changes}
    return json.dumps({key: item for key, item in value.items() if item is not None}).encode() + b"\n"


def _with(line: int, data: bytes) -> bytes:
    """The good file with other bytes in the place of a line."""
    return b"".join([*ROWS[: line - 1], data, *ROWS[line:]])


def _metadata(line: int, **changes: object) -> bytes:
    metadata = {**json.loads(ROWS[line - 1])["metadata"], **changes}
    return _with(line, _row(line, metadata={key: item for key, item in metadata.items() if item is not None}))


def _bad(name: str, data: bytes, rule: str, line: int | None, sidecar: str | None = None) -> Malformed:
    return Malformed(name=name, data=data, rule=rule, line=line, sidecar=sidecar)


_ID = json.loads(ROWS[0])["id"]

MALFORMED = (
    _bad("bad-json", _with(3, b'{"id": "x" "metadata": {}}\n'), "json", 3),
    _bad("truncated", GOOD + ROWS[0][:40], "truncated", len(ROWS) + 1),
    _bad("duplicate-ids", _with(4, _row(4, id=_ID)), "duplicate_id", 4),
    _bad("without-metadata", _with(2, _row(2, metadata=None)), "required", 2),
    _bad("without-prompt", _metadata(5, prompt=None), "required", 5),
    _bad("wrong-type", _metadata(6, answer=7), "type", 6),
    _bad("not-a-number", _with(7, b'{"id": "n", "metadata": {"prompt": "p", "answer": NaN}}\n'), "finite_number", 7),
    _bad("mark-in-the-middle", _with(8, b"\xef\xbb\xbf" + ROWS[7]), "json", 8),
    _bad("utf-16", GOOD.decode().encode("utf-16"), "encoding", 1),
    _bad("null-bytes", _with(9, ROWS[8].replace(b" ", b"\x00", 1)), "json", 9),
    _bad("empty", b"", "empty_file", None),
    _bad("only-blank-lines", b"\n \n\t\n", "empty_file", None),
    _bad("nested-deeply", _with(10, b'{"id": "d", "metadata": ' + b"[" * 100 + b"]" * 100 + b"}\n"), "nesting", 10),
    _bad("a-huge-line", _with(11, b'{"id": "' + b"h" * (9 * 1024 * 1024) + b'"}\n'), "line_too_long", 11),
    _bad("a-key-twice", _with(12, b'{"id": "k", "id": "k", "metadata": {"prompt": "p"}}\n'), "duplicate_key", 12),
    _bad("id-is-blank", _with(13, _row(13, id=" ")), "blank", 13),
    _bad("unknown-field", _with(14, _row(14, weight=2)), "unknown_key", 14),
    _bad("a-list-as-row", _with(15, b"[1, 2]\n"), "object", 15),
    _bad("trailing-comma", _with(16, b'{"id": "c", "metadata": {"prompt": "p",}}\n'), "json", 16),
    _bad("control-character", _with(17, b'{"id": "a\x01b", "metadata": {"prompt": "p"}}\n'), "json", 17),
    _bad("lone-carriage-return", _with(18, b'{"id": "r"}\r{"id": "s"}\n'), "json", 18),
    _bad("latin-1", _with(19, b'{"id": "caf\xe9", "metadata": {"prompt": "p"}}\n'), "encoding", 19),
    _bad("sidecar-no-toml", GOOD, "sidecar", None, "lr = = 1\n"),
    _bad("sidecar-unknown-key", GOOD, "sidecar", None, "learning_speed = 1\n"),
    _bad("sidecar-model", GOOD, "sidecar", None, 'base_model = "no-such-model"\n'),
    _bad("not-for-wordle", _metadata(20, answer="too long a word"), "environment", 20),
    _bad("one-without-an-answer", _metadata(21, answer=None), "all_or_none", 21),
    _bad("a-message-of-nobody", _metadata(22, prompt=[{"role": "robot", "content": "x"}]), "role", 22),
)
