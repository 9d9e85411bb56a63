"""The model of an adapter's checkpoint, for whoever serves or evaluates it.

checkpoint of a step + base model -> checked against the manifest -> a Hugging Face folder
"""

from functools import partial
from pathlib import Path

import msgspec

from turnmill.config import Config
from turnmill.errors import RecordCorrupt
from turnmill.records import decode
from turnmill.training.checkpoint import MANIFEST, Manifest, export
from turnmill.training.policy import Policy


def merge_checkpoint(checkpoint: Path, base_model: Path, config: Config, target: Path) -> None:
    """Make `target` the base model with the adapter of `checkpoint` merged into it, unless it is that already.

    Raises `RecordCorrupt` where the checkpoint is not what its manifest says.
    """
    manifest = _manifest_of(checkpoint)
    if manifest is None:
        raise RecordCorrupt(f"checkpoint {checkpoint} has no {MANIFEST} that can be read")
    if _manifest_of(target) == manifest:
        return
    policy = Policy.load(base_model, config)
    saved, digest = policy.read_checkpoint(checkpoint)
    if digest != manifest.digest:
        raise RecordCorrupt(f"checkpoint {checkpoint} was altered: its weights are {digest}, not {manifest.digest}")
    policy.replace(saved)
    export(target, manifest, partial(policy.save_pretrained, base_model=base_model))


def _manifest_of(folder: Path) -> Manifest | None:
    try:
        return decode((folder / MANIFEST).read_bytes(), Manifest)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None
