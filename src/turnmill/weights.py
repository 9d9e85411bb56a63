"""What trainer and replicas share about weights, without torch: the fingerprint of a set of named tensors."""

from collections.abc import Iterable

from turnmill.records import digest_of

WEIGHTS_FILE = "model.safetensors"


def fingerprint(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """A digest over (name, dtype, shape, raw little-endian bytes), independent of the order given.

    Trainer and replica each compute it from their own memory, so equal text means equal weights bit for bit.
    """
    parts = sorted(
        digest_of(name.encode(), dtype.encode(), repr(shape).encode(), data).encode()
        for name, dtype, shape, data in tensors
    )
    return digest_of(*parts)
