"""
A virtual agent: the shipped decisions of an agent, beside workers, a stream and a clock that cost nothing.

What it does is decided in `dlrover/agent/decisions`, as on a real node; here its acts become events. Around them: the stream
that heals itself (`channel.py`), what waits for an answer (`outbox.py`), the workers (`workers.py`), sleep, and departure.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from dlrover.agent.decisions.acts import (
    Act,
    AskFailover,
    BindPort,
    Depart,
    DropOffer,
    EnterWhenStopped,
    Interrupted,
    KillWorkers,
    Note,
    OfferPort,
    Reattach,
    StartCheck,
    StartWorkers,
    StopCheck,
    StopWorkers,
    TellMaster,
    Waiting,
    WarmUp,
)
from dlrover.agent.decisions.decisions import AgentDecisions, AgentTerms
from dlrover.agent.decisions.departure import Departure
from dlrover.agent.decisions.strategies import FailoverStrategy, told_after
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.messages.frames import Request
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Desired,
    Incarnation,
    Join,
    JoinCheck,
    JoinRendezvous,
    NodeId,
    NodeRank,
    ReportFailure,
)
from dlrover.simulator.faults.sleep import Sleep
from dlrover.simulator.nodes.channel import VirtualChannel
from dlrover.simulator.nodes.leaving import VirtualLeaving
from dlrover.simulator.nodes.outbox import VirtualOutbox
from dlrover.simulator.nodes.ports import VirtualPorts
from dlrover.simulator.nodes.workers import Workers
from dlrover.simulator.parts import CheckGroup, SimulationPart, VirtualNode
from dlrover.simulator.truth import worlds
from dlrover.simulator.truth.saves import is_of_saves
from dlrover.simulator.truth.store import is_of_the_store
from dlrover.simulator.truth.syncs import is_of_syncs
from dlrover.simulator.virtual_time import SECOND, span

THINKING = (0.0, 5.0)
"""Seconds that an extension takes to say what shall follow a failure."""
STRATEGY_WEIGHTS = (80, 10, 9, 1)
"""In the order of `FailoverStrategy`."""


class VirtualAgent:
    """One process. Killed, it is gone; the launcher starts another one on the same node."""

    def __init__(self, simulation: SimulationPart, node: VirtualNode) -> None:
        self.sim = simulation
        self.node = node
        node.agent = self
        node.num_agents += 1
        node.disturbed_at = simulation.events.now
        self.life = f"{node.number}.{node.num_agents}"
        self.is_alive = True
        self.clock_offset = 0
        self.check: CheckGroup | None = None
        """The task of a node check that runs."""
        self.sleep = Sleep(self)
        self.channel = VirtualChannel(self)
        self.outbox = VirtualOutbox(self)
        self.workers = Workers(self)
        self.leaving = VirtualLeaving(self)
        self._ports = VirtualPorts(self)
        identity = Attach(
            launch=f"launch-{node.number}",
            host=f"host-{node.number}",
            terms=simulation.terms,
            local_world_size=simulation.shape.local_world_size,
            node_rank=None if node.rank is None else NodeRank(node.rank),
            life=self.life,
            platform_node=node.platform_id,
            node_type=node.node_type,
        )
        shape = simulation.shape
        self.is_warm = not shape.has_warm_up
        self._waits_to_enter: Join | JoinCheck | None = None
        """Until workers and node check have stopped."""
        terms = AgentTerms(master_addr="master:50001", lease=shape.detection.lease, has_failover=shape.has_failover)
        self.decisions = AgentDecisions(identity, self.workers, terms, is_warm=self.is_warm)
        self.me = self.decisions.membership
        self.channel.seek(0)

    # Who it is.

    @property
    def id(self) -> NodeId:
        return self.me.node

    @property
    def rank(self) -> NodeRank:
        return self.me.node_rank

    @property
    def incarnation(self) -> Incarnation:
        return self.me.incarnation

    @property
    def can_speak(self) -> bool:
        """Whether it is attached in a life that the master knows, and stays."""
        return self.channel.is_attached and not self.me.is_leaving and self.me.incarnation > 0

    # What reaches it.

    def presentation(self) -> Request:
        attach = self.decisions.presentation()
        return Request(id=0, body=replace(attach, master_epoch=self.channel.master_epoch))

    def attached(self, attached: Attached) -> None:
        is_renamed = self.rank not in (-1, attached.node_rank)
        former = self.incarnation
        self.do(self.decisions.attached(attached))
        if former not in (0, attached.incarnation):
            worlds.life_began(self)
        if is_renamed:
            self.sim.ledger.rename(self)
        self.clock_offset = attached.now - self.sim.events.now
        self.sim.machines.attached(self)
        self.leaving.attached()

    def take(self, desired: Desired) -> None:
        if self.decisions.take(desired):
            self.follow()

    def leave(self, departure: Departure) -> None:
        self.decisions.leave(departure)
        self.follow()

    def follow(self) -> None:
        now, since = self.sim.events.now, self.channel.outage_since
        self.do(self.decisions.follow(now / SECOND, 0.0 if since is None else (now - since) / SECOND))

    def refused(self, code: str) -> None:
        """For good."""
        self.sim.note(f"{self.node.label} is refused: {code}")
        self.decisions.rejected(code, "")
        self.follow()

    def mend(self, command: AgentCommand, code: str) -> None:
        """What a refusal of this command says about the life that we lead."""
        if self.me.is_leaving or is_of_the_store(command) or is_of_saves(command):
            return
        if is_of_syncs(command):
            self.sim.syncs.refused(self, command)
            return
        if code == ErrorCode.OFFER_USED:
            self.sim.note(f"{self.node.label} offered a used port")
        self.do(self.decisions.mend(command, code))

    # What it does.

    def do(self, acts: list[Act]) -> None:
        for act in acts:
            match act:
                case StartWorkers(world=world):
                    self.workers.want(world)
                case StopWorkers(cause=cause, is_patient=is_patient):
                    self.workers.want_none(cause, is_patient=is_patient)
                case KillWorkers():
                    self.workers.kill()
                case StartCheck(check=check):
                    self.sim.checks.enter(self, check.world)
                case StopCheck():
                    self.sim.checks.leave(self)
                case OfferPort(join=join):
                    self.do(self.decisions.joining.offer(join))
                case BindPort(join=join):
                    self.do(self.decisions.joining.offered(join, self._ports.bind()))
                case TellMaster(command=command):
                    self._tell(command)
                case Reattach():
                    self.channel.drop()
                case Depart(departure=departure):
                    self.leaving.go(departure)
                case DropOffer() | Interrupted() | Waiting() | Note():
                    pass
                case WarmUp():
                    low, high = self.sim.shape.costs.first_start
                    self.sim.events.after(span(self.sim.chance.nodes, low, high), self._warmed_up)
                case EnterWhenStopped(join=join):
                    self._waits_to_enter = join
                    self.workers_stopped()
                case AskFailover(report=report):
                    self.sim.events.after(span(self.sim.chance.nodes, *THINKING), self._decide_failover, report)
                case _:
                    assert_never(act)

    def _warmed_up(self, _: None = None) -> None:
        if self.is_alive and not self.sleep.puts_off(self._warmed_up, None):
            self.is_warm = True
            self.do(self.decisions.joining.warmed_up())

    def workers_stopped(self) -> None:
        """What runs equals what is wanted."""
        join = self._waits_to_enter
        if join is not None and self.workers.is_settled:
            self._waits_to_enter = None
            self.do(self.decisions.joining.stopped(join))

    def _decide_failover(self, report: ReportFailure) -> None:
        """The extension of the user has made up its mind."""
        if not self.is_alive or self.sleep.puts_off(self._decide_failover, report):
            return
        (strategy,) = self.sim.chance.nodes.choices(list(FailoverStrategy), STRATEGY_WEIGHTS)
        if strategy is FailoverStrategy.NODE_FAILOVER:
            self.sim.ledger.fail_node(self.node.fleet_rank, self.node.node_type)
        self.sim.ledger.num_aborted += strategy is FailoverStrategy.ABORTION_FAILOVER
        self.do(self.decisions.decided(told_after(report, strategy)))

    def _tell(self, command: AgentCommand) -> None:
        if isinstance(command, JoinRendezvous):
            worlds.node_joins(self)
        self.outbox.tell(command)
        if isinstance(command, JoinRendezvous):
            self._ports.joined(command)

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
