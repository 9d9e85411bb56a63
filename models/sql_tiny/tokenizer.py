"""The tokenizer and the chat template: every word of the task is one token, and every other text is spelled in bytes.

Template: ChatML with calls and results as Hermes and Qwen write them; a tool is listed by its name and parameters only,
since a tiny model reads no descriptions.
"""

from pathlib import Path

from sql_agent.tasks import DOMAINS, NAME_COLUMNS, NUMBERS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not special: they are text of a reply, from which calls are read.
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
MAX_LENGTH = 1024
# The environment's tools, and what the argument of each is called.
ARGUMENTS = {"list_tables": None, "describe_table": "table", "run_sql": "query", "answer": "value"}


def pieces() -> list[str]:
    """What is one token. Spaces belong to the words of the language around, so a name is the same token everywhere."""
    around = ["system\n", "user\n", "assistant\n", "Tools: ", "(", "), ", "(), ", ")", "\n", ", "]
    calls = ['\n{"name": "', '", "arguments":', ' {"table": "', ' {"query": "', ' {"value": "', '"}}\n', " {}}\n"]
    sql = ["SELECT ", "COUNT(*)", " FROM ", " WHERE ", " = '", "'", " ORDER BY ", " DESC LIMIT 1", " ASC LIMIT 1"]
    questions = ["What is the ", " of ", "?", "How many ", " have ", " ", "Which ", " has the ", "highest ", "lowest "]
    told = ["error: ", "no such table: ", "no such column: ", "call a tool", "no rows", "done", " | "]
    names = [*ARGUMENTS, *(argument for argument in ARGUMENTS.values() if argument)]
    words = [*NAME_COLUMNS, *map(str, NUMBERS), *map(str, range(10))]
    for domain in DOMAINS:
        words += [domain.singular, domain.plural, *domain.tables, *domain.number.columns, *domain.kind.columns]
        words += [*domain.entities, *domain.kinds]
    return list(dict.fromkeys([*around, *calls, *sql, *questions, *told, *names, *words]))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Pieces, and each byte for all other text: the fewest tokens that spell a text, and any text is spelled."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = [as_bytes.pre_tokenize_str(piece)[0][0] for piece in pieces()]
    vocab = [(PAD, 0.0), (START, 0.0), (END, 0.0), *((tag, 0.0) for tag in TAGS)]
    vocab += [(byte, -10.0) for byte in alphabet]
    vocab += [(piece, -1.0) for piece in spelled if len(piece) > 1]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = as_bytes
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8").rstrip("\n")
    return fast
