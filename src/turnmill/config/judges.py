"""`[[judges]]` of a deployment's `turnmill.toml`: models that environments may ask for their rewards.

[[judges]]
name = "strict"                          # what a run's `judges` and the environment call it
base_url = "https://judge.example/v1"    # OpenAI-compatible; the one place that its secret is sent to
model = "grader-large"
api_key_env = "JUDGE_KEY"                # name of the variable with its secret; left out: none is sent
timeout_s = 60                           # of one try
max_retries = 3
max_concurrent = 8                       # requests at once, of one worker
max_tokens = 1024                        # of an answer

Here and not among the parameters of a run: an upload may choose a judge, and never where a secret goes.
"""

import difflib
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from turnmill.config.parameters import PREFIX
from turnmill.errors import printable

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Largest values, by key; the smallest is in the other table.
_MOST = {"timeout_s": 3600, "max_retries": 20, "max_concurrent": 256, "max_tokens": 1_000_000}
_LEAST = {"timeout_s": 1, "max_retries": 0, "max_concurrent": 1, "max_tokens": 1}


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """One table; holds the name of a secret's variable and never the secret."""

    name: str
    base_url: str
    model: str
    # Empty: no secret is sent.
    api_key_env: str = ""
    timeout_s: float = 60.0
    max_retries: int = 3
    max_concurrent: int = 8
    max_tokens: int = 1024

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port: what a box must let through for it."""
        parts = urlsplit(self.base_url)
        return str(parts.hostname), parts.port or {"https": 443, "http": 80}[parts.scheme]


def read_judges(tables: Any, problems: list[str]) -> tuple[JudgeSettings, ...]:
    """The tables; what is wrong is added to `problems`."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.append("judges: must be tables, each one headed [[judges]]")
        return ()
    judges: list[JudgeSettings] = []
    for number, table in enumerate(tables, 1):
        found = _problems_of(table)
        if not found and table["name"] in [judge.name for judge in judges]:
            found = [f"name: {table['name']!r} is taken; give each judge a name of its own"]
        problems += [f"judges[{number}].{problem}" for problem in found]
        if not found:
            judges.append(JudgeSettings(**table))
    return tuple(judges)


def _problems_of(table: dict[str, Any]) -> list[str]:
    known = tuple(JudgeSettings.__dataclass_fields__)
    found: list[str] = []
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            found.append(
                f"{printable(key)}: no such key; "
                + (f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}")
            )
    name, model, variable = (table.get(key, "") for key in ("name", "model", "api_key_env"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        found.append("name: must be 1 to 64 letters, digits, _ and -")
    if not isinstance(model, str) or not model.strip() or not model.isprintable():
        found.append("model: must be the name of a model")
    # Not shown: who mistakes the key writes the secret itself here.
    if "api_key_env" in table and (not isinstance(variable, str) or not _VARIABLE.fullmatch(variable)):
        found.append("api_key_env: must be the name of an environment variable")
    elif isinstance(variable, str) and variable.startswith(PREFIX):
        found.append(f"api_key_env: names that begin with {PREFIX} are parameters of runs; choose another one")
    for key, most in _MOST.items():
        value = table.get(key, _LEAST[key])
        kinds = (int, float) if key == "timeout_s" else (int,)
        if type(value) not in kinds or not _LEAST[key] <= value <= most:
            found.append(f"{key}: = {printable(repr(value))} must be a number from {_LEAST[key]} to {most}")
    return found + _url_problems(table.get("base_url", ""), is_secret=bool(variable))


def _url_problems(url: object, *, is_secret: bool) -> list[str]:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        host, _ = parts.hostname, parts.port
    except ValueError:
        return ["base_url: is no valid URL"]
    if not host or parts.scheme not in ("http", "https") or not str(url).isascii() or " " in str(url):
        return ["base_url: must be an https URL"]
    if parts.username is not None or parts.query or parts.fragment:
        return ["base_url: must hold no user, password, query or fragment"]
    if parts.scheme == "http" and is_secret and host not in ("localhost", "127.0.0.1", "::1"):
        return ["base_url: must be https: a secret is sent there"]
    return []
