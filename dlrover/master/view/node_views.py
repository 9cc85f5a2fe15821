"""A node as people see it: what it does, whether it is well, what it uses. Small, because a page may show thousands."""

from __future__ import annotations

import enum
from collections import Counter

from msgspec import Struct

from dlrover.protocol.messages.fleet import FleetNodeStatus
from dlrover.protocol.messages.job import Micros, NodeStatus
from dlrover.protocol.messages.watch import ProgressReport, ResourceReport
from dlrover.protocol.units import MIB

MAX_WORKERS_SHOWN = 16
MAX_DEVICES_SHOWN = 16
MAX_TROUBLES_SHOWN = 4
MAX_LABEL = 200
LATE_BEATS = 3
"""Heartbeats that may be missing before a node looks unwell."""


class Health(enum.StrEnum):
    WELL = "well"
    IDLE = "idle"
    """Not training now, and not meant to: waiting, standby, finished."""
    UNWELL = "unwell"
    """Trains, but something is odd: stalled, slow, a device in trouble, late heartbeats."""
    LOST = "lost"


class WorkerView(Struct, frozen=True, omit_defaults=True, kw_only=True):
    rank: int
    phase: str = ""
    step: int | None = None
    is_stalled: bool = False


class NodeView(Struct, frozen=True, omit_defaults=True, kw_only=True):
    node: int
    rank: int
    label: str
    """By which people name it."""
    host: str = ""
    status: str = ""
    wish: str = ""
    health: Health = Health.WELL
    why: str = ""
    """What is wrong with it; empty: nothing."""
    phase: str = ""
    """What most of its workers do."""
    step: int | None = None
    incarnation: int = 0
    workers: tuple[WorkerView, ...] = ()
    cpu: float = 0.0
    cores: float = 0.0
    memory_bytes: int = 0
    memory_limit_bytes: int = 0
    shm_bytes: int = 0
    disk_free_bytes: int | None = None
    network_bytes_per_second: int = 0
    gpus: tuple[tuple[int, int, int], ...] = ()
    """Utilization in percent, used and whole memory in bytes."""
    has_resources: bool = False
    platform: str = ""
    """Name and phase on the platform; empty: it has none."""
    relaunches: int = 0


def node_view(
    status: NodeStatus,
    *,
    progress: ProgressReport | None,
    resources: ResourceReport | None,
    heard_at: Micros | None,
    now: Micros,
    heartbeat: float,
    fleet: FleetNodeStatus | None = None,
) -> NodeView:
    if progress is not None and progress.incarnation != status.incarnation:
        progress = None
    if resources is not None and resources.incarnation != status.incarnation:
        resources = None
    silent_for = 0.0 if heard_at is None else (now - heard_at) / 1e6
    health, why = _health(status, progress, resources, silent_for, heartbeat)
    phases = Counter(worker.phase.value for worker in progress.workers) if progress is not None else Counter()
    usage = resources
    return NodeView(
        node=status.node,
        rank=status.node_rank,
        label=status.label,
        host=status.host[:MAX_LABEL],
        status=status.status,
        wish=status.wish,
        health=health,
        why=why,
        phase=phases.most_common(1)[0][0] if phases else "",
        step=status.step,
        incarnation=status.incarnation,
        workers=() if progress is None else tuple(_workers(progress)),
        cpu=0.0 if usage is None else round(usage.cpu, 1),
        cores=0.0 if usage is None else round(usage.cores, 1),
        memory_bytes=0 if usage is None else _about(usage.memory_bytes, 16 * MIB),
        memory_limit_bytes=0 if usage is None else usage.memory_limit_bytes,
        shm_bytes=0 if usage is None else _about(usage.shm_bytes, 16 * MIB),
        disk_free_bytes=None
        if usage is None or usage.disk_free_bytes is None
        else _about(usage.disk_free_bytes, 128 * MIB),
        network_bytes_per_second=0
        if usage is None
        else _about(usage.network_in_bytes_per_second + usage.network_out_bytes_per_second, MIB // 8),
        gpus=() if usage is None else tuple(_gpus(usage)),
        has_resources=usage is not None,
        platform="" if fleet is None else f"{fleet.name} {fleet.phase.value}"[:MAX_LABEL],
        relaunches=0 if fleet is None else fleet.num_relaunches,
    )


def _health(
    status: NodeStatus,
    progress: ProgressReport | None,
    resources: ResourceReport | None,
    silent_for: float,
    heartbeat: float,
) -> tuple[Health, str]:
    if status.status in ("disconnected", "gone", "left"):
        return Health.LOST, f"the node is {status.status}"
    if silent_for > LATE_BEATS * heartbeat:
        return Health.UNWELL, "its heartbeats are late"
    stalled = [] if progress is None else [worker.global_rank for worker in progress.workers if worker.is_stalled]
    if stalled:
        ranks = ", ".join(map(str, stalled[:8])) + (", …" if len(stalled) > 8 else "")
        return Health.UNWELL, f"stalled: rank {ranks}"
    if resources is not None and resources.troubles:
        return Health.UNWELL, "; ".join(resources.troubles[:MAX_TROUBLES_SHOWN])[:MAX_LABEL]
    sick = [] if resources is None else [device for device in resources.devices if device.health]
    if sick:
        return Health.UNWELL, f"device {sick[0].index}: {sick[0].health}"[:MAX_LABEL]
    return (Health.WELL, "") if status.wish == "run" and status.status == "alive" else (Health.IDLE, "")


def _workers(progress: ProgressReport) -> list[WorkerView]:
    return [
        WorkerView(rank=worker.global_rank, phase=worker.phase.value, step=worker.step, is_stalled=worker.is_stalled)
        for worker in progress.workers[:MAX_WORKERS_SHOWN]
    ]


def _about(amount: float, unit: int) -> int:
    """What changes by less is no news for those who watch."""
    return round(amount / unit) * unit


def _gpus(usage: ResourceReport) -> list[tuple[int, int, int]]:
    return [
        (round(device.utilization), _about(device.used_memory_bytes, 128 * MIB), device.total_memory_bytes)
        for device in usage.devices[:MAX_DEVICES_SHOWN]
    ]
