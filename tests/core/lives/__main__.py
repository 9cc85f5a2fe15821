"""`python -m tests.core.lives LIFE [STEP]`: what comes in and what comes out, from that step on."""

from __future__ import annotations

import sys

from tests.core.lives.stage import Stage, read_lives


def main(life: int, first: int = 0) -> None:
    found, stage = read_lives()[life], Stage()
    print(found.name)
    for number, step in enumerate(found.steps):
        said = stage.play(step)
        if number >= first:
            print(f"{number}: {step}\n    {said}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
