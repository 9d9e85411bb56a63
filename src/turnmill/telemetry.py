"""Logs of a role: one line a record, with the ids that it is about, and never a secret.

Log with `logger.info("sample ended", extra={"at": sample.key})`; `at` is an id printed as a path.
"""

import logging
import re
import sys
from typing import TextIO

# Chat secrets travel in paths (`/a/<secret>/v1`), the others in an Authorization header or a field named so.
_SECRET = re.compile(r"(/a/|[Bb]earer\s+|secret[\"'=: ]+|token[\"'=: ]+)([A-Za-z0-9_\-]{16,})")


def redact(text: str) -> str:
    """`text` without the secrets that it carries."""
    return _SECRET.sub(r"\1***", text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = getattr(record, "at", None)
        text = super().format(record)
        return redact(f"{text} [{at}]" if at else text)


def configure_logging(role: str, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream`, or to standard error, which the launcher keeps as the role's log."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for noisy in ("uvicorn.access", "httptools", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
