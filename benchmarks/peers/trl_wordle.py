"""Multi-turn Wordle on TRL's GRPOTrainer, on the CPU; runs in the peers' environment.

    trl_wordle.py --model FOLDER --data train.jsonl [--full-turns [--spelled]] [--kv-cache] [--target 0.6]

Same words, prompt, marks, stop rule, reward, loss, optimizer and schedule as our demo. `--full-turns` plays all turns
and rewards the mean share of right places, so that every conversation costs the same and nearly every group has signal;
`--spelled` takes the first five characters of a reply for the guess, and tells the marks alone. Without `--kv-cache`
each turn is a call of `generate` on the whole conversation, as the library's multi-turn examples do; with it the keys
and values of earlier turns are kept. Prints a summary line, and before it one JSON line a step where there is a target.

Nothing that TRL can leave out is left in: no reference model (beta 0), no log-probabilities of an older policy (one
update a generation), no gradient checkpointing, no reports, metrics gathered once unless each step is watched.
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, TrainerCallback

NUM_TURNS = 6
# Steps whose mean reward is compared with the target.
WINDOW = 10


class Game:
    """One conversation: tokens so far, which of them were sampled, and how it stands."""

    def __init__(self, answer: str, opening: list[int], *, spelled: bool) -> None:
        self.answer = answer
        self.opening = opening
        self.spelled = spelled
        self.completion: list[int] = []
        self.mask: list[int] = []
        # Right places, all turns together.
        self.right = 0
        self.solved = False

    def add(self, ids: list[int], sampled: int) -> None:
        self.completion += ids
        self.mask += [sampled] * len(ids)

    def answer_to(self, text: str) -> str:
        """What the player is told about a guess."""
        guess = text.strip().lower()
        if self.spelled:
            guess = guess[:5].ljust(5, ".")
        elif len(guess) != 5 or not (guess.isascii() and guess.isalpha()):
            return "Not a five-letter word."
        left = Counter(a for g, a in zip(guess, self.answer, strict=True) if g != a)
        marks = ""
        for letter, place in zip(guess, self.answer, strict=True):
            mark = "+" if letter == place else "?" if left[letter] > 0 else "-"
            left[letter] -= mark == "?"
            marks += mark
        self.right += marks.count("+")
        self.solved = self.solved or guess == self.answer
        return marks if self.spelled else " ".join(map("".join, zip(guess, marks, strict=True)))


class Recomputing:
    """Samples a turn with `generate` on the whole conversations."""

    def __init__(self, model: Any, pad: int, end: int, max_new: int) -> None:
        self.model, self.pad, self.end = model, pad, end
        self.settings = GenerationConfig(
            max_new_tokens=max_new, do_sample=True, top_k=0, top_p=1.0, eos_token_id=end, pad_token_id=pad
        )

    def reply(self, games: list[Game]) -> list[list[int]]:
        paths = [game.opening + game.completion for game in games]
        width = max(map(len, paths))
        ids = torch.tensor([[self.pad] * (width - len(path)) + path for path in paths])
        real = torch.tensor([[0] * (width - len(path)) + [1] * len(path) for path in paths])
        out = self.model.generate(input_ids=ids, attention_mask=real, generation_config=self.settings)
        return [_until_end(row, self.end) for row in out[:, width:].tolist()]


class Caching:
    """Samples a turn on the keys and values of the earlier ones; columns that a row does not use are masked for it."""

    def __init__(self, model: Any, pad: int, end: int, max_new: int) -> None:
        self.model, self.pad, self.end, self.max_new = model, pad, end, max_new
        self.cache: Any = DynamicCache()
        self.real = torch.zeros(0, 0, dtype=torch.long)
        self.games: list[Game] = []
        # Tokens of each game's path that are in the cache.
        self.held: list[int] = []

    def reply(self, games: list[Game]) -> list[list[int]]:
        self._keep(games)
        feeds = [(g.opening + g.completion)[held:] for g, held in zip(games, self.held, strict=True)]
        width = max(map(len, feeds))
        logits = self._feed(
            torch.tensor([[self.pad] * (width - len(feed)) + feed for feed in feeds]),
            torch.tensor([[0] * (width - len(feed)) + [1] * len(feed) for feed in feeds]),
        )
        replies: list[list[int]] = [[] for _ in games]
        is_open = [True] * len(games)
        for count in range(self.max_new):
            tokens = torch.multinomial(torch.softmax(logits, dim=-1), 1)
            for row, token in enumerate(tokens[:, 0].tolist()):
                if is_open[row]:
                    replies[row].append(token)
                    is_open[row] = token != self.end and count + 1 < self.max_new
            if not any(is_open):
                break
            logits = self._feed(tokens, torch.tensor(is_open, dtype=torch.long)[:, None])
        return replies

    def _keep(self, games: list[Game]) -> None:
        """Begin with these games, or drop the rows of those that ended."""
        if not self.games:
            self.real = torch.zeros(len(games), 0, dtype=torch.long)
            self.held = [0] * len(games)
        elif len(games) < len(self.games):
            rows = [self.games.index(game) for game in games]
            self.cache.batch_select_indices(torch.tensor(rows))
            self.real = self.real[rows]
            self.held = [self.held[row] for row in rows]
        self.games = list(games)

    def _feed(self, ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        self.real = torch.cat([self.real, real], dim=1)
        self.held = [held + num for held, num in zip(self.held, real.sum(1).tolist(), strict=True)]
        positions = (self.real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            input_ids=ids,
            attention_mask=self.real,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = out.logits[:, -1]
        return logits


def _until_end(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


class Rollouts:
    """TRL's rollout function: prompts (the number of a task in front of its text) in, whole conversations out."""

    def __init__(self, args: argparse.Namespace, tokenizer: Any, answers: list[str]) -> None:
        self.args, self.tokenizer, self.answers = args, tokenizer, answers
        self.end: int = tokenizer.convert_tokens_to_ids("<|end|>")
        self.seconds = 0.0
        self.turns = 0
        self.conversations = 0
        # Of all conversations, prompt included.
        self.tokens = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        begun = time.perf_counter()
        model = trainer.accelerator.unwrap_model(trainer.model)
        games = []
        for prompt in prompts:
            number, text = prompt.split("|", 1)
            opening = self._encode(f"<|user|>{text}<|end|><|assistant|>")
            games.append(Game(self.answers[int(number)], opening, spelled=self.args.spelled))
        sampler_of = Caching if self.args.kv_cache else Recomputing
        sampler = sampler_of(model, self.tokenizer.pad_token_id, self.end, self.args.max_new)
        model.eval()
        with torch.no_grad():
            self._play(games, sampler)
        model.train()
        self.seconds += time.perf_counter() - begun
        self.conversations += len(games)
        self.tokens += sum(len(game.opening) + len(game.completion) for game in games)
        full = self.args.full_turns
        return {
            "prompt_ids": [game.opening for game in games],
            "completion_ids": [game.completion for game in games],
            "logprobs": None,
            "env_mask": [game.mask for game in games],
            "score": [game.right / (5 * NUM_TURNS) if full else float(game.solved) for game in games],
        }

    def _play(self, games: list[Game], sampler: Recomputing | Caching) -> None:
        for turn in range(NUM_TURNS):
            live = [game for game in games if self.args.full_turns or not game.solved]
            if not live:
                return
            for game, ids in zip(live, sampler.reply(live), strict=True):
                game.add(ids, 1)
                self.turns += 1
                told = game.answer_to(self.tokenizer.decode(ids, skip_special_tokens=True))
                if turn + 1 < NUM_TURNS and (self.args.full_turns or not game.solved):
                    ended = "" if ids[-1] == self.end else "<|end|>"
                    game.add(self._encode(f"{ended}<|user|>{told}<|end|><|assistant|>"), 0)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


