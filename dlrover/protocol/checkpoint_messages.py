"""
What trainers and their agent tell each other about snapshots, over the node's unix socket.

These are nudges: everything that counts stands in the segments, where a restarted agent finds it too. No trainer ever
waits for an answer.
"""

from __future__ import annotations

from msgspec import Struct


class OpenSnapshots(Struct, tag=True, frozen=True, kw_only=True):
    """This worker is going to save: own the directory of the segments."""

    home: str


class SnapshotSaved(Struct, tag=True, frozen=True, kw_only=True):
    """A slot is complete. Sum it, and persist it if it says so."""

    path: str
    """Of the segment."""
    slot: int
    generation: int
    step: int
    is_storage: bool = False


class SnapshotTaken(Struct, tag=True, frozen=True, kw_only=True):
    """From the agent: it holds this slot now, the trainer need not keep it any longer."""

    path: str
    generation: int
