"""Jobs as Brain would have seen them, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.core.scaling.history.seen import COMPLETED, JobSeen, NodeSeen, NodeUsed, Recipe, UseRecord
from dlrover.protocol.messages.fleet import NodeType

RECIPE = Recipe(name="a-recipe", tenant="a-team", strategy="ParameterServerStrategy")


def used(*cores: float, memory: float | Sequence[float] = 100.0, first: int = 0) -> tuple[NodeUsed, ...]:
    sizes = [memory] * len(cores) if isinstance(memory, int | float) else list(memory)
    return tuple(NodeUsed(first + index, cpu, size) for index, (cpu, size) in enumerate(zip(cores, sizes, strict=True)))


def record(
    servers: Sequence[float] = (),
    *,
    workers: int = 1,
    worker_cpu: float = 1.0,
    memory: float | Sequence[float] = 100.0,
    worker_memory: float = 100.0,
    speed: float = 10.0,
    step: int = 100,
) -> UseRecord:
    return UseRecord(
        step=step,
        speed=speed,
        servers=used(*servers, memory=memory),
        workers=used(*[worker_cpu] * workers, memory=worker_memory, first=100),
    )


def servers(*cores: float, memory: float | Sequence[float] = 1000.0) -> tuple[NodeSeen, ...]:
    sizes = [memory] * len(cores) if isinstance(memory, int | float) else list(memory)
    return tuple(
        NodeSeen(id=index, node_type=NodeType.PS, cpu=cpu, memory_mb=size)
        for index, (cpu, size) in enumerate(zip(cores, sizes, strict=True))
    )


def completed(*records: UseRecord, uid: str = "former", **more: object) -> JobSeen:
    values = {"uid": uid, "recipe": RECIPE, "exit_reason": COMPLETED, "records": records}
    return JobSeen(**{**values, **more})  # type: ignore[arg-type]


def running(*records: UseRecord, **more: object) -> JobSeen:
    return JobSeen(**{"uid": "this", "recipe": RECIPE, "records": records, **more})  # type: ignore[arg-type]
