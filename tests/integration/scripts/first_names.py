"""What `import dlrover` offers without torch: workers that wait for each other, and a function that is launched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import dlrover


def meet(folder: str) -> list[str]:
    """The second worker writes late, and all see its file behind the barrier."""
    rank = int(os.environ["RANK"])
    for turn in ("one", "two"):
        Path(folder, f"{turn}-{rank}").touch()
        dlrover.barrier("written", timeout=100)
        dlrover.report(1 if turn == "one" else 2)
        assert Path(folder, f"{turn}-{1 - rank}").exists(), turn
    return sorted(path.name for path in Path(folder).iterdir())


if __name__ == "__main__":
    assert "torch" not in sys.modules, "import dlrover must not import torch"
    print(dlrover.launch(meet, sys.argv[1], nproc_per_node=2))
