"""Logits of many slots in one pass against plain forward passes."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTNeoConfig, GPTNeoForCausalLM

from turnmill.errors import InvalidInput
from turnmill.generation.transformers_engine.attention import attend
from turnmill.generation.transformers_engine.passes import Row, SlotModel, group_of

# Of all tokens' log-probs, the unlikeliest too.
TOLERANCE = 2e-5
NUM_SLOTS = 40


@pytest.fixture(scope="session")
def random_gpt_neo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attention of its own, which no interface reaches."""
    folder = tmp_path_factory.mktemp("gpt-neo")
    torch.manual_seed(4)
    config = GPTNeoConfig(
        vocab_size=500,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global"], 2]],
        max_position_embeddings=128,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
    )
    GPTNeoForCausalLM(config).save_pretrained(folder)
    return folder


class Paths:
    """Tokens of each slot, and how many of them the model has seen."""

    def __init__(self, folder: Path, max_length: int = 128) -> None:
        self.model = SlotModel(folder, num_slots=NUM_SLOTS, max_length=max_length, dtype=torch.float32)
        self._plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._rng = random.Random(3)
        self.ids: dict[int, list[int]] = {slot: [] for slot in range(NUM_SLOTS)}

    @torch.inference_mode()
    def advance(self, groups: Sequence[dict[int, int]]) -> None:
        """Give each slot so many more tokens, and compare all logits."""
        made = []
        for numbers in groups:
            rows = []
            for slot, num in numbers.items():
                new = [self._rng.randrange(5, 490) for _ in range(num)]
                rows.append(Row(slot=slot, ids=torch.tensor(new).numpy(), start=len(self.ids[slot])))
                self.ids[slot] += new
            made.append(group_of(rows))
        found_bv = self.model.logits(made).float()
        slots = [int(slot) for group in made for slot in group.slots_b]
        assert len(found_bv) == len(slots)
        for slot, found_v in zip(slots, found_bv, strict=True):
            expected_v = self._plain(input_ids=torch.tensor([self.ids[slot]]), use_cache=False).logits[0, -1]
            torch.testing.assert_close(found_v.log_softmax(-1), expected_v.log_softmax(-1), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "is_packed"), [("random_llama", True), ("random_qwen3", True), ("random_gpt_neo", False)]
)
def test_prefills_and_decodes_of_any_slots_in_one_pass_give_the_logits_of_plain_passes(
    name: str, is_packed: bool, request: pytest.FixtureRequest
) -> None:
    paths = Paths(request.getfixturevalue(name))
    assert paths.model.is_packed == is_packed
    # Padding; then all slots with so many tokens that the products are large.
    paths.advance([{1: 5, 7: 2, 8: 9}])
    paths.advance([dict.fromkeys(range(NUM_SLOTS), 12)])
    # One token a row: few rows and many, a range and scattered ones.
    paths.advance([{3: 1, 5: 1, 30: 1}])
    paths.advance([dict.fromkeys(range(NUM_SLOTS), 1)])
    paths.advance([dict.fromkeys((slot for slot in range(NUM_SLOTS) if slot != 9), 1)])
    # Together.
    paths.advance([{2: 1, 3: 1, 39: 1}, {0: 7, 6: 3}, {10: 20}])


def test_the_content_stays_when_the_cache_grows(random_llama: Path) -> None:
    paths = Paths(random_llama, max_length=512)
    before = paths.model.cache.capacity
    paths.advance([{0: 250, 5: 11}])
    with torch.inference_mode():
        paths.model.cache.grow(512)
    assert paths.model.cache.capacity > before
    paths.advance([{0: 40, 5: 1}])


def test_attention_that_is_not_told_its_rows_refuses(random_llama: Path) -> None:
    states = torch.zeros(1, 4, 3, 8)
    with pytest.raises(InvalidInput, match="keyword arguments"):
        attend(nn.Identity(), states, states, states, None)
