"""Large matrix products of the model by oneDNN, small ones as torch has them; weights stay where they are.

On CPUs whose AVX-512 the BLAS in torch does not use (MKL on AMD), oneDNN is up to twice as fast, but it costs some
microseconds more a call. The same memory serves both: nothing is packed, so replaced weights and fingerprints of the
model's parameters hold for whatever samples.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Multiply-adds from which the faster kernel outweighs its dearer call: 32 x 128 x 512 with weights out of the cache.
_LARGE = 2**21


class SwitchingLinear(nn.Linear):
    """`nn.Linear`, which asks oneDNN for large products."""

    def __init__(self, like: nn.Linear) -> None:
        """With the very parameters of `like`."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=False)
        self.weight, self.bias = like.weight, like.bias
        self.training = like.training
        # Elements of an input that make the product large.
        self._large = _LARGE // like.out_features
        # The overload itself: resolving it anew costs as much as a small product.
        self._kernel = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() < self._large:
            return F.linear(input, self.weight, self.bias)
        # The operator wants two dimensions, and a weight that asks for no gradient.
        flat = input.reshape(-1, input.shape[-1])
        output: torch.Tensor = self._kernel(flat, self.weight.detach(), self.bias, "none", [], "")
        return output.view(*input.shape[:-1], -1)


def use_switching_linear(model: Any) -> None:
    """Let every float32 `nn.Linear` of the model (no subclass of it) choose by size, where this torch can.

    The modules keep their names and their parameters, tied ones included.
    """
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            model.set_submodule(name, SwitchingLinear(module))
