"""Checkpoints: a folder that is there completely or not at all.

    save into a folder aside -> flush to disk -> rename into place -> remove those that are not kept

A checkpoint is a Hugging Face folder plus `checkpoint.json`, which says what it holds and is written last. `final` is
the result of a run; `step-<n>` holds what training goes on with too (see `snapshot`). A folder without a manifest that
fits is no checkpoint.
"""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from safetensors import SafetensorError

from turnmill import failpoints
from turnmill.errors import BackendUnavailable
from turnmill.records import Version, decode, encode

logger = logging.getLogger(__name__)
MANIFEST = "checkpoint.json"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    run_id: str
    # Optimizer steps made: the position in the schedule of the learning rate too.
    step: int
    version: Version
    # Fingerprint of its weights.
    digest: str
    # Position in the data of the next batch.
    position: int
    # Fingerprint of optimizer and random state; None where the checkpoint has weights only.
    state_digest: str | None = None
    # Of the step, over everything that was generated in it.
    reward_mean: float | None = None


def export(folder: Path, manifest: Manifest, save: Callable[[Path], None]) -> None:
    """Make `folder` hold what `save` writes and the manifest; an older one is replaced as a whole.

    If the process dies in between, `folder` is the old one, the new one, or (replacing, for an instant) missing with
    the old one beside it; never a part of either. Raises `BackendUnavailable` when the disk is full or broken.
    """
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            new = aside / "new"
            new.mkdir()
            save(new)
            (new / MANIFEST).write_bytes(encode(manifest))
            _flush(new)
            failpoints.hit("checkpoint-written")
            if folder.exists():
                folder.rename(aside / "old")
            new.rename(folder)
            _flush_entry(folder.parent)
        finally:
            shutil.rmtree(aside)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the disk or safetensors says about `path`, in the words of the ports."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BackendUnavailable(f"{path} can't be written: {error}") from error


class Checkpoints:
    """The `step-<n>` checkpoints of a run."""

    def __init__(self, folder: Path, run_id: str, *, keep: int) -> None:
        """Keeps the last `keep` of them, and the best one by mean reward."""
        self.folder = folder
        self._run_id = run_id
        self._keep = keep

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is or would be."""
        return self.folder / f"step-{step}"

    def stable(self) -> list[Manifest]:
        """The complete checkpoints of this run, by step."""
        if not self.folder.is_dir():
            return []
        found = (self._read(path) for path in self.folder.iterdir() if _STEP.fullmatch(path.name))
        return sorted((manifest for manifest in found if manifest is not None), key=lambda manifest: manifest.step)

    def save(self, manifest: Manifest, save: Callable[[Path], None]) -> None:
        """Store the checkpoint of a step, then remove those that are not kept."""
        export(self.path(manifest.step), manifest, save)
        stable = self.stable()
        kept = self.kept(stable)
        for item in stable:
            if item not in kept:
                self.remove(item.step)

    def kept(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Those of `manifests`, which are in the order of their steps, that are kept."""
        kept = list(manifests[-self._keep :])
        scored = [item for item in manifests if item.reward_mean is not None]
        if scored:
            best = max(scored, key=lambda item: (item.reward_mean or 0.0, item.step))
            kept += [best] if best not in kept else []
        return kept

    def remove(self, step: int) -> None:
        """Out of sight first, so that nobody meets half a checkpoint."""
        aside = Path(tempfile.mkdtemp(prefix=".removed-", dir=self.folder))
        self.path(step).rename(aside / "old")
        shutil.rmtree(aside)

    def clean(self) -> None:
        """Remove what a process left that died while it saved: folders aside, and `step-<n>` without a fit manifest.

        Call it when no other process saves.
        """
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            is_aside = path.name.startswith(".") and path.is_dir()
            if is_aside or (_STEP.fullmatch(path.name) and self._read(path) is None):
                logger.warning("%s is no complete checkpoint and is removed", path)
                shutil.rmtree(path)

    def _read(self, path: Path) -> Manifest | None:
        try:
            manifest = decode((path / MANIFEST).read_bytes(), Manifest)
        except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
            return None
        is_ours = manifest.run_id == self._run_id and path.name == f"step-{manifest.step}"
        return manifest if is_ours and manifest.state_digest is not None else None


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
