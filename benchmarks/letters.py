"""A language model that spells, made in seconds: a Llama of 1.06 M parameters with one token a letter.

    make_model(folder)   a Hugging Face folder: weights, tokenizer, chat template

The tokenizer has one token for each character, and one for each role and for the end of a turn, as the shipped model's.
A guess is five letters and the end of the turn, so a turn samples six tokens; marks alone are told, which makes eight
observed ones. The model is warmed up on spelled words at random: an untrained one hits a right place once in 120 tries,
and groups in which nobody did have no signal. It costs the same afterwards, six tokens a turn, and has learned no play.
"""

import random
import string
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.llama import small_llama
from turnmill import assets
from turnmill.environment.wordle import marks
from turnmill.intake.dataset import read_tasks

PAD, UNKNOWN, END = "<|pad|>", "<|unk|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Five letters and the end of the turn.
NEW_TOKENS = 6
TURNS = 6
# Of the warm-up: until nearly every reply is five letters and an end.
_STEPS, _GAMES, _LR = 80, 8, 3e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable ASCII character; every other character is unknown."""
    characters = sorted(set(string.printable) - set("\t\r\v\f"))
    vocabulary = {token: number for number, token in enumerate([PAD, UNKNOWN, *ROLES, END, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    spelling = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    spelling.chat_template = TEMPLATE
    return spelling


def make_model(folder: Path) -> Path:
    """The warmed-up model; the same bytes each time on one kind of machine."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    vocab_size = (len(tokenizer) + 7) // 8 * 8
    shape = small_llama(vocab_size, end_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id)
    model = LlamaForCausalLM(shape)
    _warm_up(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _warm_up(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Teach the form of a reply, and which letters words have at which place."""
    rng = random.Random(0)
    tasks = read_tasks(assets.wordle_data("train"))
    words = [str(task.metadata["answer"]) for task in tasks]
    opening = tokenizer.encode(f"<|user|>{tasks[0].metadata['prompt']}{END}<|assistant|>", add_special_tokens=False)
    # Roles, marks and the opening are given, letters and ends are learned.
    observed = len("+?-+?") + 3
    mask = torch.tensor([0] * len(opening) + ([1] * NEW_TOKENS + [0] * observed) * (TURNS - 1) + [1] * NEW_TOKENS)
    is_said = mask[1:] == 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    for _ in range(_STEPS):
        games = [_game(words, rng) for _ in range(_GAMES)]
        # [games, tokens]: all are equally long.
        ids = torch.tensor([opening + tokenizer.encode(game, add_special_tokens=False) for game in games])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits[:, is_said].flatten(0, 1), ids[:, 1:][:, is_said].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _game(words: list[str], rng: random.Random) -> str:
    """Six words at random, and what is told about each but the last."""
    answer, *guesses = rng.choices(words, k=TURNS + 1)
    told = [f"<|user|>{marks(guess, answer)}{END}<|assistant|>" for guess in guesses[:-1]]
    return "".join(f"{guess}{END}{then}" for guess, then in zip(guesses, [*told, ""], strict=True))
