"""Benchmarks and examples are scripts, not a package: make their folders importable as Python does when it runs
them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "gpt")]
