"""What trainer and replicas share about weights, without torch: their file, their fingerprint, a run's adapter."""

from collections.abc import Iterable
from dataclasses import dataclass

from turnmill.config import Config
from turnmill.records import digest_of

# Of a weight version: all weights, or in LoRA mode those of the adapter alone.
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapter that a run trains (arXiv:2106.09685): h = W x + alpha / rank * B A x, with W as it is."""

    rank: int
    alpha: float
    # Names of modules, or ends of them; empty: all linear layers but the output embedding.
    targets: tuple[str, ...]
    # Of the random numbers in A; B begins as zeros.
    seed: int
    # As the run names it.
    base_model: str

    @classmethod
    def of(cls, config: Config) -> "Lora | None":
        """None where all weights are trained."""
        if not config.is_lora:
            return None
        return cls(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            targets=config.lora_targets,
            seed=config.seed,
            base_model=config.base_model,
        )


def fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """A digest over (name, dtype, shape, raw little-endian bytes), independent of the order given.

    Trainer and replica each compute it from their own memory, so equal text means equal weights bit for bit.
    """
    parts = sorted(
        digest_of(name.encode(), dtype.encode(), repr(shape).encode(), data).encode()
        for name, dtype, shape, data in tensors
    )
    return digest_of(*parts)
