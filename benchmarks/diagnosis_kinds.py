"""The kinds of faults in the corpus: what each of them truly is, how long a verdict may take, and what it needs of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from dlrover.protocol.messages.watch import FaultClass

NUM_RANKS = 4


@dataclass(frozen=True)
class Kind:
    fault: FaultClass
    within: float = 30.0
    """Seconds in which a verdict is waited for."""
    is_hang: bool = False
    """Training stands still: then the time to the verdict is measured against the look, and the page shows a stack."""
    takes_time: bool = False
    """Other verdicts come first, rightly: a crash loop begins with a crash."""
    steps_before: int = 25
    """Steps in peace before it."""
    of_node: bool = False
    """In a job of four nodes with one rank each; others have one node with four ranks."""
    has_stack: bool = False
    """Its stack is in the script, so that the page has to show it."""
    goes_on: bool = False
    """Training goes on by itself as soon as the cause is gone."""
    needs: tuple[str, ...] = ()


def _hang(
    fault: FaultClass, *needs: str, has_stack: bool = False, goes_on: bool = False, of_node: bool = False
) -> Kind:
    return Kind(fault, is_hang=True, has_stack=has_stack, goes_on=goes_on, of_node=of_node, needs=needs)


KINDS: dict[str, Kind] = {
    "kill": Kind(FaultClass.DEAD),
    "segmentation-fault": Kind(FaultClass.DEAD),
    "stop": _hang(FaultClass.STOPPED),
    "debugger": _hang(FaultClass.STOPPED, "root"),
    "deadlock-lock": _hang(FaultClass.DEADLOCK, has_stack=True),
    "deadlock-queue": _hang(FaultClass.DEADLOCK, has_stack=True),
    "deadlock-pipe": _hang(FaultClass.DEADLOCK, has_stack=True),
    "deadlock-socket": _hang(FaultClass.DEADLOCK, has_stack=True),
    "endless-sleep": _hang(FaultClass.DEADLOCK, has_stack=True),
    "waits-for-child": _hang(FaultClass.DEADLOCK, has_stack=True),
    "skipped-collective": _hang(FaultClass.SKIPPED_COLLECTIVE),
    "extra-collective": _hang(FaultClass.SKIPPED_COLLECTIVE),
    "mismatched-shape": Kind(FaultClass.MISMATCHED_COLLECTIVE),
    "mismatched-operation": _hang(FaultClass.MISMATCHED_COLLECTIVE),
    "threads-in-one-group": _hang(FaultClass.CONCURRENT_COLLECTIVES),
    "slow-rank": Kind(FaultClass.STRAGGLER, within=60.0, takes_time=True),
    "busy-loop": _hang(FaultClass.BUSY),
    "gil-held": _hang(FaultClass.BUSY),
    "loader-stuck": _hang(FaultClass.DATA_STALL),
    "loader-stopped": _hang(FaultClass.DATA_STALL),
    "loader-killed": Kind(FaultClass.DATA_STALL),
    "checkpoint-stall": _hang(FaultClass.STORAGE_STALL),
    "uninterruptible": _hang(FaultClass.STORAGE_STALL, "gcc"),
    "disk-stall": _hang(FaultClass.STORAGE_STALL, "root", "fuse", goes_on=True),
    "network-loss": _hang(FaultClass.NETWORK, "root", "networks", of_node=True),
    "clock-jump": Kind(FaultClass.CLOCK_JUMP, within=60.0, of_node=True, goes_on=True, needs=("root", "networks", "gcc")),
    "io-error": Kind(FaultClass.STORAGE_STALL),
    "leak": Kind(FaultClass.MEMORY_LEAK, within=120.0, takes_time=True),
    "nan": Kind(FaultClass.NUMERICS),
    "loss-spike": Kind(FaultClass.LOSS_SPIKE, within=60.0, steps_before=1000),
    "flipped-bit": Kind(FaultClass.CORRUPTION, within=45.0),
    "full-disk": Kind(FaultClass.DISK_FULL, needs=("root",)),
    "process-limit": Kind(FaultClass.PROCESS_LIMIT),
    "fork-limit": Kind(FaultClass.PROCESS_LIMIT, needs=("root", "pids")),
    "memory-error": Kind(FaultClass.OUT_OF_MEMORY),
    "memory-kill": Kind(FaultClass.OUT_OF_MEMORY, needs=("root", "memory")),
    "exception": Kind(FaultClass.EXCEPTION),
    "exit-code": Kind(FaultClass.EXCEPTION),
    "crash-loop": Kind(FaultClass.CRASH_LOOP, within=60.0, takes_time=True, goes_on=True),
}  # fmt: skip
FIRST = "slow-first-step"
"""What a healthy job begins with."""
HEALTHY = (FIRST, "short-pause", "pause-with-cpu", "pause-with-io", "evaluation")
