"""The diagnosticians that every job has. Users' own run in the shell, because nobody knows what they do."""

from __future__ import annotations

from dlrover.core.diagnosis.diagnostician import Diagnostician
from dlrover.core.diagnosis.failure_checks import CrashLoop, WorkerEnded
from dlrover.core.diagnosis.node_checks import (
    ClockJump,
    Devices,
    DiskFull,
    MemoryLeak,
    NodeFailure,
    NodeInconsistency,
    OutOfMemory,
)
from dlrover.core.diagnosis.progress_checks import CorruptionVote, LossSpike, Numerics, Straggler
from dlrover.core.diagnosis.rest_checks import HANG as HANG
from dlrover.core.diagnosis.rest_checks import IdleDevices, IdleJob, ProfilerHang


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
