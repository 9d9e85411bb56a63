"""LoRA by peft, as trainer and replicas both have it: in memory, and in the files that go between them.

    inject: model -> the same model with an adapter, everything else frozen
    adapter_tensors: model -> A and B by the names that they have in peft's files
    add_adapter: model -> the base model with the adapter merged into it, to be published
    save_adapter: model -> adapter_model.safetensors + adapter_config.json, a folder that `peft.PeftModel` loads

The adapter is never merged into the weights that sample: what a merge rounds depends on the machine, so that
fingerprints of merged weights could not be compared, and a base model merged again and again would drift.

Importing this imports peft, which is done only where a run has an adapter. Axes: M rows and positions together, R rank,
F outputs.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from turnmill.errors import InvalidInput
from turnmill.weights import Lora

ADAPTER_FILE = "adapter_model.safetensors"
# The name that peft gives to an adapter which has no other.
_ADAPTER = "default"
# What `PeftModel` puts before the names of a model's own modules.
_PREFIX = "base_model.model."


class AdaptedLinear(LoraLinear):  # type: ignore[misc]
    """peft's layer for `nn.Linear`, where the product with B adds to that with W, in place where nothing else needs it.

    Scaling and sum as operations of their own, and asking for what else peft's layer can do, cost a tiny model that
    samples a seventh of its time.
    """

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        output: Tensor = self.base_layer(x)
        weight_fr = self.lora_B[_ADAPTER].weight
        output_mf = output.view(-1, weight_fr.shape[0])
        low_mr = self.lora_A[_ADAPTER](x).view(-1, weight_fr.shape[1])
        scaling = self.scaling[_ADAPTER]
        if torch.is_grad_enabled() or output.dtype is not weight_fr.dtype:
            output_mf = torch.addmm(output_mf, low_mr, weight_fr.t(), alpha=scaling)
        else:
            output_mf.addmm_(low_mr, weight_fr.t(), alpha=scaling)
        return output_mf.view(output.shape)


def inject(model: Any, lora: Lora) -> None:
    """Give a model of transformers its first adapter, which changes none of its outputs yet, and freeze all the rest.

    The same one in every process: its random numbers are drawn from the run's seed, module by module. Raises
    `InvalidInput` where `lora.targets` name nothing, or something else than linear layers of the decoder.
    """
    adapted = _chosen(model, lora.targets)
    config = _config(lora, list(adapted), is_transposed=all(isinstance(module, Conv1D) for module in adapted.values()))
    config._register_custom_module({nn.Linear: AdaptedLinear})
    inject_adapter_in_model(config, model, _ADAPTER)
    generator = torch.Generator().manual_seed(lora.seed)
    for name in adapted:
        # As peft does, but without the generator of the whole process.
        nn.init.kaiming_uniform_(model.get_submodule(name).lora_A[_ADAPTER].weight, a=math.sqrt(5), generator=generator)
    model.eval()


def _chosen(model: Any, targets: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that `targets` name, by their names; all that can have an adapter where nothing is named."""
    head = model.get_output_embeddings()
    modules = dict(model.named_modules())
    usable = {
        name: module
        for name, module in modules.items()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    if not targets:
        return usable
    chosen: dict[str, nn.Module] = {}
    for target in targets:
        named = [name for name in modules if name == target or name.endswith(f".{target}")]
        wrong = [name for name in named if name not in usable]
        if not named or wrong:
            problem = (
                f"{wrong[0]} is no linear layer of the decoder" if wrong else "the model has no module of that name"
            )
            ends = ", ".join(sorted({name.rpartition(".")[2] for name in usable}))
            raise InvalidInput(f"lora_targets: {target!r}: {problem}; choose among {ends}, or leave it out for all")
        chosen |= {name: usable[name] for name in named}
    return {name: module for name, module in usable.items() if name in chosen}


def _config(lora: Lora, names: list[str], *, is_transposed: bool) -> LoraConfig:
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=names,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
        base_model_name_or_path=lora.base_model,
    )


def _layers(model: Any) -> dict[str, Any]:
    """The modules that have an adapter, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """A and B of every layer, by their names in peft's files."""
    marks = (f".lora_A.{_ADAPTER}.", f".lora_B.{_ADAPTER}.")
    return {
        _PREFIX + name.replace(f".{_ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if any(mark in name for mark in marks)
    }


def save_adapter(model: Any, lora: Lora, folder: Path) -> None:
    """Write the adapter as peft does, into an existing folder."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in adapter_tensors(model).items()}
    safetensors.torch.save_file(tensors, folder / ADAPTER_FILE, metadata={"format": "pt"})
    layers = _layers(model)
    config = _config(lora, list(layers), is_transposed=all(layer.fan_in_fan_out for layer in layers.values()))
    config.inference_mode = True
    config.save_pretrained(folder)


@torch.no_grad()
def add_adapter(model: Any, base: Any) -> None:
    """Merge the adapter of a model into the weights of `base`, which is the same model without it."""
    for name, layer in _layers(model).items():
        base.get_submodule(name).weight.add_(layer.get_delta_weight(_ADAPTER))
