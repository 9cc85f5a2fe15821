"""
Jobs in which anything may be seen of any rank, drawn by a seed: whatever the watch concludes, it is a verdict that can be acted upon.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from dlrover.core.diagnosis.picture import FailedWorkers
from dlrover.core.diagnosis.watch import Tell
from dlrover.protocol.messages.job import FailureKind, Incarnation, NodeRank, Round
from dlrover.protocol.messages.watch import (
    ActionKind,
    Collective,
    DeviceSample,
    Phase,
    ProcessSample,
    ResourceReport,
    ThreadStack,
    WorkerDump,
    WorkerProgress,
)
from tests.core.diagnosis.watch_lab import (
    IN_ALL_REDUCE,
    IN_BACKWARD,
    IN_BARRIER,
    IN_LOADER,
    IN_LOCK,
    NODES,
    Lab,
    node_of,
    progress,
)
from tests.core.scene import failure

GB = 1 << 30
STACKS = (IN_BACKWARD, IN_LOCK, IN_LOADER, IN_ALL_REDUCE, IN_BARRIER, ())
CHANNELS = ("", "futex_wait_queue", "io_schedule", "nfs_wait", "pipe_read", "ep_poll")
CHILDREN = ((), ("pt_data_worker 71 T",), ("pt_data_worker 71 Z",), ("pt_data_worker 71 D nfs_wait",), ("python 72 S",))
TRACEBACKS = (
    "",
    "RuntimeError: boom",
    "OSError: No space left on device",
    "torch.OutOfMemoryError: CUDA out of memory",
)


class Chance:
    """One job's luck: most ranks look alike, some differ in one thing, few in many."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.stack = self.random.choice(STACKS)
        self.phase = self.random.choice(list(Phase))
        self.sequence = self.random.randrange(5, 9)
        self.oddness = self.random.choice((0.1, 0.3, 0.6))

    def is_odd(self) -> bool:
        return self.random.random() < self.oddness

    def pick(self, usual: Any, *others: Any) -> Any:
        return self.random.choice(others) if self.is_odd() else usual

    def collective(self) -> Collective | None:
        if self.pick(False, True):
            return None
        return Collective(
            sequence=self.pick(self.sequence, self.sequence - 1, self.sequence + 1),
            operation=self.pick("all_reduce", "broadcast", "all_gather"),
            shape=self.pick("float32[8]", "float32[4]"),
            group=self.pick("0", "1"),
            is_inside=self.pick(True, False),
            has_started=self.pick(True, False),
            backend=self.pick("gloo", "nccl"),
        )

    def progress(self, rank: int, step: int, *, is_stalled: bool = True) -> WorkerProgress:
        seconds = self.random.choice((0.01, 0.5, 5.0))
        return progress(
            rank,
            self.pick(self.phase, *Phase),
            step=self.pick(step, step - 1, None),
            num_steps=self.pick(step, 0),
            num_plain_steps=step,
            plain_seconds=step * self.pick(0.05, 0.2),
            seconds={self.phase: step * 0.05, Phase.DATA: self.random.choice((0.0, step * 0.5))},
            phase_seconds=self.pick(5.7, 0.1, 400.0) if is_stalled else seconds,
            is_stalled=self.pick(is_stalled, not is_stalled),
            has_hooks=self.pick(True, False),
            collective=self.collective(),
            metrics={"loss": self.pick(2.0, 900.0, float("nan")), "grad_norm": self.pick(1.0, float("inf"))},
            digest=self.pick("aa", "bb", ""),
            digest_step=self.pick(step, None),
        )

    def dump(self, rank: int, step: int) -> WorkerDump:
        frames = self.pick(self.stack, *STACKS)
        threads = (ThreadStack(name="main", frames=frames, is_main=True),) if frames else ()
        if self.is_odd():
            threads += (ThreadStack(name="pin", frames=self.random.choice(STACKS[:-1])),)
        return WorkerDump(
            local_rank=rank % 2,
            global_rank=rank,
            pid=1000 + rank,
            progress=self.pick(self.progress(rank, step), None),
            threads=threads,
            state=self.pick("S", "R", "D", "T", "t", "Z"),
            wait_channel=self.pick(self.random.choice(CHANNELS), ""),
            kernel_stack=self.pick((), ("nfs_wait", "do_read"), ("futex_wait",)),
            cpu_seconds=self.pick(1.0, 1.05, 6.0),
            io_bytes=self.pick(0, 1, 1 << 22),
            major_faults=self.pick(0, 3),
            switches=self.pick(10, 9000),
            native=self.pick((), ("ncclAllReduce", "cudaStreamSynchronize")),
            recorded=self.pick((), tuple(each for each in (self.collective(), self.collective()) if each is not None)),
            children=self.random.choice(CHILDREN) if self.is_odd() else (),
            source=self.pick("faulthandler", "py-spy", "none"),
        )

    def resources(self, node: int) -> ResourceReport:
        devices = (
            DeviceSample(
                index=0,
                used_memory_bytes=self.pick(GB, 30 * GB),
                total_memory_bytes=32 * GB,
                utilization=self.pick(0.9, 0.0),
                temperature=self.pick(60.0, 99.0, None),
                health=self.pick("", "lost", "ecc errors"),
            ),
        )
        return ResourceReport(
            node=NODES[node],
            incarnation=Incarnation(1),
            cpu=self.pick(2.0, 0.0, 16.0),
            cores=16.0,
            memory_bytes=self.pick(8 * GB, 63 * GB),
            memory_limit_bytes=64 * GB,
            shm_bytes=self.pick(0, 8 * GB),
            shm_limit_bytes=8 * GB,
            disk_free_bytes=self.pick(100 * GB, 0, 1 << 20, None),
            workers=tuple(
                ProcessSample(global_rank=rank, cpu=self.pick(1.0, 0.0), memory_bytes=self.pick(4 * GB, 20 * GB))
                for rank in (2 * node, 2 * node + 1)
            ),
            devices=self.pick(devices, ()),
            has_devices=self.pick(True, False),
            troubles=self.pick((), ("no device answers",)),
            clock_jump=self.pick(0.0, 3600.0, -5.0),
        )


