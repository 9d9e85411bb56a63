"""Models and weights from disk: safetensors only, no code from a model's folder, weights replaced in place."""

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from turnmill.errors import InvalidInput, RecordCorrupt
from turnmill.weights import fingerprint


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model of a local folder in eval mode; raises `InvalidInput` where it can't be used."""
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder} holds no model: config.json is missing")
    # Its progress bar would fill the role's log.
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=False, use_safetensors=True, local_files_only=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise InvalidInput(f"the model in {folder} can't be loaded: {error}") from error
    attention = model.config._attn_implementation
    if attention not in ("sdpa", "eager"):
        raise InvalidInput(f"the model in {folder} uses the attention `{attention}`; usable here: sdpa, eager")
    return model.eval()


def usable_length(config: Any, max_length: int) -> int:
    """Most positions of one conversation: `max_length`, or less where the model was made for less.

    Raises `InvalidInput` for layers that keep something else than keys and values of every position.
    """
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    limits = [max_length, getattr(config, "max_position_embeddings", None) or max_length]
    window = getattr(config, "sliding_window", None)
    if window and (not kinds or "sliding_attention" in kinds):
        # Within the window, sliding attention is full attention.
        limits.append(window)
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise InvalidInput(f"a model with layers of the kind {', '.join(sorted(unknown))} can't be served here")
    return min(limits)


def forward_keywords(model: Any) -> tuple[str, bool]:
    """(the name under which `forward` takes a cache, whether it computes logits of chosen positions alone)."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values", "logits_to_keep" in parameters


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Of a safetensors file; raises `RecordCorrupt` where it can't be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecordCorrupt(f"{path} can't be read: {error}") from error


def replace_weights(targets: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy a safetensors file into a model's tensors, by name; all is checked before the first one changes.

    A tied tensor is stored under any one of its names, or under several with equal content. Raises `RecordCorrupt`
    unless the file holds exactly these tensors.
    """
    found = read_tensors(path)
    unexpected = sorted(found.keys() - targets.keys())
    if unexpected:
        raise RecordCorrupt(f"{path} holds tensors that the model does not have: {_some(unexpected)}")
    by_storage: dict[int, torch.Tensor] = {}
    for name, source in found.items():
        target = targets[name]
        if source.shape != target.shape or source.dtype != target.dtype:
            raise RecordCorrupt(
                f"{path}: {name} is {source.dtype} {tuple(source.shape)}, "
                f"the model has {target.dtype} {tuple(target.shape)}"
            )
        twin = by_storage.setdefault(target.data_ptr(), source)
        if twin is not source and not torch.equal(twin, source):
            raise RecordCorrupt(f"{path}: {name} is tied to another tensor and differs from it")
    missing = sorted(name for name, target in targets.items() if target.data_ptr() not in by_storage)
    if missing:
        raise RecordCorrupt(f"{path} lacks tensors of the model: {_some(missing)}")
    with torch.no_grad():
        for name, source in found.items():
            targets[name].copy_(source)


def digest_of_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """`weights.fingerprint` of named tensors."""
    return fingerprint(
        (
            name,
            str(tensor.dtype),
            tuple(tensor.shape),
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, tensor in tensors
    )


def model_fingerprint(model: Any) -> str:
    """Over `named_parameters()`, so a tied tensor counts once, and an adapter as much as what it is added to."""
    return digest_of_tensors(model.named_parameters())


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
