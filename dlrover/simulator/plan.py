"""
What a simulation is given, and what comes out of it: plain data that can be kept, compared and sent between processes.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.simulator.faults.kinds import Fault
from dlrover.simulator.shapes import Shape


class SeedPlan(Struct, frozen=True, kw_only=True):
    """All that a seed decides beforehand."""

    seed: int
    shape: Shape
    faults: tuple[Fault, ...]
    hours: float
    """So long faults happen."""
    is_thorough: bool = False
    """Everything is checked after each command, and each batch has its digest."""
    digest_every: int = 16
    is_cut_off: bool = False
    """The simulation ends with the faults, and no check asks how the job does."""


class Result(Struct, frozen=True, kw_only=True):
    """What became of it."""

    seed: int
    num_faults: int
    by_kind: dict[str, int]
    node_hours: float
    virtual_hours: float
    num_events: int
    num_commands: int
    num_rounds: int
    num_masters: int
    num_alarms: int
    """Nodes that were given up, and workers that were killed for having slept too long."""
    recovery: float
    """Seconds from the end of the faults to the next step: 0 if they did not stop it, or if it had ended."""
    num_records: int = 0
    """Of a dataset, in the newest model."""
    is_read_out: bool = False
    """Nothing of it is left to read."""
    num_breaths: int = 0
    """Talks of an agent with the survivors of a loss."""
    num_breaths_saved: int = 0
    """Of which so many left a step in memory."""
    reason: str
    """Why the job ended; empty if it was not waited for."""
    trace: str
    """Differs if anything differed."""
