"""
A virtual agent: behaves towards the master as the real one does, with workers that cost nothing.

It follows the newest wish, keeps one stream to the master that heals itself, repeats what was never answered under its
old number, gives its life up when the master has, and kills its workers first when it wakes up too late. What the real
agent does in `dlrover/agent/agent.py` and `dlrover/agent/workers/driver.py` is done here, event by event. Each part of it keeps
its own state: the stream (`channel.py`), what waits for an answer (`outbox.py`), wishes, workers, sleep and departure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from dlrover.protocol.messages.check import ExitClass, ReportCheck
from dlrover.protocol.messages.frames import Request
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Incarnation,
    JoinRendezvous,
    NodeId,
    NodeRank,
    PlatformId,
    ReportFailure,
    ReportFinished,
    StopCause,
)
from dlrover.simulator.faults.departure import EXIT_FAILED, Departure
from dlrover.simulator.faults.network import VirtualLink
from dlrover.simulator.faults.sleep import Sleep
from dlrover.simulator.nodes.channel import VirtualChannel
from dlrover.simulator.nodes.outbox import VirtualOutbox
from dlrover.simulator.nodes.wishes import Wishes
from dlrover.simulator.nodes.workers import Workers
from dlrover.simulator.truth.saves import is_of_saves
from dlrover.simulator.truth.store import is_of_the_store
from dlrover.simulator.truth.syncs import is_of_syncs

if TYPE_CHECKING:
    from dlrover.simulator.nodes.checks import CheckGroup
    from dlrover.simulator.simulation import Simulation


class VirtualNode:
    """One launch on one machine: agents come and go on it."""

    def __init__(self, number: int, rank: int | None) -> None:
        self.number = number
        self.rank = rank
        """Asked for; None lets the master choose."""
        self.link = VirtualLink()
        self.is_powered = True
        self.is_power_lost = False
        self.is_slow = False
        self.agent: VirtualAgent | None = None
        self.num_agents = 0
        self.num_ports = 0
        self.platform_id = PlatformId(-1)
        """What the platform knows it by; -1: nobody brought it."""
        self.fleet_rank = -1
        self.breakage: ExitClass | None = None
        """How a node check fails on it; None: it does not."""
        self.is_sluggish = False
        """Slow in a node check."""
        self.exit_code: int | None = None
        """Of an agent that ended by itself."""
        self.disturbed_at = 0
        """When something last happened to it that could keep it from joining."""

    @property
    def label(self) -> str:
        return f"node {self.number}"


class VirtualAgent:
    """One process. Killed, it is gone; the launcher starts another one on the same node."""

    def __init__(self, simulation: Simulation, node: VirtualNode) -> None:
        self.sim = simulation
        self.node = node
        node.agent = self
        node.num_agents += 1
        node.disturbed_at = simulation.events.now
        self.life = f"{node.number}.{node.num_agents}"
        self.is_alive = True
        self.id = NodeId(-1)
        self.rank = NodeRank(-1)
        self.incarnation = Incarnation(0)
        self.clock_offset = 0
        self.check: CheckGroup | None = None
        """The task of a node check that runs."""
        self.sleep = Sleep(self)
        self.channel = VirtualChannel(self)
        self.outbox = VirtualOutbox(self)
        self.wishes = Wishes(self)
        self.workers = Workers(self)
        self.departure = Departure(self)
        self.channel.seek(0)

    # Who it is.

    @property
    def can_speak(self) -> bool:
        """Whether it is attached in a life that the master knows, and stays."""
        return self.channel.is_attached and not self.departure.has_begun and self.incarnation > 0

    def presentation(self) -> Request:
        attach = Attach(
            launch=f"launch-{self.node.number}",
            host=f"host-{self.node.number}",
            terms=self.sim.terms,
            local_world_size=self.sim.shape.local_world_size,
            node_rank=None if self.node.rank is None else NodeRank(self.node.rank),
            incarnation=self.incarnation,
            running_round=self.workers.claimed_round(),
            is_finished=self.workers.finished_round > 0,
            life=self.life,
            master_epoch=self.channel.master_epoch,
            world=self.workers.claimed_world(),
            former_rank=self.rank if self.rank >= 0 else None,
            platform_node=self.node.platform_id,
        )
        return Request(id=0, body=attach)

    def attached(self, attached: Attached) -> None:
        if self.incarnation and attached.incarnation != self.incarnation and not self.departure.has_begun:
            self._forget_former_life()
        is_renamed = self.rank not in (-1, attached.node_rank)
        self.id, self.rank, self.incarnation = attached.node, attached.node_rank, attached.incarnation
        if is_renamed:
            self.sim.ledger.rename(self)
        self.clock_offset = attached.now - self.sim.events.now
        self.sim.machines.attached(self)
        self.departure.attached()

    def refused(self, code: str) -> None:
        """For good: nobody wants it here."""
        self.sim.note(f"{self.node.label} is refused: {code}")
        self.departure.give_up(EXIT_FAILED)

    def mend(self, command: AgentCommand, code: str) -> None:
        """What a refusal of this command says about the life that we lead."""
        if self.departure.has_begun:
            return
        if isinstance(command, JoinRendezvous) and code == "offer-used":
            self.sim.note(f"{self.node.label} offered a used port")
            self.wishes.offer_another(command)
            return
        if is_of_the_store(command) or is_of_saves(command):
            return
        if is_of_syncs(command):
            self.sim.syncs.refused(self, command)
            return
        assert isinstance(command, JoinRendezvous | ReportFailure | ReportFinished | ReportCheck), "nothing to mend"
        if command.incarnation != self.incarnation or not self.incarnation:
            return
        if code == "wrong-sender" and command.node != self.id:
            self.outbox.tell(replace(command, node=self.id))
            return
        is_failure_untold = isinstance(command, ReportFailure) and code not in ("too-old", "unknown-round")
        if code == "stale-incarnation" or is_failure_untold:
            self._forget_former_life()
            self.incarnation = Incarnation(0)
            self.channel.drop()
        elif isinstance(command, ReportFinished):
            self.channel.drop()

    def _forget_former_life(self) -> None:
        self.workers.want_none(StopCause.FAILURE)
        self.sim.checks.leave(self)
        self.wishes.forget()

    # Its end.

    def exit(self) -> None:
        """The agent process ends by itself, and its launcher with it."""
        self._vanish()
        self.channel.drop()
        self.sim.machines.exited(self)

    def die(self, *, is_seen: bool) -> None:
        """Killed, with its workers. `is_seen`: a kernel is left to close the stream."""
        self._vanish()
        self.channel.die(is_seen=is_seen)

    def _vanish(self) -> None:
        self.is_alive = False
        self.check = None
        if self.node.agent is self:
            self.node.agent = None
        self.workers.die()
