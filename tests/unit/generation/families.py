"""Tokenizers and chat templates of the families of open models, made here: what the public ones do, in small.

Each of `FAMILIES` has the template of its family and a tokenizer of the kind that goes with it, whose vocabulary is
learned from a few lines of such conversations.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from turnmill.generation.renderer import Renderer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}
TOOLS = [WEATHER, ADD]

CORPUS = [
    "What is the weather in Paris? It is 20 degrees in Paris, and 15 degrees in Oslo today.",
    'You may call functions. {"type": "function", "function": {"name": "get_weather", "description": "The weather"}}',
    '{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}',
    '{"name": "add", "parameters": {"a": 1, "b": 2}} assistant user system tool ipython response call think',
    json.dumps(TOOLS),
    json.dumps(TOOLS, indent=4),
    "Let me see what the tools say. The answer is 3.\n\nThank you.\n",
] * 4

# ---------------------------------------------------------------- ChatML, with tools as Hermes and Qwen 2.5 have them

_CHATML_TOOLS = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You help.' }}{%- endif %}
{{- '\n\n# Tools\n\nYou may call functions.\n<tools>' }}
{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\n\nReturn each call as {"name": ..., "arguments": ...} in <tool_call></tool_call>.<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
"""
_CHATML_CALLS = """
{%- for call in m.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{%- if (loop.first and text) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
"""
# Neighbouring answers of tools are one user's turn.
_CHATML_ANSWERS = """
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
"""
_CHATML_END = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
CHATML = (
    _CHATML_TOOLS
    + "{%- for m in messages %}"
    + "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    + "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    + "{%- elif m.role == 'assistant' %}"
    + "{%- set text = m.content %}{{- '<|im_start|>assistant\n' + text }}{%- if m.tool_calls %}"
    + _CHATML_CALLS
    + "{%- endif %}{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
    + _CHATML_ANSWERS
    + "{%- endif %}{%- endfor %}"
    + _CHATML_END
)

# ---------------------------------------------------------------- Qwen 3: thoughts are shown since the last question

QWEN3 = (
    _CHATML_TOOLS
    + """
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for m in messages[::-1] %}
{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and m.role == 'user' and not
    (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.searching = false %}{%- set ns.last_query = index %}
{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set text = m.content %}
{%- set thoughts = '' %}
{%- if m.reasoning_content is string %}
{%- set thoughts = m.reasoning_content %}
{%- elif '</think>' in text %}
{%- set thoughts = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set text = text.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}
{%- else %}
{{- text }}
{%- endif %}
{%- if m.tool_calls %}
"""
    + _CHATML_CALLS
    + "{%- endif %}{{- '<|im_end|>\n' }}{%- elif m.role == 'tool' %}"
    + _CHATML_ANSWERS
    + "{%- endif %}{%- endfor %}"
    + _CHATML_END
)

# ---------------------------------------------------------------- Llama 3.1: one call a reply, tools in the question

