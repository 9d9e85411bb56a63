"""Conversations through a verifiers `MultiTurnEnv` and its own client; runs in the peers' environment.

Prints one JSON line: turns a second over all conversations, the environment's set-up excluded.
"""

import argparse
import asyncio
import json
import os
import time
from typing import Any

import verifiers
import verifiers.legacy as vf
from datasets import Dataset
from verifiers.legacy.types import ClientConfig


class FixedTurns(vf.MultiTurnEnv):
    """Answers every reply with the same marks, as a Wordle whose word is never found does."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "c+ r? a- n- e-"}]


async def reward(completion: Any, **kwargs: Any) -> float:
    return 0.0


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--total", type=int, required=True)
    parser.add_argument("--concurrent", type=int, required=True)
    parser.add_argument("--turns", type=int, required=True)
    args = parser.parse_args()
    os.environ["BENCH_KEY"] = "none"
    opening = [{"role": "user", "content": "Guess the five-letter word."}]
    rows = [{"prompt": opening, "answer": "blaze", "example_id": i} for i in range(args.total)]
    env = FixedTurns(
        dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[reward]), max_turns=args.turns, score_rollouts=True
    )
    client = ClientConfig(api_key_var="BENCH_KEY", api_base_url=args.url)
    quiet = {"on_progress": lambda *a: None, "on_start": lambda *a: None}
    inputs = env.get_dataset(n=args.total)
    await env.generate(inputs.select(range(4)), client, "policy", max_concurrent=4, **quiet)
    begun = time.perf_counter()
    results = await env.generate(inputs, client, "policy", max_concurrent=args.concurrent, **quiet)
    seconds = time.perf_counter() - begun
    outputs = results["outputs"]
    errors = [output["error"] for output in outputs if output.get("error")]
    if errors:
        raise SystemExit(f"{len(errors)} rollouts failed: {errors[0]}")
    turns = sum(int(output["metrics"]["num_turns"]) for output in outputs)
    print(json.dumps({"turns_per_s": turns / seconds, "turns": turns, "version": verifiers.__version__}))


asyncio.run(main())
