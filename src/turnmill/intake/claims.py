"""The second level of a run's identity: what is trained, whatever it is called and however often it is uploaded.

    digests of data, environment, configuration and base weights -> content id -> claim by compare-and-set

The first run with a content holds its claim. The same content again is a duplicate while that run is on its way or has
succeeded; after a run that came to nothing it is a new attempt, which takes the claim over.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnmill.errors import Duplicate
from turnmill.ports import RecordStore, Write
from turnmill.records import Run, RunStatus, decode, digest_of, encode, run_key

_PIECE_BYTES = 1024 * 1024
# How much a run may take, not what comes of it: the same content under a higher budget is not trained twice.
_LIMITS = frozenset({"budget_usd", "budget_tokens", "max_runtime_s", "usd_per_hour"})
# Statuses of a run whose content may be tried again.
_CAME_TO_NOTHING = (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.DUPLICATE)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Which run a content belongs to."""

    content_id: str
    run_id: str

    @property
    def key(self) -> str:
        return claim_key(self.content_id)


def claim_key(content_id: str) -> str:
    return f"contents/all/{content_id}"


def content_id(
    *, data: str, held_out: str | None = None, config: dict[str, Any], base_weights: str, environment: str = ""
) -> str:
    """32 hex digits over what decides about the outcome of a run; the configuration names the environment.

    Held-out tasks decide whether its model is published. `environment` is the digest of a package's files, "" for a
    built-in environment.
    """
    deciding = {name: value for name, value in config.items() if name not in _LIMITS}
    parts = [data, json.dumps(deciding, sort_keys=True), base_weights]
    if held_out is not None:
        parts.append(held_out)
    if environment:
        parts.append(f"environment {environment}")
    return digest_of(*(part.encode() for part in parts))


def digest_of_weights(folder: Path) -> str:
    """SHA-256 hex over names and content of a model folder's weight files; reads all of them."""
    hasher = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        hasher.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    return hasher.hexdigest()


async def claim(runs: RecordStore, content: str, run_id: str) -> str | None:
    """Claim a content for a run; claiming it again changes nothing. The earlier run that came to nothing, if any.

    Raises `Duplicate` with the run that has it.
    """
    wanted = Claim(content_id=content, run_id=run_id)
    while True:
        (stored,) = await runs.get([wanted.key])
        held = decode(stored.value, Claim).run_id if stored else None
        if held == run_id:
            return None
        if held is not None:
            (record,) = await runs.get([run_key(held)])
            status = decode(record.value, Run).status if record else RunStatus.FAILED
            if status not in _CAME_TO_NOTHING:
                raise Duplicate(held, f"the same data, environment, configuration and model as run {held} ({status})")
        write = Write(key=wanted.key, value=encode(wanted), expected=stored.version if stored else 0)
        (is_applied,) = await runs.write([write])
        if is_applied:
            return held
