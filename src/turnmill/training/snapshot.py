"""What training goes on with: weights, optimizer and random state, bit for bit; safetensors only, no pickle.

    save: trainer -> Hugging Face folder, or that of an adapter + trainer.safetensors
    restore: folder -> checked against the manifest's digests -> trainer

`trainer.safetensors` holds `optimizer/<parameter>/<state>`, `random/torch` and, where it is not the base model any
more, `reference/<parameter>`: the weights of the last step at which the reference of the KL term was renewed. The rest
follows from the number of steps (learning rate) and from the records of the batches (data position).
"""

from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from turnmill.errors import InvalidInput, RecordCorrupt
from turnmill.generation.transformers_engine.loading import digest_of_tensors
from turnmill.training.checkpoint import Manifest
from turnmill.training.optimizer import set_learning_rate
from turnmill.training.trainer import Trainer

STATE_FILE = "trainer.safetensors"
_OPTIMIZER, _RANDOM, _REFERENCE = "optimizer", "random/torch", "reference"


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Optimizer, random state and renewed reference by name."""
    tensors = {_RANDOM: torch.get_rng_state()}
    for name, parameter in trainer.policy.named_trained():
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{_OPTIMIZER}/{name}/{key}"] = value.detach().contiguous()
    if trainer.is_renewed_at(trainer.num_steps):
        for name, parameter in trainer.named_reference():
            tensors[f"{_REFERENCE}/{name}"] = parameter.detach().contiguous()
    return tensors


def state_digest(trainer: Trainer) -> str:
    """Fingerprint of `state_of`."""
    return digest_of_tensors(state_of(trainer).items())


def save(trainer: Trainer, folder: Path) -> None:
    """Write everything into an existing folder."""
    trainer.policy.save_checkpoint(folder, trainer.base_model)
    safetensors.torch.save_file(state_of(trainer), folder / STATE_FILE)


def restore(trainer: Trainer, folder: Path, manifest: Manifest) -> None:
    """Bring the trainer where it was when `folder` was saved.

    Raises `RecordCorrupt`, the trainer unchanged, if the folder can't be read or is not what its manifest says.
    """
    policy = trainer.policy
    try:
        saved, digest = policy.read_checkpoint(folder)
        tensors = safetensors.torch.load_file(folder / STATE_FILE)
    except (OSError, InvalidInput, SafetensorError) as error:
        raise RecordCorrupt(f"checkpoint {folder} can't be read: {error}") from error
    for what, expected, found in (
        ("weights", manifest.digest, digest),
        ("optimizer state", manifest.state_digest, digest_of_tensors(tensors.items())),
    ):
        if expected != found:
            raise RecordCorrupt(f"checkpoint {folder} was altered: its {what} are {found}, recorded was {expected}")
    reference = _reference_of(trainer, folder, manifest, tensors)
    names = {parameter: name for name, parameter in policy.named_trained()}
    state = trainer.optimizer.state_dict()
    state["state"] = {}
    grouped = (parameter for group in trainer.optimizer.param_groups for parameter in group["params"])
    for index, parameter in enumerate(grouped):
        prefix = f"{_OPTIMIZER}/{names[parameter]}/"
        values = {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
        if values:
            state["state"][index] = {key: value.clone() for key, value in values.items()}
    policy.replace(saved)
    with torch.no_grad():
        for parameter, value in reference:
            parameter.copy_(value)
    trainer.optimizer.load_state_dict(state)
    set_learning_rate(trainer.optimizer, trainer.config, manifest.step)
    torch.set_rng_state(tensors[_RANDOM])
    trainer.num_steps = manifest.step


def _reference_of(
    trainer: Trainer, folder: Path, manifest: Manifest, tensors: dict[str, Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Parameters of the reference with their saved values; none while it is the base model."""
    if not trainer.is_renewed_at(manifest.step):
        return []
    named = {f"{_REFERENCE}/{name}": parameter for name, parameter in trainer.named_reference()}
    missing = sorted(named.keys() - tensors.keys())
    if missing:
        raise RecordCorrupt(f"checkpoint {folder}: {STATE_FILE} lacks the renewed reference: {missing[:3]}")
    return [(parameter, tensors[name]) for name, parameter in named.items()]
