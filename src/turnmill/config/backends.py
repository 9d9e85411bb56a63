"""`[backend]` of a deployment's `turnmill.toml`: on which services its queues, records and blobs are."""

import difflib
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

from turnmill.errors import printable

_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-\d")


class BackendType(StrEnum):
    """The implementations of the ports."""

    # Files, SQLite and child processes, in the deployment's folder.
    EMBEDDED = "embedded"
    AWS = "aws"


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """The whole table; what is None comes from where every tool of that service finds it."""

    type: BackendType = BackendType.EMBEDDED
    # Of the deployment there; what belongs to it is named after it.
    name: str | None = None
    region: str | None = None
    # Of all services: an emulator's.
    endpoint_url: str | None = None


def read_backend(table: Any, problems: list[str]) -> BackendSettings | None:
    """The table, None where there is none; what is wrong is added to `problems`."""
    if table is None:
        return None
    if not isinstance(table, dict):
        problems.append("backend: must be a table, headed [backend]")
        return None
    known, before = tuple(BackendSettings.__dataclass_fields__), len(problems)
    for key, value in table.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            problems.append(f"backend.{printable(key)}: no such key; {hint}")
        elif not isinstance(value, str) or not value or not value.isprintable():
            problems.append(f"backend.{key}: = {printable(repr(value))} must be a text")
    if len(problems) > before:
        return None
    types = tuple(kind.value for kind in BackendType)
    if table.get("type") not in types:
        said = f"= {printable(repr(table['type']))}" if "type" in table else "is missing; it"
        problems.append(f"backend.type: {said} must be one of {', '.join(types)}")
        return None
    settings = BackendSettings(**{**table, "type": BackendType(table["type"])})
    problems += _problems_of(settings)
    return settings if len(problems) == before else None


def _problems_of(settings: BackendSettings) -> list[str]:
    found: list[str] = []
    given = [name for name in ("name", "region", "endpoint_url") if getattr(settings, name) is not None]
    if settings.type is BackendType.EMBEDDED:
        return [f"backend.{name}: the embedded backend has none" for name in given]
    if settings.region is not None and _REGION.fullmatch(settings.region) is None:
        found.append(f"backend.region: = {printable(repr(settings.region))} must be a region, e.g. eu-west-1")
    if settings.endpoint_url is not None and not _is_url(settings.endpoint_url):
        found.append("backend.endpoint_url: must be an http or https URL")
    return found


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return False
    return bool(host) and parts.scheme in ("http", "https") and " " not in text and not parts.query
