"""Make a click log of synthetic advertisements: a label, 13 numbers and 26 categories a line. No download is needed."""

from __future__ import annotations

import argparse
import random

NUM_DENSE = 13
NUM_CATEGORIES = 26
CATEGORY_SIZE = 1000
HEADER = ["label", *(f"I{n}" for n in range(1, NUM_DENSE + 1)), *(f"C{n}" for n in range(1, NUM_CATEGORIES + 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("path")
    options = parser.parse_args()
    write(options.path, options.rows, options.seed)


def write(path: str, num_rows: int, seed: int = 1) -> None:
    draw = random.Random(seed)
    weights = [draw.uniform(-1, 1) for _ in range(NUM_DENSE)]
    with open(path, "w", encoding="utf-8") as file:
        print(",".join(HEADER), file=file)
        for _ in range(num_rows):
            dense = [draw.random() for _ in range(NUM_DENSE)]
            categories = [draw.randrange(CATEGORY_SIZE) for _ in range(NUM_CATEGORIES)]
            score = sum(w * x for w, x in zip(weights, dense, strict=True)) + 0.1 * (categories[0] % 7 - 3)
            label = int(score + draw.gauss(0, 0.3) > 0)
            fields = [str(label), *(f"{x:.4f}" for x in dense), *(f"c{c:04d}" for c in categories)]
            print(",".join(fields), file=file)


if __name__ == "__main__":
    main()
