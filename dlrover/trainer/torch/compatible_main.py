"""
`python -m dlrover.trainer.torch.compatible_main`: `dlrover-run` where a master is named, else torch's own
launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if os.environ.get("DLROVER_MASTER_ADDR"):
        from dlrover.cli.console import say
        from dlrover.cli.run import main as run

        say("DLROVER_MASTER_ADDR is set: running as dlrover-run, not as torchrun")
        return run(arguments)
    from torch.distributed.run import main as torchrun

    torchrun(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
