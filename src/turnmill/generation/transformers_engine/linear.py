"""Large matrix products of a model by oneDNN, small ones as torch has them; for the engine and for the trainer.

MKL, which multiplies matrices in torch, does not use AVX-512 on AMD: there oneDNN is twice as fast forward and for the
gradient of the input, 1.4 to 1.7 times for that of the weight (2048 x 128 x 512, one thread), but it costs some
microseconds more a call. Nothing is packed: the same memory serves both, so replaced weights and fingerprints of the
model's parameters hold for whatever samples. Which one multiplies follows from the shapes alone, so that a step made
again makes the same bits.

Axes: M rows and positions together, D inputs, F outputs.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Multiply-adds from which the faster kernel outweighs its dearer call: 32 x 128 x 512 with weights out of the cache.
_LARGE = 2**21
# The overload itself: resolving it anew costs as much as a small product. None where this torch has no such operator.
_KERNEL: Any = (
    torch.ops.mkldnn._linear_pointwise.default
    if torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    else None
)


def _product(left_md: Tensor, right_fd: Tensor, bias_f: Tensor | None = None) -> Tensor:
    """[M, F] left @ right.T + bias by oneDNN; views are taken as they are."""
    product_mf: Tensor = _KERNEL(left_md, right_fd, bias_f, "none", [], "")
    return product_mf


class _Product(torch.autograd.Function):
    """`_product` with a gradient: the operator has none."""

    @staticmethod
    def forward(ctx: Any, input_md: Tensor, weight_fd: Tensor, bias_f: Tensor | None) -> Tensor:
        ctx.save_for_backward(input_md, weight_fd)
        return _product(input_md, weight_fd.detach(), None if bias_f is None else bias_f.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient_mf,) = gradients
        input_md, weight_fd = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _product(gradient_mf, weight_fd.t()) if needs_input else None,
            _product(gradient_mf.t(), input_md.t()) if needs_weight else None,
            gradient_mf.sum(dim=0) if needs_bias else None,
        )


class SwitchingLinear(nn.Linear):
    """`nn.Linear`, which asks oneDNN for large products and for their gradients."""

    def __init__(self, like: nn.Linear) -> None:
        """With the very parameters of `like`."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=False)
        self.weight, self.bias = like.weight, like.bias
        self.training = like.training
        # Elements of an input that make the product large.
        self._large = _LARGE // like.out_features

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() < self._large:
            return F.linear(input, self.weight, self.bias)
        # The operator wants two dimensions, and a weight that asks for no gradient.
        flat = input.reshape(-1, input.shape[-1])
        if torch.is_grad_enabled():
            output: Tensor = _Product.apply(flat, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            output = _product(flat, self.weight.detach(), None if self.bias is None else self.bias.detach())
        return output.view(*input.shape[:-1], -1)


def use_switching_linear(model: Any) -> None:
    """Let every float32 `nn.Linear` of the model (no subclass of it) choose by size, where this torch can.

    The modules keep their names and their parameters, tied ones included.
    """
    if _KERNEL is None:
        return
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            model.set_submodule(name, SwitchingLinear(module))
