"""`python -m dlrover.trainer`: the same starter as `dlrover.trainer.entry.local_entry`."""

from __future__ import annotations

import sys

from dlrover.trainer.tensorflow.starter import main

if __name__ == "__main__":
    sys.exit(main())
