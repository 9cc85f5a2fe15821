"""
Names for the numbers by which nodes, lives, rounds and instants are told apart.

They stand alone because every family of messages needs them and `messages` needs every family.
"""

from __future__ import annotations

from typing import NewType

NodeId = NewType("NodeId", int)
"""One launch of a node. A replacement gets a new one."""
NodeRank = NewType("NodeRank", int)
"""A stable slot of the job, inherited by the replacement of a node."""
Incarnation = NewType("Incarnation", int)
"""Counts the agent starts of a node rank over the job's life, so that one life can be told from the next."""
Round = NewType("Round", int)
"""Number of a completed rendezvous; 0 means none yet."""
Micros = NewType("Micros", int)
"""An instant on the master's clock, in integer microseconds. Never goes back."""
PlatformId = NewType("PlatformId", int)
"""What the platform runs as one node (a pod, an actor, a local process): its number within the job, never used again."""

MICROS_PER_SECOND = 1_000_000

_LONGEST = 1e9
"""Seconds. Users may give infinity for a timeout; integers cannot hold it, thirty years are as good."""


def micros(seconds: float) -> int:
    """A duration in the unit of the master's clock."""
    return round(min(seconds, _LONGEST) * MICROS_PER_SECOND)
