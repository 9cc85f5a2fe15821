"""A node host whose nodes say in the file `saving` beside its configuration until when they write checkpoints."""

import sys
from pathlib import Path

from dlrover.platforms import node_host

folder = Path(sys.argv[1]).parent


def saving_until(pid: int) -> float:
    try:
        until = float((folder / "saving").read_text())
    except FileNotFoundError:
        return 0.0
    (folder / "looked").touch()
    return until


if __name__ == "__main__":
    sys.exit(node_host.main(saving_until))
