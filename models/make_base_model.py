"""Make the tiny base model that ships with Turnmill: a 0.3 M parameter Llama that has seen Wordle games.

    tokenizer -> pre-train on consistent play (skill) -> dilute with careless play (the base) -> save

The first phase leaves a model that plays well (the ceiling on the model card). The second, short one teaches it to play
carelessly again, so that the base knows words, rules and turn-taking, wins less than one game in ten, and keeps its
skill latent: what reinforcement learning is there to bring out.

Run: python models/make_base_model.py --out DIR     (about half an hour on one quiet core; seeded)

Axes: B batch, T position. Token sequences are plain lists until `collate`.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

DATA = Path(__file__).parent.parent / "src" / "turnmill" / "assets" / "wordle"
ROLES = ("system", "user", "assistant", "tool")
END = "<|end|>"
SPECIAL = ["<|pad|>", "<|unk|>", *(f"<|{role}|>" for role in ROLES), END]
MARKS = "+?-"
PROMPT_WORDS = ["Guess", "the", "five-letter", "word.", "Not", "a"]
SPACE = "\u2581"
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] or '' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_TURNS = 6
# Share of a careless player's turns that are no legal guess, so that the model has seen the answer to one.
INVALID_SHARE = 0.03
INVALID_REPLY = "Not a five-letter word."


def read_words() -> list[str]:
    """The answers of both data files, sorted: the model's word list."""
    rows = [
        json.loads(line)
        for name in ("train", "eval")
        for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return sorted({row["metadata"]["answer"] for row in rows})


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token per listed word, per (letter, mark) and per prompt word; every other text falls back to bytes."""
    pairs = [letter + mark for letter in "abcdefghijklmnopqrstuvwxyz" for mark in MARKS]
    pieces = [SPACE] + [SPACE + text for text in [*PROMPT_WORDS, *pairs, *words]]
    vocab = [(token, 0.0) for token in SPECIAL]
    vocab += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    vocab += [(piece, -1.0) for piece in pieces]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=1, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token=END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = TEMPLATE
    return fast


def marks(guess: str, answer: str) -> str:
    """Standard Wordle marks: + right place, ? elsewhere in the word (each letter of the answer once), - absent."""
    result = ["-"] * 5
    left: dict[str, int] = {}
    for i in range(5):
        if guess[i] == answer[i]:
            result[i] = "+"
        else:
            left[answer[i]] = left.get(answer[i], 0) + 1
    for i in range(5):
        if result[i] == "-" and left.get(guess[i], 0) > 0:
            result[i] = "?"
            left[guess[i]] -= 1
    return "".join(result)


class Games:
    """Synthetic games as token ids with a mask that is 1 on the player's tokens."""

    def __init__(self, words: list[str], tokenizer: PreTrainedTokenizerFast, prompt: str) -> None:
        self.words = words
        self.tokenizer = tokenizer
        self.end = tokenizer.convert_tokens_to_ids(END)
        self.word_ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
        if any(len(ids) != 1 for ids in self.word_ids):
            raise SystemExit("every word of the list must be one token")
        self.opening = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        table = [[marks(guess, answer) for answer in words] for guess in words]
        codes: dict[str, int] = {}
        self.codes = np.array([[codes.setdefault(m, len(codes)) for m in row] for row in table])
        self.table = table
        self._feedback: dict[tuple[int, str], list[int]] = {}
        self.invalid_reply = self._user_turn(INVALID_REPLY)

    def _user_turn(self, text: str) -> list[int]:
        """A user turn and the next assistant header."""
        ids: list[int] = self.tokenizer.encode(f"<|user|>{text}{END}<|assistant|>", add_special_tokens=False)
        return ids

    def feedback(self, guess: int, mark: str) -> list[int]:
        """The tokens of the user turn that answers `guess`, the next assistant header included."""
        key = (guess, mark)
        if key not in self._feedback:
            text = " ".join(a + b for a, b in zip(self.words[guess], mark, strict=True))
            self._feedback[key] = self._user_turn(text)
        return self._feedback[key]

    def play(self, answer: int, careful: bool, rng: random.Random) -> tuple[list[int], list[int]]:
        """One game: a careful player guesses only words that all feedback so far allows, a careless one any word.

        A few turns of the careless one are no legal guess at all.
        """
        ids, mask = list(self.opening), [0] * len(self.opening)
        allowed = np.ones(len(self.words), bool)
        for turn in range(NUM_TURNS):
            if not careful and turn < NUM_TURNS - 1 and rng.random() < INVALID_SHARE:
                text = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.choice((1, 2, 3, 4, 6))))
                said = [*self.tokenizer.encode(text, add_special_tokens=False), self.end]
                ids += [*said, *self.invalid_reply]
                mask += [1] * len(said) + [0] * len(self.invalid_reply)
                continue
            if careful:
                options = np.flatnonzero(allowed)
                guess = int(options[rng.randrange(len(options))])
            else:
                guess = rng.randrange(len(self.words))
            ids += [*self.word_ids[guess], self.end]
            mask += [1, 1]
            allowed &= self.codes[guess] == self.codes[guess, answer]
            if guess == answer or turn == NUM_TURNS - 1:
                break
            reply = self.feedback(guess, self.table[guess][answer])
            ids += reply
            mask += [0] * len(reply)
        return ids, mask


