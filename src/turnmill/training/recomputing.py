"""Gradient checkpointing (arXiv:1604.06174): layers keep their inputs alone; the backward pass computes them again.

By transformers' own switch for it, in a model that stays in evaluation mode.
"""

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from turnmill.errors import InvalidInput


def recompute_layers(model: Any, *, but_the_last: bool) -> None:
    """Let the layers of a model be computed again; with `but_the_last`, not the last one.

    The backward pass begins with that one, so that its activations are there at the peak in any case; and what a pass
    asks of it alone is not known any more by then. Raises `InvalidInput` where the model can't do that.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise InvalidInput(f"gradient_checkpointing: not with {type(model).__name__}: it can't compute layers again")
    expected_v = _logits(model)
    # The older name is that of transformers before 5.20.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Nothing in a layer is random: there is no dropout.
    enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in layers:
        # Alone: what is inside stays in evaluation mode.
        layer.training = True
    if but_the_last:
        layers[-1].gradient_checkpointing = False
    if not torch.equal(_logits(model), expected_v):
        raise InvalidInput(f"gradient_checkpointing: not with {type(model).__name__}: its layers drop out in training")


def _logits(model: Any) -> torch.Tensor:
    """Of a few tokens, with a graph: without one, layers are not recomputed."""
    ids_bt = torch.arange(min(16, model.config.vocab_size))[None]
    logits_btv: torch.Tensor = model(input_ids=ids_bt, use_cache=False).logits
    return logits_btv.detach()
