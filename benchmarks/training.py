"""How many tokens are trained a second, against the step that one would write down first?

    python -m benchmarks.training [--quick]

Rows, log-probs and rewards are the same on both sides, weights stay what they are; with one thread and with two.
What the overlap with generation gains is in `end_to_end_trl`: here the whole batch is there at once.
"""

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.common import Claim, arguments, emit, emit_ratio, interleave
from benchmarks.steps import Case, Ours, Plain, demo_case, llama_case, tokens_per_s

NAME = "training"
OURS, PLAIN = "turnmill", "plain step"


def compare(case: Case, threads: int, *, rounds: int, seconds: float) -> None:
    """One case on so many threads."""
    sides: dict[str, Ours | Plain] = {OURS: Ours(case, threads), PLAIN: Plain(case, threads)}
    # The first steps of each are slower: allocation, optimizer state.
    for side in sides.values():
        side.step()
    text = f"{case.name}, {threads} thread{'s' if threads > 1 else ''}"
    subjects = {name: partial(tokens_per_s, side, case, seconds) for name, side in sides.items()}
    figures, met = interleave(NAME, text, "trained tokens/s", subjects, rounds=rounds)
    padding = {name: round(side.padding, 3) for name, side in sides.items()}
    emit(kind="detail", benchmark=NAME, case=text, trained_tokens=case.num_trained, padding=padding)
    claim = Claim(benchmark=NAME, text=text, unit="trained tokens/s", ours=OURS, peer=PLAIN, at_least=1.0)
    emit_ratio(claim, figures[OURS], figures[PLAIN], met)


def main() -> None:
    args = arguments("How many tokens are trained a second?").parse_args()
    rounds, seconds = (3, 0.5) if args.quick else (5, 2.0)
    with tempfile.TemporaryDirectory() as folder:
        for case in (demo_case(), llama_case(Path(folder))):
            for threads in (1, 2):
                compare(case, threads, rounds=rounds, seconds=seconds)


if __name__ == "__main__":
    main()
