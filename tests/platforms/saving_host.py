"""
A node host whose nodes say in the file `saving` beside its configuration until when they write checkpoints: one word for each look, the
last one from then on.
"""

import sys
from pathlib import Path

from dlrover.platforms.local.__main__ import main

folder = Path(sys.argv[1]).parent
said: list[float] = []


def saving_until(pid: int) -> float:
    try:
        words = [float(word) for word in (folder / "saving").read_text().split()]
    except FileNotFoundError:
        return 0.0
    said.append(words[min(len(said), len(words) - 1)])
    if said[-1]:
        (folder / "looked").touch()
    return said[-1]


if __name__ == "__main__":
    sys.exit(main(saving_until))