def check(lab: Lab) -> None:
    for effect in lab.effects:
        if not isinstance(effect, Tell):
            continue
        verdict = effect.past.verdict
        assert 0.0 <= verdict.confidence <= 1.0
        assert verdict.evidence, "a verdict says what it rests on"
        assert {each.global_rank for each in verdict.culprits} <= {-1, 0, 1, 2, 3}
        assert {each.node for each in verdict.culprits} <= {-1, *NODES}
        if verdict.action in (ActionKind.RELAUNCH_NODE, ActionKind.RESTART_WORKERS):
            assert verdict.reasoning or verdict.culprits, "what costs something has a reason"


@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_seen_the_verdict_is_one_to_act_upon(seed: int) -> None:
    chance, lab = Chance(seed), Lab()
    for number in range(1, 5):
        lab.tell(*(chance.progress(rank, 20 * number, is_stalled=False) for rank in range(4)))
        for node in range(2):
            lab.watch.hear(chance.resources(node), lab.now)
        lab.after(chance.pick(5.0, 0.5, 60.0))
    first = [chance.dump(rank, 100) for rank in range(4)]
    again = [each if chance.random.random() < 0.7 else chance.dump(each.global_rank, 100) for each in first]
    for _ in range(2):
        lab.tell(*(each.progress for each in first if each.progress is not None))
        if lab.asked():
            lab.answer(0, *first)
            lab.after(lab.asked()[-1].order.order.again_after)
            lab.answer(1, *again)
        lab.after(chance.pick(6.0, 301.0))
        lab.tick()
    if chance.is_odd():
        rank = chance.random.randrange(4)
        kind = chance.random.choice(list(FailureKind))
        died = failure(kind, at=1.0, global_rank=rank, traceback=chance.random.choice(TRACEBACKS))
        node = node_of(rank)
        lab.watch.hear_failure(
            FailedWorkers(
                at=lab.now, round=Round(1), node=node, node_rank=NodeRank(rank // 2), step=100, failures=(died,)
            )
        )
        lab.tick()
    if chance.is_odd():
        lab.watch.lost([NODES[1]])
    lab.after(chance.pick(60.0, 400.0, 8000.0))
    lab.tick()
    check(lab)
