"""
Everything that the core says in a simulated job, folded into one number for each seed.

A trace holds what was written down: commands and the state after them. This holds the rest: each reply, effect and verdict, the events
that people read, the answers to questions, and which deadlines have passed at which microsecond. The journal of the job is walked
once more for it, as `dlrover replay` would.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from dlrover.core.job import DECISION_VERSION, Job
from dlrover.simulator.campaign import draw_plan
from dlrover.simulator.simulation import Simulation
from tests.referees.questions import said

TOLD = Path(__file__).parent / "told.txt"
SEEDS = range(1, 201)
ASK_EVERY = 16
"""Records between two rounds of questions."""


def told() -> str:
    """With the version of the decisions: another version may decide otherwise."""
    return "".join(f"{line}\n" for line in (f"decision version {DECISION_VERSION}", *map(told_of, SEEDS)))


def told_of(seed: int) -> str:
    simulation = Simulation(draw_plan(seed))
    simulation.run()
    return f"{seed} {fold(simulation.masters.journal.archive)}"


def fold(records: list[bytes]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for each in said(Job(), records, ASK_EVERY):
        found.update(_ENCODER.encode(each))
    return found.hexdigest()


_ENCODER = msgspec.msgpack.Encoder()