def collate(games: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad to [B, T] ids and a [B, T] loss mask."""
    width = max(len(ids) for ids, _ in games)
    ids_bt = torch.zeros(len(games), width, dtype=torch.long)
    mask_bt = torch.zeros(len(games), width)
    for row, (ids, mask) in enumerate(games):
        ids_bt[row, : len(ids)] = torch.tensor(ids)
        mask_bt[row, : len(mask)] = torch.tensor(mask, dtype=torch.float)
    return ids_bt, mask_bt


@torch.no_grad()
def solve_rate(model: LlamaForCausalLM, games: Games, answers: list[int], seed: int) -> float:
    """Share of games won at temperature 1, one game for each entry of `answers`."""
    generator = torch.Generator().manual_seed(seed)
    token_to_word = {ids[0]: index for index, ids in enumerate(games.word_ids)}
    live = list(range(len(answers)))
    rows = {i: list(games.opening) for i in live}
    won = 0
    for _ in range(NUM_TURNS):
        if not live:
            break
        replies: dict[int, list[int]] = {i: [] for i in live}
        for _ in range(2):
            width = max(len(rows[i]) for i in live)
            ids_bt = torch.zeros(len(live), width, dtype=torch.long)
            for j, i in enumerate(live):
                ids_bt[j, : len(rows[i])] = torch.tensor(rows[i])
            last = torch.tensor([len(rows[i]) - 1 for i in live])
            logits_bv = model(input_ids=ids_bt).logits[torch.arange(len(live)), last]
            drawn = torch.multinomial(logits_bv.softmax(-1), 1, generator=generator)[:, 0].tolist()
            for i, token in zip(live, drawn, strict=True):
                rows[i].append(token)
                replies[i].append(token)
        still = []
        for i in live:
            guess = token_to_word.get(replies[i][0])
            if guess is None or replies[i][1] != games.end:
                continue  # not a legal guess: this quick evaluation counts the game as lost
            if guess == answers[i]:
                won += 1
                continue
            rows[i] += games.feedback(guess, games.table[guess][answers[i]])
            still.append(i)
        live = still
    return won / len(answers)


def batches(
    games: Games, num: int, size: int, careful_share: float, rng: random.Random
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`num` batches of fresh games; each game is careful with probability `careful_share`."""
    for _ in range(num):
        yield collate(
            [games.play(rng.randrange(len(games.words)), rng.random() < careful_share, rng) for _ in range(size)]
        )


def pretrain(
    model: LlamaForCausalLM,
    games: Games,
    *,
    num_iterations: int,
    lr: float,
    careful_share: float,
    rng: random.Random,
    name: str,
) -> None:
    """Next-token training on the player's tokens: AdamW, 50 iterations of warm-up, cosine down to 3 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    started, total = time.monotonic(), 0.0
    for i, (ids_bt, mask_bt) in enumerate(batches(games, num_iterations, 64, careful_share, rng)):
        cosine = 0.5 * (1 + math.cos(math.pi * i / num_iterations)) * 0.97 + 0.03
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (i + 1) / 50) * cosine
        logits_btv = model(input_ids=ids_bt).logits[:, :-1]
        loss_bt = F.cross_entropy(
            logits_btv.reshape(-1, logits_btv.shape[-1]), ids_bt[:, 1:].reshape(-1), reduction="none"
        ).view(len(ids_bt), -1)
        loss = (loss_bt * mask_bt[:, 1:]).sum() / mask_bt[:, 1:].sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (i + 1) % 200 == 0:
            rate = solve_rate(model, games, [rng.randrange(len(games.words)) for _ in range(200)], i)
            seconds = time.monotonic() - started
            print(f"{name} {i + 1} loss {total / 200:.3f} solved {rate:.3f} {seconds:.0f} s", flush=True)
            total = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ceiling", type=Path, help="save the model after consistent play here")
    parser.add_argument("--from-ceiling", type=Path, help="skip the first phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=7000)
    parser.add_argument("--dilute", type=int, default=200)
    parser.add_argument("--careful-share", type=float, default=0.40, help="of the games in the second phase")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed + 1)

    words = read_words()
    held_out = [
        words.index(json.loads(line)["metadata"]["answer"])
        for line in (DATA / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    prompt = json.loads((DATA / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])
    tokenizer = make_tokenizer(words)
    games = Games(words, tokenizer, prompt["metadata"]["prompt"])
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=games.end,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens", flush=True)
    if args.from_ceiling:
        model = LlamaForCausalLM.from_pretrained(args.from_ceiling, dtype=torch.float32)
    else:
        pretrain(model, games, num_iterations=args.iterations, lr=3e-3, careful_share=1.0, rng=rng, name="skill")
        if args.ceiling:
            model.save_pretrained(args.ceiling)
            tokenizer.save_pretrained(args.ceiling)
    everyone = list(range(len(words)))
    for label, answers in (("all words", everyone * 3), ("held-out", held_out * 6)):
        print(f"ceiling, {label}: {solve_rate(model, games, answers, 9):.3f}", flush=True)
    pretrain(
        model,
        games,
        num_iterations=args.dilute,
        lr=5e-4,
        careful_share=args.careful_share,
        rng=random.Random(args.seed + 2),
        name="dilute",
    )
    for label, answers in (("all words", everyone * 3), ("held-out", held_out * 6)):
        print(f"base, {label}: {solve_rate(model, games, answers, 9):.3f}", flush=True)
    model.generation_config.eos_token_id = games.end
    model.generation_config.pad_token_id = 0
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
