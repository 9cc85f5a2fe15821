"""What a master of pods has loaded beyond a master of local nodes costs little memory. `benchmarks/kubernetes_pods.py` measures whole masters."""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST_MB = 40
PROGRAM = """
import sys
import dlrover.master.service
from dlrover.platforms.registry import find_platform

def used():
    with open("/proc/self/status") as file:
        [line] = [line for line in file if line.startswith("VmRSS:")]
    return int(line.split()[1])

find_platform("local")
before = used()
find_platform(sys.argv[1])
print(used() - before, *sys.modules)
"""


@pytest.mark.parametrize("platform", ["kubernetes", "k8s"])
def test_the_platforms_modules_cost_less_than_forty_megabytes(platform: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, platform], capture_output=True, text=True, check=True)
    grown_kb, *modules = done.stdout.split()
    assert "dlrover.platforms.kubernetes.platform" in modules
    assert int(grown_kb) / 1024 < MOST_MB
    assert not {"kubernetes", "torch", "ray"} & set(modules), "what a master of pods does not need"
