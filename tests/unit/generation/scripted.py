"""A model that always says the same: its logits depend on the last token alone."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.generation.families import Family

_WIDTH = 48


def save_scripted(folder: Path, family: Family, chunks: Sequence[str], starts: Sequence[str]) -> Any:
    """A model that says these chunks of text, a token each, behind any of the tokens that `starts` end with.

    Each chunk is there once. The tokenizer that goes with it.
    """
    tokenizer = family.tokenizer()
    tokenizer.add_tokens([AddedToken(chunk, special=False, normalized=False) for chunk in chunks])
    tokenizer.chat_template = family.template
    begins = [tokenizer.encode(start, add_special_tokens=False)[-1] for start in starts]
    said = [*tokenizer.convert_tokens_to_ids(list(chunks)), tokenizer.eos_token_id]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in (model.model.layers[0].self_attn.o_proj.weight, model.model.layers[0].mlp.down_proj.weight):
            weight.zero_()
        model.lm_head.weight.zero_()
        model.model.embed_tokens.weight.zero_()
        model.model.embed_tokens.weight[:, _WIDTH - 1] = 1.0
        follows = [*((begin, said[0]) for begin in begins), *pairwise(said)]
        for token, following in follows:
            place = said.index(following)
            model.model.embed_tokens.weight[token] = torch.eye(_WIDTH)[place]
            model.lm_head.weight[following] = torch.eye(_WIDTH)[place] * 20
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer
