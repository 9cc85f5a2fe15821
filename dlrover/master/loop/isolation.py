"""
Are the nodes silent, or is it the master that no node reaches?

Seen from here both look the same, but nodes do not fall silent all together, within a heartbeat or two; a master whose cable
was pulled hears no node from one moment to the next. Giving up all of them would stop a job that trains on, so then
no node is given up: not for silence, and not for a stream that ended, because a node that could come back cannot reach us.
A single node tells nothing about us, so the rule needs two.
"""

from __future__ import annotations

from dlrover.core.outcome import micros
from dlrover.protocol.messages.job import Detection, NodeId

LONGEST = 15
"""Silences, ten minutes by default, the time for which agents train on without a master: who was not heard of by then has
given up by itself, or never will be."""


class Isolation:
    """All times are elapsed microseconds of the master's clock."""

    def __init__(self) -> None:
        self._heard_at = 0
        self._nodes: dict[NodeId, None] = {}
        """Attached, or were when we were cut off."""

    def heard(self, now: int, detection: Detection) -> int:
        """A node reached us, no matter which. Returns for how many microseconds no node could; mostly 0."""
        lost = now - self._heard_at if self.is_cut_off(now, detection) else 0
        self._heard_at = now
        return lost

    def came(self, node: NodeId) -> None:
        self._nodes[node] = None

    def left(self, node: NodeId, now: int, detection: Detection) -> None:
        """Its stream ended, or it was given up. While we are cut off that says nothing about it."""
        if not self.is_cut_off(now, detection):
            self._nodes.pop(node, None)

    def stood_still(self, stalled: int) -> None:
        """We did not run for so long: no node could have been heard."""
        self._heard_at += stalled

    def is_cut_off(self, now: int, detection: Detection) -> bool:
        """From half of the silence on, so that it is known before the first node could be given up."""
        quiet = max(0.5 * detection.silence, 1.5 * detection.heartbeat)
        return len(self._nodes) > 1 and micros(quiet) <= now - self._heard_at < micros(LONGEST * detection.silence)
