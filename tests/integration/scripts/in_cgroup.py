"""Moves itself into a memory cgroup, then becomes the given script."""

import os
import sys

with open(f"{sys.argv[1]}/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
