"""The model being trained: loading, logits where they are needed, and how its weights leave the process.

    all weights     version: model.safetensors   checkpoint, final: a Hugging Face folder
    an adapter      version: A and B alone       checkpoint: peft's folder   final: merged, with that folder in adapter/

Axes: B rows, T positions, M positions of a pass, N selected ones of them, V vocabulary, D hidden size.
"""

import copy
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from turnmill.config import Config
from turnmill.errors import InvalidInput
from turnmill.generation.transformers_engine.linear import use_switching_linear
from turnmill.generation.transformers_engine.loading import (
    digest_of_tensors,
    model_fingerprint,
    read_tensors,
    replace_weights,
)
from turnmill.training.bundles import ATTENTION, Bundle, register
from turnmill.training.microbatches import MicroBatch
from turnmill.training.recomputing import recompute_layers
from turnmill.weights import WEIGHTS_FILE, Lora

logger = logging.getLogger(__name__)

# How far logits computed in two ways may be apart, in standard deviations of the logits: float32 noise is up to 5e-5
# of them in two dozen layers, another attention makes 1e-1.
_SAME_LOGITS = 5e-4
# What a checkpoint takes over from the base model beside its weights, as glob patterns.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "recipe.toml",
)
# In the folder of a merged model: the adapter that was merged, as peft keeps it.
ADAPTER_FOLDER = "adapter"


