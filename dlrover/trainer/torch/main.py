"""`python -m dlrover.trainer.torch.main`: `dlrover-run` under its historical name."""

from __future__ import annotations

import sys

from dlrover.cli.run import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
