"""A model that always says the same: its logits depend on the last token alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.generation.families import FAMILIES

_WIDTH = 48


def save_random(folder: Path, name: str) -> None:
    """A model of this family with random weights, drawn wide so that its tokens are far from uniform."""
    tokenizer = FAMILIES[name].save(folder)
    torch.manual_seed(3)
    LlamaForCausalLM(_config(tokenizer, initializer_range=0.15)).save_pretrained(folder)


def _config(tokenizer: Any, **changes: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **changes,
    )


# What models say, a token each and each once, and what the prompts end with that they say it after.
SCRIPTS: dict[str, tuple[list[str], list[str]]] = {
    "chatml": (
        ['<tool_call>\n{"name": "', "get_weather", '", "arguments": ', '{"city": "Paris"}', "}\n</tool_call>\n",
         '<tool_call>\n{"name": "add", "arguments"', ': {"a": 1}}', "\n</tool_call>"],
        ["<|im_start|>assistant\n"],
    ),
    # Only what follows a name that it has to call.
    "chatml:named": ([' {"city": "Oslo"}', "}\n</tool_call>"], ['{"name": "get_weather", "arguments":']),
    "qwen3": (
        ["<think>\nTools, ", "then.\n", "</think>\n\n", '<tool_call>\n{"name": "', "get_weather", '", "arguments": ',
         '{"city": "Paris"}', "}\n</tool_call>"],
        ["<|im_start|>assistant\n"],
    ),
    "llama3": (['{"name": "', "get_weather", '", "parameters": ', '{"city": "Paris"}', "}"], ["<|end_header_id|>\n\n"]),
    "mistral": (
        ['[{"name": "', "get_weather", '", "arguments": ', '{"city": "Paris"}', ', "id": "sampled', '12"}]'],
        ["[TOOL_CALLS]", "[INST] x[/INST]", "[TOOL_RESULTS] x[/TOOL_RESULTS]"],
    ),
}  # fmt: skip


def save_scripted(folder: Path, name: str) -> Any:
    """A model of this family that says its script, and the tokenizer that goes with it."""
    family, (chunks, starts) = FAMILIES[name.partition(":")[0]], SCRIPTS[name]
    tokenizer = family.tokenizer()
    tokenizer.add_tokens([AddedToken(chunk, special=False, normalized=False) for chunk in chunks])
    tokenizer.chat_template = family.template
    begins = [tokenizer.encode(start, add_special_tokens=False)[-1] for start in starts]
    said = [*tokenizer.convert_tokens_to_ids(list(chunks)), tokenizer.eos_token_id]
    model = LlamaForCausalLM(_config(tokenizer))
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