class Watch(TrainerCallback):
    """Prints each step, and ends the training once the mean reward of the last steps reaches the target."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.begun = time.perf_counter()
        self.ends: list[float] = []
        self.rewards: deque[float] = deque(maxlen=WINDOW)
        self.seconds_to_target: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter() - self.begun)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> Any:
        if not logs or "reward" not in logs:
            return control
        self.rewards.append(logs["reward"])
        seconds = time.perf_counter() - self.begun
        print(json.dumps({"step": state.global_step, "reward": logs["reward"], "seconds": seconds}), flush=True)
        is_full = len(self.rewards) == WINDOW
        if self.target and is_full and fmean(self.rewards) >= self.target and self.seconds_to_target is None:
            self.seconds_to_target = seconds
            control.should_training_stop = True
        return control


def reward(prompts: Any, completions: Any, score: list[float], **_: Any) -> list[float]:
    """What the rollout function computed."""
    return score


def settings(args: argparse.Namespace, folder: str) -> Any:
    """What our recipe says, in TRL's names."""
    linear: dict[str, Any] = {
        "lr_scheduler_type": "polynomial",
        "lr_scheduler_kwargs": {"lr_end": args.min_lr, "power": 1.0},
    }
    return trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=args.conversations,
        num_generations=8,
        max_completion_length=256,
        max_steps=args.steps,
        learning_rate=args.lr,
        # The polynomial schedule refuses an end that is not below its begin.
        **({"lr_scheduler_type": "constant"} if args.lr == args.min_lr else linear),
        warmup_steps=0,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        logging_steps=1 if args.target else args.steps,
        save_strategy="no",
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=args.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--min-lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=float, default=0.0)
    parser.add_argument("--max-new", type=int, default=8)
    parser.add_argument("--full-turns", action="store_true")
    parser.add_argument("--spelled", action="store_true")
    parser.add_argument("--kv-cache", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, local_files_only=True)
    rows = [json.loads(line)["metadata"] for line in args.data.read_text().splitlines()]
    rollouts = Rollouts(args, tokenizer, [row["answer"] for row in rows])
    watch = Watch(args.target)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model,
            args=settings(args, folder),
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": f"{i}|{row['prompt']}"} for i, row in enumerate(rows)]),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[watch],
        )
        trainer.train()
    # The first two steps warm up.
    first = min(2, len(watch.ends) - 1)
    steady = watch.ends[-1] - watch.ends[first - 1] if first else watch.ends[-1]
    summary = {
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
        "steps": len(watch.ends),
        "conversations_per_s": (len(watch.ends) - first) * args.conversations / steady,
        "turns_per_conversation": rollouts.turns / rollouts.conversations,
        "tokens_per_conversation": rollouts.tokens / rollouts.conversations,
        "generation_share": rollouts.seconds / watch.ends[-1],
        "reward_last": fmean(watch.rewards),
        "seconds_to_target": watch.seconds_to_target,
        "seconds": watch.ends[-1],
    }
    print(json.dumps(summary), flush=True)


if __name__ == "__main__":
    main()
