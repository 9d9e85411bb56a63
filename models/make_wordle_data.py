"""Write data/wordle/{train,eval}.jsonl from the word list below (our own choice of common English words).

Run: python models/make_wordle_data.py [OUT_DIR]
The split is seeded and without overlap: 150 words to train on, 50 held out.
"""

import json
import random
import sys
from pathlib import Path

PROMPT = "Guess the five-letter word."
NUM_TRAIN = 150
SPLIT_SEED = 5

WORDS = """
acorn actor adult agent album amber angel ankle apple apron arena badge baker beach berry birch
blade blaze bloom bonus brain bread brick bride brown brush cabin cable camel candy canoe cargo
cedar chair charm chess chief cider civic claim cliff climb clock cloud clown coral couch crane
creek crisp crown curve dairy dance delta diner dizzy draft dream dress drink eager eagle early
earth elbow ember empty equal fable fancy ferry flame flock flour flute forge frost fruit ghost
giant glass globe glory glove grain grape grass guest guide habit happy hazel heart hinge hobby
honey hotel house humor inbox index ivory jelly jewel joint juice knife knock ladle lemon light
lilac linen lobby lodge lucky lunar lunch magic mango maple march medal melon metal model money
month motor mount mouse movie music nerve night noble north novel ocean olive onion orbit other
otter paint panel paper party pasta peach pearl piano pilot plant plate point pouch pride prize
quail queen quiet quilt radio ranch raven ridge river robin royal salad scarf shell shirt skate
smile snake spice spoon storm sugar table tiger toast tower train tulip uncle unity vivid water
whale wheat wheel world yacht young youth zebra
""".split()


def main(out_dir: Path) -> None:
    """Write both files; rows are in a seeded random order, since runs read them in file order."""
    if len(set(WORDS)) != len(WORDS) or any(len(word) != 5 for word in WORDS):
        raise SystemExit("WORDS must be distinct five-letter words")
    words = sorted(WORDS)
    random.Random(SPLIT_SEED).shuffle(words)
    parts = {"train": words[:NUM_TRAIN], "eval": words[NUM_TRAIN:]}
    out_dir.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        with (out_dir / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for number, word in enumerate(part):
                row = {
                    "id": f"wordle-{name}-{number:03d}",
                    "metadata": {"prompt": PROMPT, "answer": word},
                }
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    default = Path(__file__).parent.parent / "src" / "turnmill" / "assets" / "wordle"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else default)
