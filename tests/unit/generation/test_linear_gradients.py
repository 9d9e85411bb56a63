"""Products by oneDNN give what torch gives, gradients too, and leave the model what it was."""

import pytest
import torch
from torch import nn

from turnmill.generation.transformers_engine.linear import SwitchingLinear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 64), (4, 200, 64)], ids=["small", "large"])
def test_values_and_gradients_are_those_of_a_plain_layer(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=bias)
    fast = SwitchingLinear(plain)
    assert fast.weight is plain.weight and fast.bias is plain.bias
    inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
    found = []
    for layer, values in zip((plain, fast), inputs, strict=True):
        plain.zero_grad()
        output = layer(values)
        output.square().sum().backward()
        found.append([output, values.grad, *(parameter.grad for parameter in layer.parameters())])
    for mine, expected in zip(found[1], found[0], strict=True):
        assert mine is not None
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-3)


def test_a_large_product_has_a_gradient_only_where_one_is_wanted() -> None:
    fast = SwitchingLinear(nn.Linear(64, 96).requires_grad_(False))
    values = torch.randn(400, 64).requires_grad_()
    fast(values).sum().backward()
    assert values.grad is not None and fast.weight.grad is None
    with torch.no_grad():
        assert not fast(values).requires_grad
