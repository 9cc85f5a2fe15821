"""
`python -m dlrover.trainer.entry.local_entry`: one process of a TensorFlow job, or with `--platform local_...` the whole job on this machine.
"""

from __future__ import annotations

import sys

from dlrover.trainer.tensorflow.starter import main

if __name__ == "__main__":
    sys.exit(main())