_LLAMA3_BEGIN = """
{{- bos_token }}
{%- set date = '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}
{{- 'Today Date: ' + date + '\n\n' + system + '<|eot_id|>' }}
{%- if tools is not none %}
{%- set question = messages[0].content | trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a function call, ' }}
{{- '{"name": function name, "parameters": dictionary of arguments}.\n\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\n\n' }}{%- endfor %}
{{- question + '<|eot_id|>' }}
{%- endif %}
"""
_LLAMA3_TURNS = """
{%- for m in messages %}
{%- if m.role in ('tool', 'ipython') %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
{%- if m.content is mapping %}{{- m.content | tojson }}{%- else %}{{- m.content }}{%- endif %}
{{- '<|eot_id|>' }}
{%- elif m.tool_calls %}
CHECK
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- for call in m.tool_calls %}
{%- if not loop.first %}{{- '; ' }}{%- endif %}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + '}' }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""
# The published template refuses several calls.
LLAMA3 = _LLAMA3_BEGIN + _LLAMA3_TURNS.replace(
    "CHECK", "{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls') }}{%- endif %}"
)
# As fine-tunes have it that call several tools at once.
LLAMA3_PARALLEL = _LLAMA3_BEGIN + _LLAMA3_TURNS.replace("CHECK", "")

# ---------------------------------------------------------------- Mistral: tools in front of the last question

MISTRAL = """
{%- set user_messages = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}
{%- if (m.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools is not none and m == user_messages[-1] %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined %}
{{- '[TOOL_CALLS] [' }}
{%- for call in m.tool_calls %}
{%- set out = call.function | tojson %}
{{- out[:-1] }}
{%- if call.id is not defined or call.id | length != 9 %}
{{- raise_exception('ids of tool calls have nine characters') }}{%- endif %}
{{- ', "id": "' + call.id + '"}' }}
{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
{%- endfor %}
{%- elif m.role == 'assistant' %}
{{- ' ' + m.content | trim + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('ids of tool calls have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | string + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('unknown role ' + m.role) }}
{%- endif %}
{%- endfor %}
"""

# ---------------------------------------------------------------- others, for the ways in which calls are written

# A name outside of the object, and arguments that have to be text: as DeepSeek's do.
NAME_OUTSIDE = (
    "{{- bos_token }}{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|User|>' + m.content }}"
    "{%- elif m.role == 'tool' %}{{- '<|output|>' + m.content + '<|/output|>' }}"
    "{%- else %}{{- '<|Assistant|>' + m.content }}{%- if m.tool_calls %}{{- '<|calls|>' }}"
    "{%- for call in m.tool_calls %}{%- if not loop.first %}{{- '\n' }}{%- endif %}"
    "{{- '<|call|>function<|sep|>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```<|/call|>' }}"
    "{%- endfor %}{{- '<|/calls|>' }}{%- endif %}{{- eos_token }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}"
)
# Each argument by itself, as Qwen 3 Coder's and its successors do.
XML = CHATML.replace(
    _CHATML_CALLS,
    """
{%- for call in m.tool_calls %}
{%- if (loop.first and text) or not loop.first %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for key, value in call.function.arguments | items %}
{{- '<parameter=' + key + '>\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{- value | tojson }}
{%- else %}{{- value | string }}{%- endif %}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
""",
)
# Calls as Python has them, which nothing here can read.
PYTHONIC = CHATML.replace(
    _CHATML_CALLS,
    "{{- '[' }}{%- for call in m.tool_calls %}{{- call.function.name + '(' }}"
    "{%- for key, value in call.function.arguments | items %}{{- key + '=' + value | tojson }}{%- endfor %}"
    "{{- ')' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}",
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A template and what its tokenizer is made of."""

    template: str
    # Special tokens, the one that ends a turn first, and the one that begins a text (None: there is none).
    specials: tuple[str, ...]
    bos: str | None = None
    # Tokens that are shown when text is decoded.
    added: tuple[str, ...] = ()
    is_metaspace: bool = False

    def tokenizer(self) -> Any:
        make = _metaspace if self.is_metaspace else _byte_level
        tokenizer = make(self.specials)
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in self.added])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token=self.specials[0],
            bos_token=self.bos,
            additional_special_tokens=list(self.specials[1:]),
            clean_up_tokenization_spaces=False,
            model_max_length=4096,
        )
        fast.chat_template = self.template
        return fast

    def save(self, folder: Path) -> Any:
        tokenizer = self.tokenizer()
        tokenizer.save_pretrained(folder)
        return tokenizer

    def renderer(self, folder: Path) -> Renderer:
        self.save(folder)
        return Renderer(folder)


def _byte_level(specials: tuple[str, ...]) -> Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metaspace(specials: tuple[str, ...]) -> Tokenizer:
    """As Llama 2's and Mistral's: a space is put in front of each text, and what is unknown is spelled in bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*specials, "<unk>"], max_token_length=8, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    vocab = made["model"]["vocab"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    return Tokenizer.from_str(json.dumps(made))


_CHATML_TOKENS: dict[str, Any] = {
    "specials": ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    "added": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
}
_LLAMA3_TOKENS: dict[str, Any] = {
    "specials": (
        "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"
    ),
    "bos": "<|begin_of_text|>",
}  # fmt: skip
_MISTRAL_TOKENS: dict[str, Any] = {
    "specials": (
        "</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]", "[/TOOL_RESULTS]"
    ),
    "bos": "<s>",
    "is_metaspace": True,
}  # fmt: skip
_OTHER_TOKENS: dict[str, Any] = {
    "specials": (
        "<|end|>", "<|begin|>", "<|User|>", "<|Assistant|>", "<|calls|>", "<|/calls|>", "<|call|>", "<|/call|>",
        "<|sep|>", "<|output|>", "<|/output|>"
    ),
    "bos": "<|begin|>",
}  # fmt: skip

FAMILIES = {
    "chatml": Family(template=CHATML, **_CHATML_TOKENS),
    "qwen3": Family(template=QWEN3, **_CHATML_TOKENS),
    # Its prompt has begun thoughts.
    "qwen3-thinking": Family(
        template=QWEN3.replace(_CHATML_END, _CHATML_END.replace("assistant\n'", "assistant\n<think>\n'")),
        **_CHATML_TOKENS,
    ),
    "llama3": Family(template=LLAMA3, **_LLAMA3_TOKENS),
    "llama3-parallel": Family(template=LLAMA3_PARALLEL, **_LLAMA3_TOKENS),
    "mistral": Family(template=MISTRAL, **_MISTRAL_TOKENS),
    "name-outside": Family(template=NAME_OUTSIDE, **_OTHER_TOKENS),
    "xml": Family(template=XML, **_CHATML_TOKENS),
    "pythonic": Family(template=PYTHONIC, **_CHATML_TOKENS),
}

MakeRenderer = Callable[[str], Renderer]
