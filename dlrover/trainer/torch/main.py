"""`python -m dlrover.trainer.torch.main`: `dlrover-run` under its historical name."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> None:
    """For programs: a job that fails raises, where the command exits with a code."""
    from dlrover.cli.launch.namespace import main as run

    run(args)


if __name__ == "__main__":
    from dlrover.cli.run import main as run_command

    sys.exit(run_command())
