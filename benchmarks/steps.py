"""Optimizer steps to measure: ours, and the step that one would write down first. For `benchmarks.training`.

The plain one pads the whole batch to its longest row, takes logits over everything, and lets AdamW loop over the
parameters, which is what trainers do that know nothing about the rows. Both get the same rows, log-probs and rewards.

Axes: B rows, T positions.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.llama import small_llama
from turnmill import assets
from turnmill.config import Config, load_config
from turnmill.training.algorithms.advantages import group_based
from turnmill.training.samples import Row, Span, TrainingSample
from turnmill.training.trainer import Trainer

GROUP = 8
# So small that the weights, and with them the log-probs, stay what they are.
LR = 1e-12
# Turns of each of the 64 conversations of a step of `make demo`, most of which use up all six.
DEMO_TURNS = [3] * 3 + [4] * 2 + [5] + [6] * 58


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the rows of a step."""

    name: str
    folder: Path
    config: Config
    groups: list[list[TrainingSample]]

    @property
    def rows(self) -> list[Row]:
        return [row for group in self.groups for sample in group for row in sample.rows]

    @property
    def num_trained(self) -> int:
        return sum(row.num_trained for row in self.rows)

    @property
    def padding_of_one_batch(self) -> float:
        """Share of padding where all rows are as long as the longest."""
        lengths = [len(row.token_ids) for row in self.rows]
        return 1 - sum(lengths) / (len(lengths) * max(lengths))


def demo_case() -> Case:
    """The shipped model and rows as the demo trains them: 7 tokens of prompt, then 2 sampled and 8 observed a turn."""
    folder = assets.model_folder("wordle-tiny")
    recipe = load_config(recipe=folder / "recipe.toml", flags={"lr": LR, "min_lr": LR}).config
    groups = _groups(folder, DEMO_TURNS, vocabulary=552, opening=7, sampled=2, observed=8)
    return Case(name="wordle-tiny (0.29 M), rows of the demo", folder=folder, config=recipe, groups=groups)


def llama_case(folder: Path) -> Case:
    """A random Llama of a million parameters, 64 rows of 6 turns with 6 tokens sampled and about 24 observed."""
    torch.manual_seed(0)
    LlamaForCausalLM(small_llama(112, pad_id=0)).save_pretrained(folder)
    groups = _groups(folder, [6] * 64, vocabulary=112, opening=24, sampled=6, observed=24, jitter=4)
    ours = Config(lr=LR, min_lr=LR, ent_coeff=0.0)
    return Case(name="random Llama (1.06 M), 6 turns x (6 + 24)", folder=folder, config=ours, groups=groups)


def _groups(
    folder: Path, turns: Sequence[int], *, vocabulary: int, opening: int, sampled: int, observed: int, jitter: int = 0
) -> list[list[TrainingSample]]:
    """Random conversations, the first of each group rewarded, with the log-probs that the model gives."""
    rng = random.Random(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    samples: list[TrainingSample] = []
    for index, num_turns in enumerate(rng.sample(list(turns), len(turns))):
        mask = [0] * (opening + rng.randint(-jitter, jitter))
        for turn in range(num_turns):
            last = turn + 1 == num_turns
            mask += [1] * sampled + [0] * (0 if last else observed + rng.randint(-jitter, jitter))
        ids = [rng.randrange(7, vocabulary) for _ in mask]
        with torch.no_grad():
            log_p_tv = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        row = Row(
            key=f"row-{index}",
            token_ids=ids,
            loss_mask=mask,
            logprobs=[float(log_p_tv[t - 1, ids[t]]) if m else 0.0 for t, m in enumerate(mask)],
            temperatures=[1.0] * len(ids),
            spans=(Span(call_id=f"call-{index}", start=0, end=len(ids), version="0.0"),),
        )
        samples.append(TrainingSample(key=row.key, reward=float(index % GROUP == 0), rows=(row,)))
    return [samples[start : start + GROUP] for start in range(0, len(samples), GROUP)]


class Ours:
    """The trainer's step."""

    def __init__(self, case: Case, threads: int) -> None:
        self._case = case
        self._threads = threads
        self._trainer = Trainer(case.folder, case.config)
        self.padding = 0.0

    def step(self) -> None:
        self.padding = self._trainer.step(self._case.groups, threads=self._threads).padding


class Plain:
    """One right-padded batch, logits over everything, a loop over the parameters."""

    def __init__(self, case: Case, threads: int) -> None:
        self._case = case
        self._threads = threads
        self._model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32, local_files_only=True)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, foreach=False, fused=False)
        self.padding = case.padding_of_one_batch

    def step(self) -> None:
        torch.set_num_threads(self._threads)
        rows = self._case.rows
        width = max(len(row.token_ids) for row in rows)

        def padded(values: Sequence[Sequence[float]]) -> torch.Tensor:
            return torch.tensor([[*row, *[0] * (width - len(row))] for row in values])

        ids_bt = padded([row.token_ids for row in rows])
        real_bt = padded([[1] * len(row.token_ids) for row in rows])
        mask_bt = padded([row.loss_mask for row in rows])[:, 1:]
        sampled_bt = padded([row.logprobs for row in rows])[:, 1:]
        rewards_gs = torch.tensor([[sample.reward for sample in group] for group in self._case.groups])
        advantages_b1 = group_based(rewards_gs, torch.ones_like(rewards_gs)).flatten()[:, None]
        logits_btv = self._model(input_ids=ids_bt, attention_mask=real_bt, use_cache=False).logits[:, :-1]
        log_p_btv = torch.log_softmax(logits_btv, dim=-1)
        log_p_bt = log_p_btv.gather(2, ids_bt[:, 1:, None])[:, :, 0]
        ratio_bt = (log_p_bt - sampled_bt).exp()
        clipped_bt = ratio_bt.clamp(0.8, 1.28)
        objective_bt = torch.minimum(ratio_bt * advantages_b1, clipped_bt * advantages_b1)
        loss = -(objective_bt * mask_bt).sum() / mask_bt.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0, foreach=False)
        self._optimizer.step()
        self._optimizer.zero_grad()


def tokens_per_s(subject: Ours | Plain, case: Case, seconds: float) -> float:
    """Trained tokens a second: median over as many steps as fill `seconds`."""
    figures: list[float] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds or len(figures) < 3:
        before = time.perf_counter()
        subject.step()
        figures.append(case.num_trained / (time.perf_counter() - before))
    return median(figures)
