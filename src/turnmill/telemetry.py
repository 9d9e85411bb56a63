"""Logs of a role: one line a record, with the ids that it is about, and never a secret.

Log with `logger.info("sample ended", extra={"at": sample.key})`; `at` is an id printed as a path.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from turnmill.errors import BackendUnavailable

logger = logging.getLogger(__name__)

FORMATS = ("text", "json")
# Chat secrets travel in paths (`/a/<secret>/v1`), the others in an Authorization header or a field named so.
_SECRET = re.compile(r"(/a/|[Bb]earer\s+|secret[\"'=: ]+|token[\"'=: ]+)([A-Za-z0-9_\-]{16,})")


# Of the task that logs, where a process has several runs, and for what is logged by parts that know no run.
_RUN: ContextVar[str | None] = ContextVar("run", default=None)
_STAGE: ContextVar[str | None] = ContextVar("stage", default=None)
_AT: ContextVar[str | None] = ContextVar("at", default=None)


def log_as_run(run_id: str) -> None:
    """What this task logs from now on, and what it starts, is of that run."""
    _RUN.set(run_id)


def log_at(at: str) -> None:
    """What this task logs from now on is about that id, unless it says another one: an environment's logs too."""
    _AT.set(at)


@contextmanager
def log_as_stage(name: str) -> Iterator[None]:
    """What is logged inside, also by what is started there, is of that stage of the run."""
    token = _STAGE.set(name)
    try:
        yield
    finally:
        _STAGE.reset(token)


def redact(text: str) -> str:
    """`text` without the secrets that it carries."""
    return _SECRET.sub(r"\1***", text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = getattr(record, "at", None) or _AT.get()
        text = super().format(record)
        return redact(f"{text} [{at}]" if at else text)


class _JsonFormatter(logging.Formatter):
    """One object a line: `time` (UTC), `level`, `run`, `stage`, `role`, `at`, `logger`, `message`, `error` (traceback).

    What does not apply is left out.
    """

    def __init__(self, role: str, run_id: str | None) -> None:
        super().__init__()
        self._role = role
        self._run_id = run_id

    def format(self, record: logging.LogRecord) -> str:
        at = getattr(record, "at", None) or _AT.get()
        error = [self.formatException(record.exc_info)] if record.exc_info else []
        error += [self.formatStack(record.stack_info)] if record.stack_info else []
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "run": self._run_id or _RUN.get(),
            "stage": _STAGE.get(),
            "role": self._role,
            "at": None if at is None else redact(str(at)),
            "logger": record.name,
            "message": redact(record.getMessage()),
            "error": redact("\n".join(error)) or None,
        }
        return json.dumps({key: value for key, value in fields.items() if value is not None}, ensure_ascii=False)


def configure_logging(
    role: str,
    *,
    level: int = logging.INFO,
    stream: TextIO | None = None,
    run_id: str | None = None,
    form: str = "text",
) -> None:
    """Send all logs of this process to `stream`, or to standard error, which the launcher keeps as the role's log.

    `form` is one of `FORMATS`.
    """
    root = logging.getLogger()
    root.handlers[:] = [_handler(role, stream or sys.stderr, run_id, form)]
    root.setLevel(level)
    for noisy in ("uvicorn.access", "httptools", "asyncio", "watchfiles"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


@contextmanager
def also_logged(path: Path, role: str, run_id: str, *, form: str = "text") -> Iterator[None]:
    """What this process, which serves several runs, logs about one of them goes to `path` as well.

    Raises `BackendUnavailable` where the file can't be opened.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise BackendUnavailable(f"{path} can't be opened: {error}") from error
    with closing_log(file):
        handler = _handler(role, file, run_id, form)
        handler.addFilter(lambda record: _RUN.get() == run_id or run_id in str(getattr(record, "at", None)).split("/"))
        logging.getLogger().addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger().removeHandler(handler)


@contextmanager
def closing_log(file: TextIO) -> Iterator[None]:
    """Close a log at the end. What a full disk keeps from being written is lost, and fails nothing that was done."""
    try:
        yield
    finally:
        try:
            file.close()
        except OSError as error:
            logger.warning("the end of %s is lost: %s", file.name, error.strerror)


class _LogHandler(logging.StreamHandler[TextIO]):
    """A handler whose stream may be a file on a disk that is full: that is told once, and no traceback a line.

    What could not be written stays in the file's buffer and is written with a later line.
    """

    _is_told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._is_told and self.stream is not sys.stderr:
            self._is_told = True
            with suppress(OSError):
                print(f"warning: {self.stream.name} can't be written now: {error.strerror}", file=sys.stderr)


def _handler(role: str, stream: TextIO, run_id: str | None, form: str) -> logging.Handler:
    handler = _LogHandler(stream)
    if form == "json":
        handler.setFormatter(_JsonFormatter(role, run_id))
    else:
        handler.setFormatter(_Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    return handler
