"""The law that the steps of `train.py` follow, and what is best by it. Imported by the job and by the demonstration."""

from __future__ import annotations

import argparse


def step_seconds(law: argparse.Namespace, workers: int) -> float:
    seconds = law.constant + (law.network + law.each * (workers - 2) if workers > 1 else 0.0)
    return float(seconds * (law.knee_factor if law.knee and workers > law.knee else 1.0))


def best_size(law: argparse.Namespace, least: int, most: int, share: float = 0.5) -> int:
    """Growing on from `least` while each further worker brings at least `share` of its part in speed (balanced: 0.5)."""
    best = least
    for workers in range(least + 1, most + 1):
        gain = workers / step_seconds(law, workers) / (best / step_seconds(law, best)) - 1
        if gain >= share * (workers / best - 1):
            best = workers
    return best


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train by a law.")
    parser.add_argument("--constant", type=float, default=0.1, help="seconds of a step with one worker")
    parser.add_argument("--network", type=float, default=0.005, help="seconds more with two")
    parser.add_argument("--each", type=float, default=0.002, help="seconds more with each further worker")
    parser.add_argument(
        "--knee", type=int, default=0, help="beyond so many workers a step takes KNEE_FACTOR times as long"
    )
    parser.add_argument("--knee-factor", type=float, default=2.0)
    parser.add_argument("--noise", type=float, default=0.05, help="standard deviation of the noise, as a share")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--end-file", default="", help="end after the step in which this file appears")
    return parser
