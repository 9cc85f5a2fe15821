"""
What the guard of `dlrover.resilient` costs in a step that nothing disturbs.

    python benchmarks/guard_cost.py

Runs a training function of a small model with and without the guard, in turn, as a worker of `dlrover-run` sees it: with a page that an agent
could write to. Prints the median of each and their difference in microseconds, without and with buffers (batch norm).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from figures import table
from torch import nn

import dlrover
from dlrover.protocol.progress_page import ProgressPage

NUM_STEPS = 50
NUM_TURNS = 5
BUDGET_US = 50.0


def main() -> int:
    page = ProgressPage()
    os.environ |= {"DLROVER_AGENT_SOCKET": "/nowhere", "DLROVER_PROGRESS_PAGE": page.path}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    rows = []
    worst = 0.0
    for num_norms in (0, 1, 10, 50):
        model = nn.Sequential(nn.Linear(32, 32), *(nn.BatchNorm1d(32) for _ in range(num_norms)))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(8, 32)

        def plain(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, batch: torch.Tensor = batch
        ) -> None:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        empty = dlrover.resilient(model, optimizer)(lambda: None)
        guarded = dlrover.resilient(model, optimizer)(plain)
        bare, with_guard, alone = [], [], []
        for _ in range(NUM_TURNS):
            bare.append(per_call(plain))
            with_guard.append(per_call(guarded))
            alone.append(per_call(empty))
        cost = min(alone)
        worst = max(worst, cost)
        medians = [f"{statistics.median(each):.1f}" for each in (bare, with_guard, alone)]
        rows.append([str(3 * num_norms), *medians, f"{cost:.1f}"])
    print(table(["buffers", "step, us", "guarded step, us", "guard alone, us", "guard alone, best"], rows))
    print(f"budget {BUDGET_US:g} us: {'met' if worst <= BUDGET_US else 'missed'}")
    return 0 if worst <= BUDGET_US else 1


def per_call(function: Callable[[], None]) -> float:
    began_at = time.perf_counter()
    for _ in range(NUM_STEPS):
        function()
    return (time.perf_counter() - began_at) / NUM_STEPS * 1e6


if __name__ == "__main__":
    sys.exit(main())
