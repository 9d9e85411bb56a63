"""Large matrix products of a step by oneDNN, forward and backward.

MKL, which multiplies matrices in torch, does not use AVX-512 on AMD: there oneDNN is twice as fast forward and for the
gradient of the input, 1.4 to 1.7 times for that of the weight (2048 x 128 x 512, one thread). Which one multiplies
follows from the shapes alone, so that a step made again makes the same bits.

Axes: M rows and positions together, D inputs, F outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# Multiply-adds from which the faster kernel outweighs its dearer call.
_LARGE = 2**21


def _product(left_md: Tensor, right_fd: Tensor, bias_f: Tensor | None = None) -> Tensor:
    """[M, F] left @ right.T + bias; views are taken as they are."""
    product_mf: Tensor = torch.ops.mkldnn._linear_pointwise.default(left_md, right_fd, bias_f, "none", [], "")
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


class FastLinear(nn.Linear):
    """`nn.Linear`, which asks oneDNN for large products."""

    def __init__(self, like: nn.Linear) -> None:
        """With the very parameters of `like`."""
        with torch.device("meta"):
            super().__init__(like.in_features, like.out_features, bias=False)
        self.weight, self.bias = like.weight, like.bias
        self.training = like.training

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.out_features < _LARGE:
            return functional.linear(input, self.weight, self.bias)
        # The operator wants two dimensions.
        flat = input.reshape(-1, input.shape[-1])
        output: Tensor = _Product.apply(flat, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output.view(*input.shape[:-1], -1)


def use_fast_linear(model: Any) -> None:
    """Replace every `nn.Linear` of the model (no subclass of it), where this torch can.

    The modules keep their names and their parameters, tied ones included.
    """
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module.weight.dtype is torch.float32:
            model.set_submodule(name, FastLinear(module))
