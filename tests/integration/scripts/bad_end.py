"""Rank 1 ends with exit code 7; the others wait to be stopped. Without torch."""

import os
import signal
import sys

if os.environ["RANK"] == "1":
    sys.exit(7)
signal.pause()
