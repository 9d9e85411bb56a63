"""Secrets taken out of texts that leave the machine: those that are known by value, and what looks like one.

A pattern that takes too much costs a word of an error; one that takes too little costs a key. So they take much.
"""

import re
from collections.abc import Iterable

from turnmill.telemetry import redact

_MASK = "***"
_NAMES = (
    r"api[_-]?key|access[_-]?key(?:[_-]id)?|secret[_-]?(?:access[_-]?)?key|routing[_-]?key|private[_-]?key"
    r"|pass(?:word|wd)|secret|(?:auth|session|worker|access|refresh)?[_-]?token|credentials?|signature"
)
_PATTERNS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", _MASK),
        # Incoming webhooks are secret as a whole.
        (r"(https?://hooks\.slack(?:-gov)?\.com/)[^\s\"'<>]+", rf"\1{_MASK}"),
        (r"(https?://(?:[\w-]+\.)?discord(?:app)?\.com/api/webhooks/)[^\s\"'<>]+", rf"\1{_MASK}"),
        # https://user:password@host; tried once a word, since a text of one long word would take its square otherwise.
        (r"(?<![A-Za-z0-9+.-])([A-Za-z0-9+.-]+://)[^\s/@\"'<>]+@", rf"\1{_MASK}@"),
        (r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:\w+\s+)?)[^\s\"',;]+", rf"\1{_MASK}"),
        (r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", rf"\1{_MASK}"),
        # name=value, name: value, "name": "value"; also as a part of a longer name (HF_TOKEN=...).
        (rf"(?i)((?:{_NAMES})[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&]{{6,}}", rf"\1{_MASK}"),
        # Keys known by their beginning: OpenAI and Anthropic, GitHub, Hugging Face, Slack, AWS; and JSON web tokens.
        (r"\bsk-[A-Za-z0-9_-]{16,}", _MASK),
        (r"\b(?:gh[pousr]_|github_pat_|hf_)[A-Za-z0-9_]{20,}", _MASK),
        (r"\bxox[a-z]-[A-Za-z0-9-]{10,}", _MASK),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b", _MASK),
        (r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", _MASK),
    )
)
# A shorter secret would take away parts of ordinary words.
_SHORTEST = 6


class Redactor:
    """Takes the given secrets, and what looks like one, out of texts."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        # Longest first: one secret may be the beginning of another.
        self._secrets = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)

    def __call__(self, text: str) -> str:
        """`text` with `***` in the place of each secret."""
        for secret in self._secrets:
            text = text.replace(secret, _MASK)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return redact(text)
