"""Make the tiny base model of the `sql-agent` example: a Llama that has seen an agent use tools on a database.

    tokenizer -> pre-train on skilled play (skill) -> dilute with careless play (the base) -> measure -> card

The first phase leaves a model that plays well (the ceiling on the model card). The second, short one teaches it to play
carelessly again, so that the base knows tools, SQL and turn-taking and keeps its skill latent: what reinforcement
learning is there to bring out.

Run: PYTHONPATH=custom-environments/sql-agent python -m models.make_sql_model --ceiling DIR --out DIR
(about a quarter of an hour on one quiet core; seeded)

Axes: B batch, T position, N trained tokens, V vocabulary, D hidden size.
"""

import argparse
import itertools
import math
import random
import shutil
import time
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from sql_agent import SqlAgent
from sql_agent.tasks import make_question
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.in_process import ModelPlayer, describe
from models.sql_tiny.play import Scripts
from models.sql_tiny.tokenizer import MAX_LENGTH, make_tokenizer
from turnmill.intake.dataset import read_tasks

PARTS = Path(__file__).parent / "sql_tiny"
DATA = Path(__file__).parent.parent / "custom-environments" / "sql-agent" / "data"
BATCH = 64
# Conversations of a figure on the card.
NUM_ROLLOUTS = 576
# Careless turns in the first phase, which the model is shown and does not learn: there is something to recover from.
SLIP_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What is learned in one go."""

    name: str
    num_iterations: int
    # At its highest.
    lr: float
    # Of the turns.
    careless_share: float
    # Or is only shown them.
    learns_careless: bool = False


def collate(plays: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-pad to [B, T] ids and a [B, T] mask."""
    width = max(len(ids) for ids, _ in plays)
    ids_bt = torch.zeros(len(plays), width, dtype=torch.long)
    mask_bt = torch.zeros(len(plays), width, dtype=torch.bool)
    for row, (ids, mask) in enumerate(plays):
        ids_bt[row, : len(ids)] = torch.tensor(ids)
        mask_bt[row, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
    return ids_bt, mask_bt


def token_loss(model: LlamaForCausalLM, ids_bt: torch.Tensor, mask_bt: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss on the agent's tokens; only these meet the output layer."""
    hidden_btd = model.model(input_ids=ids_bt[:, :-1], use_cache=False).last_hidden_state
    wanted_bt = mask_bt[:, 1:]
    logits_nv = model.lm_head(hidden_btd[wanted_bt])
    return F.cross_entropy(logits_nv, ids_bt[:, 1:][wanted_bt])


def pretrain(model: LlamaForCausalLM, scripts: Scripts, phase: Phase, rng: random.Random) -> None:
    """AdamW, 50 iterations of warm-up, cosine down to 3 %."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started, total = time.monotonic(), 0.0
    for i in range(phase.num_iterations):
        plays = [
            scripts.play(
                make_question(rng), rng, careless_share=phase.careless_share, learns_careless=phase.learns_careless
            )
            for _ in range(BATCH)
        ]
        cosine = 0.5 * (1 + math.cos(math.pi * i / phase.num_iterations)) * 0.97 + 0.03
        for group in optimizer.param_groups:
            group["lr"] = phase.lr * min(1.0, (i + 1) / 50) * cosine
        loss = token_loss(model, *collate(plays))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total += loss.item()
        if (i + 1) % 100 == 0:
            print(f"{phase.name} {i + 1} loss {total / 100:.3f} {time.monotonic() - started:.0f} s", flush=True)
            total = 0.0


def measure(folder: Path) -> dict[str, str]:
    """Reward and share solved of the model in a folder, on both data files, as cells of the card's table."""
    player = ModelPlayer(folder, max_length=recipe()["max_length"], max_new_tokens=recipe()["max_new_tokens"])
    cells = {}
    for part in ("train", "eval"):
        tasks = itertools.cycle(read_tasks(DATA / f"{part}.jsonl"))
        results = player.play(SqlAgent(), list(itertools.islice(tasks, NUM_ROLLOUTS)), seed=part)
        print(f"{folder.name}, {part}: {describe(results)}", flush=True)
        rewards = [result.reward or 0.0 for result in results]
        cells[part] = f"{fmean(rewards):.2f} | {fmean(reward == 1.0 for reward in rewards):.2f}"
    return cells


def recipe() -> dict[str, Any]:
    """What is written beside the model: it is measured within the lengths that it is trained with."""
    return tomllib.loads((PARTS / "recipe.toml").read_text(encoding="utf-8"))


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=(len(tokenizer) + 7) // 8 * 8,
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ceiling", type=Path, required=True, help="save the model after skilled play here")
    parser.add_argument("--from-ceiling", action="store_true", help="the first phase was made: it lies there")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=1600)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--dilute", type=int, default=100)
    parser.add_argument("--dilute-lr", type=float, default=5e-4)
    parser.add_argument("--careless-share", type=float, default=0.45, help="of the turns in the second phase")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    scripts = Scripts(tokenizer)
    if args.from_ceiling:
        model = LlamaForCausalLM.from_pretrained(args.ceiling, dtype=torch.float32)
    else:
        model = new_model(tokenizer)
        first = Phase(name="skill", num_iterations=args.iterations, lr=args.lr, careless_share=SLIP_SHARE)
        pretrain(model, scripts, first, random.Random(args.seed + 1))
        save(model, tokenizer, args.ceiling)
    second = Phase(name="dilute", num_iterations=args.dilute, lr=args.dilute_lr, careless_share=args.careless_share)
    pretrain(model, scripts, replace(second, learns_careless=True), random.Random(args.seed + 2))
    save(model, tokenizer, args.out)
    shutil.copyfile(PARTS / "recipe.toml", args.out / "recipe.toml")
    ceiling, base = measure(args.ceiling), measure(args.out)
    card = (PARTS / "card.md").read_text(encoding="utf-8")
    config = model.config
    text = card.format(
        parameters=f"{sum(parameter.numel() for parameter in model.parameters()):,}".replace(",", " "),
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        tokens=len(tokenizer),
        minutes=(time.monotonic() - started) / 60,
        batch=BATCH,
        slips=SLIP_SHARE,
        rollouts=NUM_ROLLOUTS,
        careless=args.careless_share,
        ceiling_train=ceiling["train"],
        ceiling_eval=ceiling["eval"],
        base_train=base["train"],
        base_eval=base["eval"],
        **vars(args),
    )
    (args.out / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
