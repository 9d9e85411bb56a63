"""What a run will keep on disk at most, by the size of its model: told before anything is spent."""

import json
import math
import os
from pathlib import Path

from turnmill.config import Config
from turnmill.errors import InvalidInput
from turnmill.records import RunKind

# Weights are stored as 32-bit floats; beside them a checkpoint has the two moments of AdamW.
_BYTES_PER_PARAMETER = 4
_COPIES_IN_CHECKPOINT = 3
# Weight versions that are there at once: the base, the one that is being written, and the last ones: these two, or off
# policy all those whose tokens may be trained.
_NUM_OTHER_VERSIONS = 2
_NUM_LAST_VERSIONS = 2
# Beside the last checkpoints: the best one, the one that is being written, and the final weights.
_NUM_OTHER_CHECKPOINTS = 2
# Headers of safetensors files are refused by its own library beyond this.
_MOST_HEADER_BYTES = 100_000_000


def num_parameters(model_folder: Path) -> int:
    """As the headers of its safetensors files say; raises `InvalidInput` for a file that is none."""
    return sum(map(math.prod, _shapes(model_folder)))


def num_trained(config: Config, model_folder: Path) -> int:
    """Parameters that a run trains; of an adapter an upper estimate, as if every matrix of the model had its part."""
    if not config.is_lora:
        return num_parameters(model_folder)
    return sum(config.lora_rank * sum(shape) for shape in _shapes(model_folder) if len(shape) == 2)


def bytes_to_keep(config: Config, kind: RunKind, parameters: int, trained: int) -> int:
    """An upper estimate for weights and checkpoints; conversations are small beside them, or the model is.

    `trained` of the model's `parameters` are what versions and checkpoints hold.
    """
    whole, weights = parameters * _BYTES_PER_PARAMETER, trained * _BYTES_PER_PARAMETER
    if kind is RunKind.EVAL:
        return whole
    num_saved = math.ceil(config.max_steps / config.save_steps)
    num_checkpoints = min(num_saved, config.save_top_k + _NUM_OTHER_CHECKPOINTS)
    # A renewed reference of the KL term is in the checkpoints too.
    num_copies = _COPIES_IN_CHECKPOINT + (config.kl_coeff > 0 and config.kl_refresh_steps > 0)
    num_versions = _NUM_OTHER_VERSIONS + max(_NUM_LAST_VERSIONS, config.max_staleness + 1)
    # The final weights are a folder of their own.
    return weights * (num_versions + num_checkpoints * num_copies) + whole


def shown(num_bytes: float) -> str:
    """For people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def _shapes(model_folder: Path) -> list[list[int]]:
    return [shape for path in model_folder.glob("*.safetensors") for shape in _shapes_in(path)]


def _shapes_in(path: Path) -> list[list[int]]:
    """A file begins with the length of its header (8 bytes, little endian) and the header, in JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(_MOST_HEADER_BYTES, os.fstat(file.fileno()).st_size):
                raise ValueError("its header has an impossible length")
            header = json.loads(file.read(length))
        shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise ValueError("its header has shapes that are none")
        return shapes
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{path} is no safetensors file: {error}") from error
