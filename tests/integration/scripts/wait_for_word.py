"""Says that it trains, and ends when a file appears. Needs no torch, so that a test of something else stays quick."""

import os
import sys
import time

print(f"training rank={os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
ends_at = time.monotonic() + 300
while not os.path.exists(sys.argv[1]):
    if time.monotonic() > ends_at:
        sys.exit("nobody said the word")
    time.sleep(0.02)