class _Narrow:
    """Lets a block that looks at each position by itself see the selected ones only; elsewhere it adds zeros.

    For the feed-forward block of the last layer: nobody reads what comes out of that layer where nothing is selected.
    """

    def __init__(self, block: torch.nn.Module) -> None:
        # For each thread: `index_n`, the selected positions (rows one behind the other), and the `shape` [B, T, D] of
        # what the block was given. Without them it sees all positions.
        self._pass = threading.local()
        # Whether the last pass over all positions took one tensor and gave one like it.
        self.fits = False
        block.register_forward_pre_hook(self._select)
        block.register_forward_hook(self._spread)

    def __getstate__(self) -> dict[str, bool]:
        """For copies: no thread is in a pass of theirs."""
        return {"fits": self.fits}

    def __setstate__(self, state: dict[str, bool]) -> None:
        self.fits = state["fits"]
        self._pass = threading.local()

    @contextmanager
    def to(self, index_n: Tensor) -> Iterator[None]:
        """Narrow the passes made meanwhile."""
        self._pass.index_n = index_n
        try:
            yield
        finally:
            del self._pass.index_n

    def _select(self, _: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        if not hasattr(self._pass, "index_n"):
            return None
        (hidden_btd,) = arguments
        self._pass.shape = hidden_btd.shape
        return (hidden_btd.flatten(0, 1).index_select(0, self._pass.index_n)[None],)

    def _spread(self, _: torch.nn.Module, arguments: tuple[Any, ...], added: Any) -> Tensor | None:
        if not hasattr(self._pass, "index_n"):
            self.fits = len(arguments) == 1 and isinstance(added, Tensor) and added.shape == arguments[0].shape
            return None
        num_rows, width, size = self._pass.shape
        zeros_md: Tensor = added.new_zeros(num_rows * width, size)
        return zeros_md.index_copy(0, self._pass.index_n, added[0]).view(num_rows, width, size)


class Policy:
    """A causal language model with fp32 weights, always in evaluation mode: with dropout, trainer and sampler disagree.

    What is trained are those of its parameters that require a gradient: all, or in LoRA mode those of the adapter.
    """

    def __init__(
        self, model: Any, *, lora: Lora | None = None, is_bf16: bool = False, is_recomputing: bool = False
    ) -> None:
        """`model` has the adapter `lora` already.

        With `is_bf16`, passes multiply in bfloat16; with `is_recomputing`, the backward pass computes activations
        again. Raises `InvalidInput` where the model can't do that.
        """
        self.model = model.eval()
        self.lora = lora
        self._is_bf16 = is_bf16
        if not is_bf16:
            # It multiplies float32 only; torch asks oneDNN for bfloat16 products by itself.
            use_switching_linear(model)
        self.has_plain_head = self._head_is_plain()
        self._narrow: _Narrow | None = None
        if self.has_plain_head:
            self._narrow = self._narrowed()
        # Whether a pass may have several bundles, with prompts that are computed once.
        self.is_sharing = self._shares()
        if is_recomputing:
            recompute_layers(model, but_the_last=self._narrow is not None)

    @classmethod
    def load(cls, folder: Path, config: Config | None = None) -> "Policy":
        """Load a Hugging Face folder: safetensors only, no code from it, nothing from the network.

        `config` tells adapter, precision and whether activations are kept; without it, all weights are trained in fp32.
        """
        config = config or Config()
        model = _read_model(folder)
        lora = Lora.of(config)
        if lora is not None:
            # Imports peft.
            from turnmill.generation.transformers_engine.adapters import inject

            inject(model, lora)
        return cls(model, lora=lora, is_bf16=config.precision == "bf16", is_recomputing=config.gradient_checkpointing)

    def frozen_twin(self) -> "Policy":
        """A policy with the weights as they are now, which stay; those that are never trained are shared, not copied.

        In LoRA mode that is the base model with another adapter. The two may run passes at once, in several threads.
        """
        shared = {id(parameter): parameter for parameter in self.model.parameters() if not parameter.requires_grad}
        twin = copy.deepcopy(self, shared)
        twin.model.requires_grad_(False)
        return twin

    @property
    def is_reentrant(self) -> bool:
        """Whether several threads may run passes at once: some position embeddings are changed by a pass."""
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        return rope.get("rope_type", "default") not in ("dynamic", "longrope")

    def named_trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The trained parameters with their names in the model, each once, a tied one too."""
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained parameters, in the order of `named_trained`."""
        return [parameter for _, parameter in self.named_trained()]

    @torch.no_grad()
    def _head_is_plain(self) -> bool:
        """Whether logits are just the output embedding of the last hidden state (no scaling, no soft cap)."""
        head = self.model.get_output_embeddings()
        if head is None or self.model.base_model is self.model:
            return False
        ids_bt = torch.arange(min(16, self.model.config.vocab_size))[None, :]
        hidden_btd = getattr(self.model.base_model(input_ids=ids_bt, use_cache=False), "last_hidden_state", None)
        if hidden_btd is None:
            return False
        logits_btv = head(hidden_btd)
        full_btv = self.model(input_ids=ids_bt, use_cache=False).logits
        return logits_btv.shape == full_btv.shape and torch.allclose(logits_btv, full_btv, rtol=1e-5, atol=1e-5)

    @torch.no_grad()
    def _narrowed(self) -> _Narrow | None:
        """For models with `layers[-1].mlp` that give the same logits that way."""
        layers = getattr(self.model.base_model, "layers", None)
        block = getattr(layers[-1], "mlp", None) if isinstance(layers, torch.nn.ModuleList) else None
        if block is None:
            return None
        narrow = _Narrow(block)
        ids_bt = torch.arange(min(16, self.model.config.vocab_size))[None, :]
        full_tv = self.model(input_ids=ids_bt, use_cache=False).logits[0]
        if not narrow.fits:
            return None
        positions_n = torch.arange(0, len(full_tv), 2)
        with narrow.to(positions_n):
            narrowed_tv = self.model(input_ids=ids_bt, use_cache=False).logits[0]
        same = torch.allclose(narrowed_tv[positions_n], full_tv[positions_n], rtol=1e-5, atol=1e-5)
        return narrow if same else None

    @torch.no_grad()
    def _shares(self) -> bool:
        """Switch to attention by bundles, if this model gives the same logits that way."""
        original = self.model.config._attn_implementation
        if original != "sdpa" or not getattr(self.model, "_supports_attention_backend", False):
            logger.info("prompts are computed once a row: this model has an attention of its own (%s)", original)
            return False
        num = min(12, self.model.config.vocab_size)
        paths = [torch.arange(num), torch.arange(num)[[0, 1, 2, *range(num - 1, 2, -1)]], torch.arange(num).flip(0)]
        full = [self.model(input_ids=path[None], use_cache=False).logits[0] for path in paths]
        bundles = (
            Bundle(rows=(0, 1), num_shared=3, width=num - 3),
            Bundle(rows=(2,), num_shared=0, width=num),
        )
        ids_m = torch.cat([paths[0], paths[1][3:], paths[2]])
        expected_mv = torch.cat([full[0], full[1][3:], full[2]])
        register()
        self.model.set_attn_implementation(ATTENTION)
        try:
            found_mv = self._packed(ids_m, bundles, self.model).logits[0]
            error = f"logits differ by {float((found_mv - expected_mv).abs().max()):.3g}"
            if torch.allclose(found_mv, expected_mv, rtol=0, atol=_SAME_LOGITS * float(expected_mv.std())):
                return True
        except (AttributeError, RuntimeError, TypeError, ValueError) as raised:
            # A model may count on a mask that transformers makes for attention functions of its own only.
            error = repr(raised)
        self.model.set_attn_implementation(original)
        logger.warning("prompts are computed once a row: with an attention function of ours, %s", error)
        return False

    def logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] logits that predict the trained tokens of a pass.

        Causal attention keeps the padding, which is to the right, away from every real token, so no mask is needed.
        Where the head is plain, it runs on the selected positions only, and so does the feed-forward block of the last
        layer: most tokens of a conversation are not trained.
        """
        run = self._packed if self.is_sharing else self._padded
        if not self.has_plain_head:
            with self._precision():
                full_btv: Tensor = run(batch.ids_m, batch.bundles, self.model).logits
            return full_btv.flatten(0, 1)[batch.index_n].float()
        with self._precision(), self._narrow.to(batch.index_n) if self._narrow is not None else nullcontext():
            hidden_btd = run(batch.ids_m, batch.bundles, self.model.base_model).last_hidden_state
        selected_nd = hidden_btd.flatten(0, 1).index_select(0, batch.index_n)
        # In fp32 whatever the precision is: logits rounded to bfloat16 are most of what trainer and sampler would
        # disagree about (arXiv:2506.13585, section 3.2).
        selected_nv: Tensor = self.model.get_output_embeddings()(selected_nd.float())
        return selected_nv

    def _precision(self) -> AbstractContextManager[Any]:
        """Of products in a pass; weights stay fp32, and so does what is added up from layer to layer.

        Without the cache of cast weights, which all threads would share, those without gradients too.
        """
        if not self._is_bf16:
            return nullcontext()
        return torch.autocast(self.model.device.type, torch.bfloat16, cache_enabled=False)

    def _packed(self, ids_m: Tensor, bundles: Sequence[Bundle], model: Any) -> Any:
        """The output of one row [1, M] that holds all bundles."""
        return model(
            input_ids=ids_m[None],
            position_ids=torch.cat([bundle.places() for bundle in bundles])[None],
            use_cache=False,
            bundles=[(bundle, bundle.mask()) for bundle in bundles],
        )

    def _padded(self, ids_m: Tensor, bundles: Sequence[Bundle], model: Any) -> Any:
        """The output of the rows [B, T] of one bundle that shares nothing."""
        (bundle,) = bundles
        return model(input_ids=ids_m.view(len(bundle.rows), bundle.width), use_cache=False)

    # ------------------------------------------------------------ files

    def fingerprint(self) -> str:
        """Digest of all weights in memory, as replicas compute it from theirs."""
        return model_fingerprint(self.model)

    def save_weights(self, folder: Path) -> None:
        """Write what replicas load: `model.safetensors` with each trained parameter once, a tied one too."""
        tensors = {name: tensor.detach().contiguous() for name, tensor in self._stored().items()}
        safetensors.torch.save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})

    def _stored(self) -> Mapping[str, Tensor]:
        """The trained parameters by the names that they have in files."""
        if self.lora is None:
            return dict(self.model.named_parameters())
        from turnmill.generation.transformers_engine.adapters import adapter_tensors

        return adapter_tensors(self.model)

    def save_checkpoint(self, folder: Path, base_model: Path) -> None:
        """Write what training goes on with: a Hugging Face folder, or the adapter as `peft.PeftModel` loads it."""
        if self.lora is None:
            self.save_pretrained(folder, base_model)
            return
        from turnmill.generation.transformers_engine.adapters import save_adapter

        save_adapter(self.model, self.lora, folder)

    def read_checkpoint(self, folder: Path) -> tuple[dict[str, Tensor], str]:
        """Of what `save_checkpoint` wrote: trained parameters by their names in the model, and the digest with them.

        Nothing changes here. Raises `InvalidInput` or `RecordCorrupt` where it can't be read.
        """
        if self.lora is None:
            saved = dict(_read_model(folder).named_parameters())
            return saved, digest_of_tensors(saved.items())
        from turnmill.generation.transformers_engine.adapters import ADAPTER_FILE

        found = read_tensors(folder / ADAPTER_FILE)
        names = {id(parameter): name for name, parameter in self.named_trained()}
        saved = {names[id(parameter)]: found[key] for key, parameter in self._stored().items() if key in found}
        whole = dict(self.model.named_parameters()) | saved
        return saved, digest_of_tensors(whole.items())

    @torch.no_grad()
    def replace(self, trained: Mapping[str, Tensor]) -> None:
        """Take over trained parameters, by their names in the model."""
        for name, parameter in self.named_trained():
            parameter.copy_(trained[name])

    def load_weights(self, folder: Path) -> None:
        """Take over what `save_weights` wrote; raises `RecordCorrupt`, nothing changed, where it is not that."""
        replace_weights(self._stored(), folder / WEIGHTS_FILE)

    def save_pretrained(self, folder: Path, base_model: Path) -> None:
        """Write a Hugging Face folder; tokenizer, chat template and recipe are those of the base model.

        In LoRA mode it holds the base model with the adapter merged into it, and the adapter beside.
        """
        if self.lora is None:
            self.model.save_pretrained(folder, safe_serialization=True)
        else:
            adapter = folder / ADAPTER_FOLDER
            adapter.mkdir()
            self.save_checkpoint(adapter, base_model)
            self._merged(base_model).save_pretrained(folder, safe_serialization=True)
        for pattern in _COMPANIONS:
            for path in sorted(base_model.glob(pattern)):
                if path.is_dir():
                    shutil.copytree(path, folder / path.name)
                else:
                    shutil.copyfile(path, folder / path.name)

    def _merged(self, base_model: Path) -> Any:
        """The base model, read anew, with the adapter added to its weights."""
        from turnmill.generation.transformers_engine.adapters import add_adapter

        merged = _read_model(base_model)
        add_adapter(self.model, merged)
        return merged


def _read_model(folder: Path) -> Any:
    """In fp32; raises `InvalidInput` where it can't be loaded."""
    # Its progress bar would fill the role's log, of which the last lines are what a failure shows.
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise InvalidInput(f"base_model folder {folder} can't be loaded: {error}") from error
