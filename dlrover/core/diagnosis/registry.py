"""The diagnosticians that every job has. Users' own run in the shell, because it is unknown what they do."""

from __future__ import annotations

from dlrover.core.diagnosis.checks.failures import CrashLoop, WorkerEnded
from dlrover.core.diagnosis.checks.idleness import HANG as HANG
from dlrover.core.diagnosis.checks.idleness import IdleDevices, IdleJob, ProfilerHang
from dlrover.core.diagnosis.checks.nodes import (
    ClockJump,
    Devices,
    DiskFull,
    MemoryLeak,
    NodeFailure,
    NodeInconsistency,
    OutOfMemory,
)
from dlrover.core.diagnosis.checks.progress import CorruptionVote, LossSpike, Numerics, Straggler
from dlrover.core.diagnosis.diagnostician import Diagnostician


def built_in() -> tuple[Diagnostician, ...]:
    return (
        WorkerEnded(),
        CrashLoop(),
        NodeFailure(),
        NodeInconsistency(),
        Devices(),
        Straggler(),
        Numerics(),
        LossSpike(),
        CorruptionVote(),
        OutOfMemory(),
        MemoryLeak(),
        DiskFull(),
        ClockJump(),
        ProfilerHang(),
        IdleDevices(),
        IdleJob(),
    )
