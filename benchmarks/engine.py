"""How fast does the slot engine sample, against `generate` and `generate_batch` of transformers?

    python -m benchmarks.engine [--quick]

64 conversations at once, one torch thread, random prompts, no early end: every subject samples the same number of
tokens. `generate` has no memory between turns, so it reads the whole conversation again each turn.
"""

import argparse
import contextlib
import io
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaForCausalLM

from benchmarks.common import Claim, arguments, emit_ratio, emit_skip, interleave
from benchmarks.llama import small_llama
from turnmill import assets
from turnmill.generation.engine import EngineCall
from turnmill.generation.transformers_engine import TransformersEngine
from turnmill.records import Sampling

NAME = "engine"
NUM_CONVERSATIONS = 64
PROMPT_TOKENS = 20
OURS, GENERATE, BATCHED = "slot engine", "generate", "generate_batch"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What one measurement samples."""

    name: str
    turns: int
    # Tokens sampled a turn, and observed between two turns.
    new: int
    observed: int
    at_least: float

    @property
    def num_sampled(self) -> int:
        return NUM_CONVERSATIONS * self.turns * self.new


SHAPES = (
    Shape(name="1 turn x 32 tokens", turns=1, new=32, observed=0, at_least=0.9),
    Shape(name="6 turns x 6 new + 8 observed", turns=6, new=6, observed=8, at_least=2.0),
)


def make_model(folder: Path) -> Path:
    """A random Llama of about a million parameters."""
    torch.manual_seed(0)
    LlamaForCausalLM(small_llama(128, pad_id=0)).save_pretrained(folder)
    return folder


def random_tokens(vocabulary: int, length: int) -> torch.Tensor:
    """[conversations, length] ids."""
    return torch.randint(5, min(vocabulary, 100), (NUM_CONVERSATIONS, length))


def measure_ours(engine: TransformersEngine, shape: Shape) -> float:
    """Tokens a second: submit, step until all ended, keep, submit the next turn."""
    names: list[str | None] = [None] * NUM_CONVERSATIONS
    new_ids = random_tokens(engine.vocab_size, PROMPT_TOKENS).tolist()
    begun = time.perf_counter()
    sampled = 0
    for turn in range(shape.turns):
        for index in range(NUM_CONVERSATIONS):
            engine.submit(
                EngineCall(
                    call_id=f"{begun}/{index}/{turn}",
                    seed_parts=(str(begun), str(index), str(turn)),
                    prefix_key=names[index],
                    new_ids=new_ids[index],
                    sampling=Sampling(max_new_tokens=shape.new),
                    max_new_tokens=shape.new,
                    end_ids=frozenset(),
                )
            )
        while engine.num_running:
            for result in engine.step():
                sampled += len(result.token_ids)
                index = int(result.call_id.split("/")[1])
                names[index] = result.call_id
                engine.keep(result.call_id, result.call_id)
        new_ids = random_tokens(engine.vocab_size, max(1, shape.observed)).tolist()
    if sampled != shape.num_sampled:
        raise RuntimeError(f"{sampled} tokens instead of {shape.num_sampled}")
    return sampled / (time.perf_counter() - begun)


def measure_arriving(engine: TransformersEngine, shape: Shape) -> float:
    """Tokens a second when calls come a few at a time, as they do from workers: prefills meet decodes in every step.

    Before each step up to eight of the conversations that wait go on, the same ones for every engine and pass.
    """
    rng = random.Random(0)
    turns = dict.fromkeys(range(NUM_CONVERSATIONS), 0)
    waiting = list(turns)
    names: list[str | None] = [None] * NUM_CONVERSATIONS
    new_ids = random_tokens(engine.vocab_size, PROMPT_TOKENS + 4).tolist()
    begun = time.perf_counter()
    sampled = 0
    while waiting or engine.num_running:
        rng.shuffle(waiting)
        for index in [waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 8)))]:
            num_new = rng.randint(8, 24) if turns[index] else PROMPT_TOKENS
            engine.submit(
                EngineCall(
                    call_id=f"{begun}/{index}/{turns[index]}",
                    seed_parts=(str(begun), str(index), str(turns[index])),
                    prefix_key=names[index],
                    new_ids=new_ids[index][:num_new],
                    sampling=Sampling(max_new_tokens=shape.new),
                    max_new_tokens=shape.new,
                    end_ids=frozenset(),
                )
            )
        for result in engine.step():
            sampled += len(result.token_ids)
            index = int(result.call_id.split("/")[1])
            names[index] = result.call_id
            engine.keep(result.call_id, result.call_id)
            turns[index] += 1
            if turns[index] < shape.turns:
                waiting.append(index)
    if sampled != shape.num_sampled:
        raise RuntimeError(f"{sampled} tokens instead of {shape.num_sampled}")
    return sampled / (time.perf_counter() - begun)


def _settings(shape: Shape) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=shape.new, min_new_tokens=shape.new, do_sample=True, top_k=0, top_p=1.0, pad_token_id=0
    )


def measure_generate(model: Any, shape: Shape) -> float:
    """Tokens a second of `generate` on the whole conversations, turn by turn."""
    ids = random_tokens(model.config.vocab_size, PROMPT_TOKENS)
    begun = time.perf_counter()
    for _ in range(shape.turns):
        with torch.inference_mode():
            longer = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=_settings(shape)
            )
        if longer.shape[1] != ids.shape[1] + shape.new:
            raise RuntimeError(f"{longer.shape[1] - ids.shape[1]} tokens instead of {shape.new}")
        ids = torch.cat([longer, random_tokens(model.config.vocab_size, shape.observed)], dim=1)
    return shape.num_sampled / (time.perf_counter() - begun)


def measure_batched(model: Any, shape: Shape) -> float:
    """Tokens a second of continuous batching, one turn; what it prints is kept away from our lines."""
    prompts = random_tokens(model.config.vocab_size, PROMPT_TOKENS).tolist()
    settings = GenerationConfig(max_new_tokens=shape.new, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    begun = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), torch.inference_mode():
        # The manager, slow to set up, stays from the pass that warms it.
        outputs = model.generate_batch(prompts, generation_config=settings, progress_bar=False, persistent_manager=True)
    sampled = sum(len(output.generated_tokens) for output in outputs.values())
    if sampled != shape.num_sampled:
        raise RuntimeError(f"{sampled} tokens instead of {shape.num_sampled}")
    return sampled / (time.perf_counter() - begun)


def steady(measure: Callable[[], float], seconds: float) -> float:
    """Median over as many passes as fill `seconds`: one pass of a tiny model is over in a tenth of a second."""
    figures: list[float] = []
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        figures.append(measure())
    return median(figures)


def compare(name: str, folder: Path, args: argparse.Namespace) -> None:
    """One model, both shapes."""
    engine = TransformersEngine(folder, num_slots=NUM_CONVERSATIONS, max_length=256)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    seconds = 0.5 if args.quick else 2.0
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    for shape in SHAPES:
        subjects: dict[str, Callable[[], float]] = {
            OURS: partial(steady, partial(measure_ours, engine, shape), seconds),
            GENERATE: partial(steady, partial(measure_generate, model, shape), seconds),
        }
        # The first passes of each are slower: allocation, lazy imports.
        for measure in subjects.values():
            measure()
        case = f"{name} ({num_parameters / 1e6:.2f} M), {shape.name}"
        figures, met = interleave(NAME, case, "tokens/s", subjects, rounds=3 if args.quick else 9)
        claim = Claim(benchmark=NAME, text=case, unit="tokens/s", ours=OURS, peer=GENERATE, at_least=shape.at_least)
        emit_ratio(claim, figures[OURS], figures[GENERATE], met)
    arriving = SHAPES[-1]
    interleave(
        NAME,
        f"{name} ({num_parameters / 1e6:.2f} M), {arriving.turns} turns x {arriving.new} new, a few calls at a time",
        "tokens/s",
        {OURS: partial(steady, partial(measure_arriving, engine, arriving), seconds)},
        rounds=3 if args.quick else 9,
    )
    if args.quick:
        emit_skip(NAME, BATCHED, "takes a minute: measured in the full form only")
    else:
        _compare_batched(name, folder, engine)


def _compare_batched(name: str, folder: Path, engine: TransformersEngine) -> None:
    shape = SHAPES[0]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, attn_implementation="paged|sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    subjects: dict[str, Callable[[], float]] = {
        OURS: partial(measure_ours, engine, shape),
        BATCHED: partial(measure_batched, model, shape),
    }
    case = f"{name}, {shape.name}, continuous batching"
    try:
        measure_batched(model, replace(shape, new=1))
        figures, met = interleave(NAME, case, "tokens/s", subjects, rounds=3)
    except Exception as error:  # A peer that does not run here is a finding to print, whatever it raises.
        emit_skip(NAME, BATCHED, f"does not run here: {type(error).__name__}: {error}")
        return
    finally:
        model.destroy_cached_continuous_batching_manager()
    claim = Claim(benchmark=NAME, text=case, unit="tokens/s", ours=OURS, peer=BATCHED)
    emit_ratio(claim, figures[OURS], figures[BATCHED], met)


def main() -> None:
    args = arguments("How fast does the slot engine sample?").parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compare("wordle-tiny", assets.model_folder("wordle-tiny"), args)
    with tempfile.TemporaryDirectory() as folder:
        compare("random Llama", make_model(Path(folder)), args)


if __name__ == "__main__":
    main()
