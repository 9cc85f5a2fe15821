"""
What the reports of workers' progress cost the watch of a very large job, in seconds of CPU: without sockets and decoding.

    python benchmarks/watch_reports.py [NUM_NODES]      10,000 nodes of 8 workers unless said otherwise, some seconds
"""

from __future__ import annotations

import sys
import time

from dlrover.core.diagnosis.picture import NodePlace, Scene
from dlrover.core.diagnosis.watch import Watch
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId, NodeRank, Round
from dlrover.protocol.messages.watch import Phase, ProgressReport, WatchTerms, WorkerProgress

WORKERS = 8
PERIOD = 5_000_000
"""Microseconds between two reports of a node: the default heartbeat."""
NUM_REPORTS = 4


def report_of(node: int, step: int) -> ProgressReport:
    workers = tuple(
        WorkerProgress(
            local_rank=local,
            global_rank=node * WORKERS + local,
            pid=1,
            step=step,
            phase=Phase.FORWARD,
            phase_seconds=0.01,
            step_seconds=0.1,
            seconds=dict.fromkeys(Phase, 0.1 * step),
            metrics={"loss": 2.0 / step},
        )
        for local in range(WORKERS)
    )
    return ProgressReport(node=NodeId(node), incarnation=Incarnation(1), round=Round(1), workers=workers)


def main(num_nodes: int) -> None:
    places = tuple(
        NodePlace(node=NodeId(node), node_rank=NodeRank(node), host="", first_rank=node * WORKERS, num_ranks=WORKERS)
        for node in range(num_nodes)
    )
    watch = Watch()
    watch.follow(Scene(round=Round(1), is_active=True, began_at=Micros(0), places=places), WatchTerms(), Micros(0))
    print(f"{num_nodes:,} nodes of {WORKERS} workers, a report of each every {PERIOD / 1e6:g} s:")
    for number in range(1, NUM_REPORTS + 1):
        reports = [report_of(node, 50 * number) for node in range(num_nodes)]
        now = Micros(number * PERIOD)
        began_at = time.process_time()
        for report in reports:
            watch.hear(report, now)
            watch.next_deadline()
        heard_at = time.process_time()
        watch.tick(Micros(now + PERIOD // 2))
        looked_at = time.process_time()
        print(f"heard in {heard_at - began_at:.2f} s, one look for faults {looked_at - heard_at:.2f} s (one a second)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
