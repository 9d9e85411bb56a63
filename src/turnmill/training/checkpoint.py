"""Checkpoints: a folder that is there completely or not at all.

    save into a folder aside -> flush to disk -> rename into place

A checkpoint is a Hugging Face folder plus `checkpoint.json`, which says what it holds. Today only the final one is
written; optimizer, random state and data position join it in the same folder when runs can be resumed.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from turnmill.records import Version, encode

MANIFEST = "checkpoint.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    run_id: str
    # Optimizer steps made.
    step: int
    version: Version
    # Fingerprint of its weights.
    digest: str
    # Position in the data of the next batch.
    position: int


def export(folder: Path, manifest: Manifest, save: Callable[[Path], None]) -> None:
    """Make `folder` hold what `save` writes and the manifest; an older one is replaced as a whole.

    If the process dies in between, `folder` is the old one, the new one, or (replacing, for an instant) missing with
    the old one beside it; never a part of either.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        new = aside / "new"
        new.mkdir()
        save(new)
        (new / MANIFEST).write_bytes(encode(manifest))
        _flush(new)
        if folder.exists():
            folder.rename(aside / "old")
        new.rename(folder)
        _flush_entry(folder.parent)
    finally:
        shutil.rmtree(aside)


def _flush(folder: Path) -> None:
    """Bring every file below `folder`, and the folders themselves, to disk."""
    for path in [*folder.rglob("*"), folder]:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
