"""
Nodes that the platform runs and from which no agent has come: a broken image, a network that leads nowhere, a start that hangs.

Silence cannot be told of a node that was never heard, so there is a deadline for the first word. The finding becomes a command like any other. A rank whose
nodes stay mute again and again is not exchanged any more: then something else is wrong, and people are told.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover.core.diagnosis.diagnostician import conclude
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import Strategy
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, micros
from dlrover.protocol.messages.job import Micros, NodeId, PlatformId
from dlrover.protocol.messages.requests import RelaunchNode
from dlrover.protocol.messages.watch import FaultClass, Verdict

NAME = "first_contact"
FIRST_WORD = 600.0
"""Seconds that a node may run before its agent has come."""
PERIOD = 30.0
"""Seconds between two looks: there may be ten thousand nodes."""
MAX_EXCHANGES = 2
"""Of one rank, by one master."""


class Mute(NamedTuple):
    verdict: Verdict
    wish: RelaunchNode | None
    """None: people have to see to it."""


class MuteNodes:
    def __init__(self, began_at: Micros) -> None:
        """`began_at`: of this master. Agents had no chance to come back before."""
        self._began_at = began_at
        self._next_look_at = Micros(began_at + micros(PERIOD))
        self._num_exchanges: dict[int, int] = {}
        self._told: dict[PlatformId, None] = {}

    def look(self, state: JobState, now: Micros) -> list[Mute]:
        """What is to be said and done; each node is told of once."""
        fleet = state.fleet
        if now < self._next_look_at or fleet is None or state.end is not None or fleet.is_suspended:
            return []
        self._next_look_at = Micros(now + micros(PERIOD))
        if fleet.spec.strategy is not Strategy.ALLREDUCE:
            return []  # others may run programs of their own, without an agent
        self._told = {node: None for node in self._told if node in fleet.nodes}
        found = []
        for node in [fleet.nodes[id_] for id_ in fleet.workers.running if id_ not in self._told]:
            if node.agent is not None or node.is_finished or node.running_since is None:
                continue
            mute_for = now - max(node.running_since, self._began_at)
            if mute_for >= micros(FIRST_WORD):
                self._told[node.id] = None
                found.append(self._conclude(node.id, node.rank, node.label, node.host, mute_for / MICROS_PER_SECOND))
        return found

    def _conclude(self, node: PlatformId, rank: int, label: str, host: str, seconds: float) -> Mute:
        count = self._num_exchanges.get(rank, 0)
        is_exchanged = count < MAX_EXCHANGES
        wish = None
        if is_exchanged:
            self._num_exchanges[rank] = count + 1
            wish = RelaunchNode(
                node=NodeId(-1), platform_node=node, reason=f"no agent has connected from it for {seconds:.0f} s"
            )
        verdict = conclude(
            NAME,
            FaultClass.UNKNOWN,
            (),
            f"{label} runs on {host or 'an unknown machine'}, and no agent has connected from it for {seconds:.0f} s.",
            confidence=0.7,
            reasoning="The master replaces it: it has done no work that could be lost, and a new node may connect."
            if is_exchanged
            else (
                f"It is node number {count + 1} of this rank, so another one would not help. See the output of "
                "its processes."
            ),
        )
        return Mute(verdict, wish)
