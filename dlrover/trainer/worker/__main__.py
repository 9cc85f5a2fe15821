"""`python -m dlrover.trainer.worker KIND TARGET ARGS...`: see `entry`."""

from __future__ import annotations

import sys

from dlrover.trainer.worker import entry

if __name__ == "__main__":
    if sys.argv[1] == "function" and sys.path and not sys.flags.safe_path:
        del sys.path[0]
    entry.main()
