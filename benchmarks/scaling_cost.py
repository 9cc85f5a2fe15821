"""
What scaling adds to a training step: processor time with and without the sums of whole steps and the shape that a worker tells.

    python benchmarks/scaling_cost.py [--steps 10000]

One process takes turns of 100 steps each, so whatever else the machine does meets both. A step is a small model's forward, backward and optimizer, in the phases that hooks
would enter, and its report. "Without" leaves out what the evidence for scaling needs and keeps the rest of the watch. Budget: 0.5 %.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from dlrover.agent.monitor.worker_view import WatchedWorker
from dlrover.protocol import progress_page as layout
from dlrover.trainer import phases
from dlrover.trainer.phases import PhaseWriter

TURN = 100
BUDGET = 0.005


class WithoutScaling(PhaseWriter):
    """As it was before a job could find its own size."""

    def _count_plain(self, now: int) -> None:
        words, computing, beside = self.words, 0, 0
        for phase in (phases.FORWARD, phases.OPTIMIZER):
            computing += words[layout.PHASE_NS + phase] + (now - self._since if phase == self.phase else 0)
        for phase in (phases.CHECKPOINT, phases.EVALUATION):
            beside += words[layout.PHASE_NS + phase] + (now - self._since if phase == self.phase else 0)
        if self._step_ended_at and beside == self._spent_before[1]:
            words[layout.NUM_PLAIN_STEPS] += 1
            words[layout.PLAIN_NS] += computing - self._spent_before[0]
        self._spent_before = (computing, beside)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of each kind")
    num_turns = max(2, parser.parse_args().steps // TURN)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(32, 64)
    seats = [WatchedWorker(local_rank=0, global_rank=0) for _ in range(2)]
    writers = {"with": PhaseWriter(seats[0].page.path), "without": WithoutScaling(seats[1].page.path)}
    spent: dict[str, list[float]] = {name: [] for name in writers}
    step = 0
    try:
        for turn in range(num_turns + 1):
            for name in sorted(writers, reverse=turn % 2 == 1):
                writer = writers[name]
                if name == "with":
                    writer.set_shape(micro_batch=32, accumulation=1, total_batch=32)
                began = time.process_time()
                for _ in range(TURN):
                    step += 1
                    writer.enter(phases.FORWARD)
                    loss = model(inputs).square().mean()
                    writer.enter(phases.BACKWARD)
                    loss.backward()
                    writer.enter(phases.OPTIMIZER)
                    optimizer.step()
                    optimizer.zero_grad()
                    writer.set_step(step, layout.REPORTED)
                if turn:  # the first turn warms up
                    spent[name].append(time.process_time() - began)
    finally:
        for seat in seats:
            seat.close()
    mine, former = (statistics.median(spent[name]) / TURN for name in ("with", "without"))
    ratio = statistics.median(one / other for one, other in zip(spent["with"], spent["without"], strict=True)) - 1
    print(f"{num_turns * TURN:,} steps of each kind, in turns of {TURN}, load {os.getloadavg()[0]:.1f}")
    print(f"processor time of a step: {mine * 1e6:.1f} us with, {former * 1e6:.1f} us without")
    print(f"scaling adds {ratio:+.2%} in the median of the pairs of turns (budget +{BUDGET:.1%})")
    return 0 if ratio <= BUDGET else 1


if __name__ == "__main__":
    sys.exit(main())
