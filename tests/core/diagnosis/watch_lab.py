"""A job of two nodes with two ranks each, told of by hand, on virtual time."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dlrover.core.diagnosis.picture import NodePlace, Scene
from dlrover.core.diagnosis.watch import Act, AskNode, Publish, Tell, Watch, WatchEffect
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId, NodeRank, Round
from dlrover.protocol.messages.watch import (
    Collective,
    LookTaken,
    Phase,
    ProgressReport,
    ThreadStack,
    Verdict,
    WatchTerms,
    WorkerDump,
    WorkerProgress,
)

IN_BACKWARD = (
    "/venv/torch/autograd/graph.py:841 _engine_run_backward",
    "/job/train.py:40 step",
    "/job/train.py:60 main",
)
IN_LOCK = (
    "/usr/lib/threading.py:355 wait",
    "/job/train.py:31 forward",
    "/job/train.py:38 step",
    "/job/train.py:60 main",
)
IN_LOADER = (
    "/venv/torch/utils/data/dataloader.py:1300 _try_get_data",
    "/job/train.py:37 step",
    "/job/train.py:60 main",
)
IN_ALL_REDUCE = (
    "/venv/torch/distributed/distributed_c10d.py:2800 all_reduce",
    "/job/train.py:44 step",
    "/job/train.py:60 main",
)
IN_BARRIER = (
    "/venv/torch/distributed/distributed_c10d.py:4700 barrier",
    "/job/train.py:52 sync",
    "/job/train.py:60 main",
)
NODES = (NodeId(7), NodeId(9))


def micros(seconds: float) -> Micros:
    return Micros(round(seconds * 1e6))


def node_of(rank: int) -> NodeId:
    return NODES[rank // 2]


def progress(rank: int, phase: Phase = Phase.BACKWARD, **details: Any) -> WorkerProgress:
    values: dict[str, Any] = {
        "step": 100,
        "step_seconds": 0.05,
        "phase_seconds": 2.1,
        "is_stalled": True,
        "pid": 1000 + rank,
    }
    return WorkerProgress(local_rank=rank % 2, global_rank=rank, phase=phase, **values | details)


def dump(rank: int, frames: tuple[str, ...] = IN_BACKWARD, phase: Phase = Phase.BACKWARD, **details: Any) -> WorkerDump:
    told = details.pop("progress", None) or progress(rank, phase, phase_seconds=details.pop("phase_seconds", 5.7))
    threads = (ThreadStack(name="main", frames=frames, is_main=True),) if frames else ()
    values: dict[str, Any] = {
        "state": "S",
        "pid": 1000 + rank,
        "source": "faulthandler" if frames else "none",
    } | details
    return WorkerDump(local_rank=rank % 2, global_rank=rank, threads=threads, progress=told, **values)


def inside(sequence: int, operation: str = "all_reduce", shape: str = "float32[8]", group: str = "0") -> Collective:
    return Collective(sequence=sequence, operation=operation, shape=shape, group=group, is_inside=True)


class Lab:
    def __init__(self, terms: WatchTerms | None = None) -> None:
        self.watch = Watch(job_name="a-job")
        self.terms = terms or WatchTerms()
        self.now = micros(1000)
        self.effects: list[WatchEffect] = []
        self.stalled_for = 0.0
        self.enter(1)

    def enter(self, round_: int, *, is_active: bool = True) -> None:
        places = tuple(
            NodePlace(node=node, node_rank=NodeRank(index), host=f"host{index}", first_rank=2 * index, num_ranks=2)
            for index, node in enumerate(NODES)
        )
        scene = Scene(round=Round(round_), is_active=is_active, began_at=self.now, places=places)
        self.watch.follow(scene, self.terms, self.now)

    def after(self, seconds: float) -> None:
        self.now = Micros(self.now + micros(seconds))

    def tell(self, *workers: WorkerProgress, round_: int = 1) -> list[WatchEffect]:
        for node in NODES:
            of_node = tuple(worker for worker in workers if node_of(worker.global_rank) == node)
            if of_node:
                report = ProgressReport(node=node, incarnation=Incarnation(1), round=Round(round_), workers=of_node)
                self.watch.hear(report, self.now)
        return self.tick()

    def train(self, num_reports: int = 1) -> None:
        """Everything is well, and it is known what a step is."""
        for _ in range(num_reports):
            self.tell(*(progress(rank, phase_seconds=0.01, is_stalled=False) for rank in range(4)))
            self.after(5)

    def tick(self) -> list[WatchEffect]:
        effects = self.watch.tick(self.now)
        self.effects += effects
        return effects

    def answer(self, number: int, *dumps: WorkerDump, look: int | None = None) -> list[WatchEffect]:
        asked = self.asked()
        for node in NODES:
            of_node = tuple(each for each in dumps if node_of(each.global_rank) == node)
            if of_node:
                taken = LookTaken(
                    node=node,
                    incarnation=Incarnation(1),
                    look=asked[-1].order.order.look if look is None else look,
                    number=number,
                    workers=of_node,
                )
                self.watch.hear(taken, self.now)
        return self.tick()

    def look(self, *dumps: WorkerDump, second: tuple[WorkerDump, ...] | None = None) -> list[WatchEffect]:
        """Stall, and both dumps; without a second one everybody is as before."""
        self.tell(*(each.progress for each in dumps if each.progress is not None))
        first = [replace(each, progress=_earlier(each.progress)) for each in dumps]
        self.answer(0, *first)
        self.after(self.asked()[-1].order.order.again_after)
        return self.answer(1, *(second or dumps))

    def asked(self) -> list[AskNode]:
        return [effect for effect in self.effects if isinstance(effect, AskNode)]

    def acts(self) -> list[Act]:
        return [effect for effect in self.effects if isinstance(effect, Act)]

    def told(self) -> list[Verdict]:
        return [effect.past.verdict for effect in self.effects if isinstance(effect, Tell)]

    def pages(self) -> list[str]:
        return [effect.autopsy.text for effect in self.effects if isinstance(effect, Publish)]

    def ranks(self) -> list[int]:
        """To blame by the newest verdict."""
        return [culprit.global_rank for culprit in self.told()[-1].culprits]


def _earlier(told: WorkerProgress | None) -> WorkerProgress | None:
    return None if told is None else replace(told, phase_seconds=max(0.0, told.phase_seconds - 3.5))
