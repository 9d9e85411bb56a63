"""The two ways to multiply by the same weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from turnmill.generation.transformers_engine.linear import SwitchingLinear, use_switching_linear

# Rows for a product below and above the size at which the way changes.
FEW, MANY = 4, 700


def assert_as_torch(linear: nn.Module, source: nn.Linear, inputs: torch.Tensor) -> None:
    with torch.inference_mode():
        found, expected = linear(inputs), F.linear(inputs, source.weight, source.bias)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_products_of_all_sizes_and_layouts_equal_those_of_torch(num_rows: int, bias: bool) -> None:
    source = nn.Linear(48, 96, bias=bias)
    linear = SwitchingLinear(source)
    assert_as_torch(linear, source, torch.randn(num_rows, 48))
    assert_as_torch(linear, source, torch.randn(1, num_rows, 48))
    assert_as_torch(linear, source, torch.randn(num_rows, 1, 48))
    assert_as_torch(linear, source, torch.randn(48, num_rows).T)
    assert_as_torch(linear, source, torch.randn(num_rows, 2, 48)[:, 1])
    assert_as_torch(linear, source, torch.randn(2, num_rows, 48).transpose(0, 1))


@pytest.mark.parametrize("num_rows", [FEW, MANY])
def test_weights_that_change_in_place_are_the_ones_that_multiply(num_rows: int) -> None:
    source = nn.Linear(48, 96)
    linear = SwitchingLinear(source)
    inputs = torch.randn(num_rows, 48)
    assert_as_torch(linear, source, inputs)
    with torch.no_grad():
        source.weight.copy_(torch.randn(96, 48))
    assert_as_torch(linear, source, inputs)


def test_a_model_keeps_its_parameters_under_their_names_and_other_layers_as_they_are() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
            self.brief = nn.Linear(8, 8, dtype=torch.bfloat16)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embed.weight

    model: Any = Tied().eval()
    before = list(model.named_parameters())
    use_switching_linear(model)
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(new is old for (_, new), (_, old) in zip(after, before, strict=True))
    assert type(model.inner[0]) is type(model.head) is SwitchingLinear
    assert type(model.brief) is nn.Linear
    assert model.head.weight is model.embed.weight
    assert not model.head.training
