"""
A virtual agent: behaves towards the master as the real one does, with workers that cost nothing.

It follows the newest wish, keeps one stream to the master that heals itself, repeats what was never answered under its
old number, gives its life up when the master has, and kills its workers first when it wakes up too late. What the real
agent does in `dlrover/agent/agent.py` and `dlrover/agent/driver.py` is done here, event by event.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dlrover.protocol.check_messages import ExitClass, ReportCheck
from dlrover.protocol.frames import Answer, Push, Refusal, Request
from dlrover.protocol.messages import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    AgentCommand,
    Attach,
    Attached,
    Check,
    Desired,
    End,
    FailureKind,
    Idle,
    Incarnation,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Micros,
    NodeId,
    NodeRank,
    PlatformId,
    Query,
    ReportFailure,
    ReportFinished,
    Round,
    Run,
    StopCause,
    Wait,
    WorkerFailure,
    WorldSpec,
)
from dlrover.simulator import machines
from dlrover.simulator.data import is_of_data
from dlrover.simulator.events import SECOND, micros, span
from dlrover.simulator.network import CLOSE, KEEPALIVE, PULSE, Connection, Downward, Link
from dlrover.simulator.saves import is_of_saves
from dlrover.simulator.store import is_of_the_store
from dlrover.simulator.syncs import is_of_syncs

if TYPE_CHECKING:
    from dlrover.simulator.checks import CheckGroup
    from dlrover.simulator.simulation import Simulation

FAREWELL = 2 * SECOND
MASTER_GRACE = 600 * SECOND
"""Workers train on without a master for so long."""
PATIENCE_WHEN_FINISHED = 30 * SECOND
ATTACH_TIMEOUT = 30 * SECOND
LONGEST_PAUSE = 2.0
"""Seconds between two attempts to connect, at most."""
FIRST_PAUSE = 0.02
LATE_FAILURE_ODDS = 0.02
"""How often workers that are being stopped turn out to have failed by themselves."""

EXIT_FAILED, EXIT_MASTER_LOST, EXIT_TERMINATED = 1, 23, 143

_SIGNALS = {FailureKind.SIGNAL: 11, FailureKind.OUT_OF_MEMORY: 9, FailureKind.STOPPED_BY_US: 9}


class VirtualNode:
    """One launch on one machine: agents come and go on it."""

    def __init__(self, number: int, rank: int | None) -> None:
        self.number = number
        self.rank = rank
        """Asked for; None lets the master choose."""
        self.link = Link()
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


class Group:
    """The workers of one round on one node."""

    __slots__ = ("finishes_at", "is_stopping", "is_up", "started_at", "world")

    def __init__(self, world: WorldSpec, now: int) -> None:
        self.world = world
        self.started_at = now
        self.is_up = False
        """All were forked; before they are being started."""
        self.is_stopping = False
        self.finishes_at: int | None = None


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
        self.frozen_since: int | None = None
        self._inbox: list[tuple[Connection, tuple[Downward, ...]]] = []
        """What arrived while it was frozen."""
        self._thawing: list[tuple[Callable[..., None], Any]] = []
        """What should have happened meanwhile: an act and its argument."""

        self.id = NodeId(-1)
        self.rank = NodeRank(-1)
        self.incarnation = Incarnation(0)
        self.clock_offset = 0

        self.connection: Connection | None = None
        self.is_attached = False
        self.outage_since: int | None = simulation.events.now
        self.is_seeking = False
        self._envelope = FIRST_PAUSE
        self.master_epoch = 0
        self._desired_number = -1
        self.waiting: dict[int, AgentCommand] = {}
        self._last_sequence = 0
        self._held: dict[int, None] = {}
        self._is_resend_planned = False

        self.desired: Desired | None = None
        self.joined_round = Round(0)
        self.has_offer = False
        self.started_round = Round(0)
        self.finished_round = Round(0)
        self._finished_at = 0
        self._world: WorldSpec | None = None
        """Of the newest workers that were started."""
        self.group: Group | None = None
        self._target: WorldSpec | None = None
        self._cause = StopCause.MEMBERSHIP
        self._num_groups = 0
        self.check: CheckGroup | None = None
        """The task of a node check that runs."""
        self._checked_round = Round(0)
        self._joined_name = ""
        self._questions: dict[int, Query] = {}
        self._num_questions = 0

        self.is_leaving = False
        self.exit_code = 0
        self._farewell: LeaveReason | None = None
        """Said once the workers have stopped."""
        self._goodbye_sequence = 0
        self._goodbye_incarnation = Incarnation(0)
        self._seek(0)

    # The channel.

    def _seek(self, pause: int) -> None:
        """Try to connect after a pause."""
        self.is_seeking = True
        self.sim.events.after(pause, self.attempt)

    def attempt(self, _: None = None) -> None:
        """Connect and present ourselves, or wait until there is somebody."""
        if not self.is_alive or not self.is_seeking:
            return
        if self.frozen_since is not None:
            self._thawing.append((self.attempt, None))
            return
        master = self.sim.listening_master()
        if master is None or self.node.link.is_cut:
            self.sim.wait_for_master(self)
            return
        self.is_seeking = False
        self.connection = Connection(self, self.node.link, master, self.sim.events.now)
        self.sim.opened(self.connection)
        self.sim.network.send_up(self.connection, self._presentation())
        self.sim.events.after(ATTACH_TIMEOUT, self._check_attached, self.connection)

    def _presentation(self) -> Request:
        shape = self.sim.shape
        running = self.group.world.round if self.group is not None else Round(0)
        attach = Attach(
            launch=f"launch-{self.node.number}",
            host=f"host-{self.node.number}",
            terms=self.sim.terms,
            local_world_size=shape.local_world_size,
            node_rank=None if self.node.rank is None else NodeRank(self.node.rank),
            incarnation=self.incarnation,
            running_round=max(running, self.finished_round),
            is_finished=self.finished_round > 0,
            life=self.life,
            master_epoch=self.master_epoch,
            world=self._claimed_world(),
            former_rank=self.rank if self.rank >= 0 else None,
            platform_node=self.node.platform_id,
        )
        return Request(id=0, body=attach)

    def _claimed_world(self) -> WorldSpec | None:
        """The world whose workers run here, or have finished here."""
        running = self.group.world.round if self.group is not None else Round(0)
        world, round_ = self._world, max(running, self.finished_round)
        return world if world is not None and world.round == round_ else None

    def _check_attached(self, connection: Connection) -> None:
        if self.is_alive and self.connection is connection and not self.is_attached and self.frozen_since is None:
            self.drop_connection()

    def drop_connection(self, *, is_lossy: bool = False) -> None:
        """Our end of the stream is closed, whatever the other end knows. Tries again, as long as we live."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        connection.is_open_below = False
        connection.is_lossy = is_lossy
        self.sim.network.send_up(connection, CLOSE)
        self._detach()

    def _detach(self) -> None:
        if self.is_attached or self.outage_since is None:
            self.outage_since = self.sim.events.now
            self._plan_outage_check()
        self.is_attached = False
        self._held.clear()
        self._questions.clear()
        if self.is_alive and not self._is_closing():
            pause = span(self.sim.chance.network, 0.0, self._envelope)
            self._envelope = min(2 * self._envelope, LONGEST_PAUSE)
            self._seek(pause)

    def _is_closing(self) -> bool:
        """A farewell that was heard, or was not heard in time, is the last word."""
        return self.is_leaving and self._farewell is None

    def _plan_outage_check(self) -> None:
        patience = PATIENCE_WHEN_FINISHED if self.finished_round else MASTER_GRACE
        self.sim.events.after(patience + 1, self._check_outage)

    def _check_outage(self, _: None = None) -> None:
        """Without a master for too long: stop, and go."""
        if not self.is_alive or self.outage_since is None or self.is_leaving:
            return
        if self.frozen_since is not None:
            self._thawing.append((self._check_outage, None))
            return
        since = max(self.outage_since, self._finished_at) if self.finished_round else self.outage_since
        patience = PATIENCE_WHEN_FINISHED if self.finished_round else MASTER_GRACE
        if self.sim.events.now - since > patience:
            self.is_leaving = True
            self.exit_code = 0 if self.finished_round else EXIT_MASTER_LOST
            self._want_none(StopCause.FAILURE)
            self._leave_when_stopped()

    def check_keepalive(self, connection: Connection) -> None:
        """Nothing answers on this stream any more: end it. A frozen agent looks when it wakes up."""
        is_awake = self.is_alive and self.connection is connection and self.frozen_since is None
        if is_awake and (connection.link.is_cut or not self.sim.answers(connection)):
            self.drop_connection()

    def keepalive_soon(self) -> None:
        connection = self.connection
        if connection is not None:
            self.sim.events.after(span(self.sim.chance.network, *KEEPALIVE), self.check_keepalive, connection)

    def is_beating(self, connection: Connection) -> bool:
        """Whether heartbeats come through on this stream."""
        return (
            self.connection is connection
            and self.is_alive
            and self.frozen_since is None
            and not connection.link.num_cuts_up
        )

    def pulse(self) -> None:
        """The first heartbeat after a silence."""
        if self.connection is not None:
            self.sim.network.send_up(self.connection, PULSE)

    def receive(self, connection: Connection, parcels: tuple[Downward, ...]) -> None:
        if self.frozen_since is not None:
            self._inbox.append((connection, parcels))
            return
        for parcel in parcels:
            if not self.is_alive or self.connection is not connection:
                return
            match parcel:
                case Answer(id=0, body=Attached() as attached):
                    self._accept(attached)
                case Answer(id=number, body=body) if number < 0:
                    if (query := self._questions.pop(number, None)) is not None:
                        self.sim.store.read(query, body)
                        self.sim.saves.read(self, query, body)
                        self.sim.syncs.read(self, query, body)
                case Answer(id=number, body=body):
                    is_known = (
                        connection.master.journal is self.sim.journal
                    )  # else it was lost meanwhile, and this with it
                    if number in self.waiting and is_known:
                        self.sim.store.answered(self.waiting[number], body)
                        self.sim.saves.answered(self.waiting[number], body)
                        self.sim.syncs.answered(self, self.waiting[number], body)
                        if self.sim.data is not None:
                            self.sim.data.answered(self, number, self.waiting[number], body)
                    self._settled(number)
                case Refusal(id=number, retry_after=None):
                    if number < 0:
                        self._questions.pop(number, None)  # nobody has set it yet
                    elif number:
                        self._refused(number, parcel.code)
                    else:
                        self._refused_for_good(parcel.code)
                case Refusal(id=number, retry_after=float() as retry_after):
                    self._hold(number, retry_after)
                case Push(desired=desired):
                    self._take(desired)
                case _:
                    self.connection = None
                    connection.is_open_below = False
                    self._detach()

    def _accept(self, attached: Attached) -> None:
        if attached.master_epoch < self.master_epoch:
            self.drop_connection()
            return
        self.master_epoch = attached.master_epoch
        self.is_attached = True
        self.outage_since = None
        self._envelope = FIRST_PAUSE
        self._on_attached(attached)
        self._desired_number = attached.desired.number
        for sequence in list(self.waiting):  # before anything new: numbers arrive in order
            self._send(sequence)
        self._on_desired(attached.desired)

    def _take(self, desired: Desired) -> None:
        if desired.master_epoch < self.master_epoch:
            return
        self.master_epoch = desired.master_epoch
        if desired.number > self._desired_number:
            self._desired_number = desired.number
            self._on_desired(desired)

    def _hold(self, number: int, retry_after: float) -> None:
        if number and number not in self.waiting:
            return
        self._held[number] = None
        if not self._is_resend_planned:
            self._is_resend_planned = True
            pause = span(self.sim.chance.network, retry_after, 2 * retry_after)
            self.sim.events.after(pause, self._send_held, self.connection)

    def _send_held(self, connection: Connection | None) -> None:
        self._is_resend_planned = False
        held, self._held = self._held, {}
        if not self.is_alive or connection is None or self.connection is not connection:
            return
        if self.frozen_since is not None:
            self._held = held
            self._is_resend_planned = True
            self._thawing.append((self._send_held, connection))
            return
        for number in sorted(held):
            if not number:
                self.sim.network.send_up(connection, self._presentation())
            else:
                self._send(number)

    def tell(self, command: AgentCommand) -> int:
        self._last_sequence += 1
        self.waiting[self._last_sequence] = command
        if self.is_attached:
            self._send(self._last_sequence)
        return self._last_sequence

    def tell_soon(self, command: AgentCommand) -> None:
        """Now, or when it wakes up."""
        if self.frozen_since is not None:
            self._thawing.append((self.tell_soon, command))
        elif self.is_alive:
            self.tell(command)

    def ask(self, query: Query) -> None:
        """A question is not repeated."""
        if self.is_alive and self.connection is not None and self.is_attached and self.frozen_since is None:
            self._num_questions += 1
            self._questions[-self._num_questions] = query
            self.sim.network.send_up(self.connection, Request(id=-self._num_questions, body=query))

    def _send(self, sequence: int) -> None:
        command = self.waiting.get(sequence)
        if command is not None and self.connection is not None:
            request = Request(id=sequence, body=command, sequence=sequence)
            self.sim.network.send_up(self.connection, request)

    def _settled(self, sequence: int) -> None:
        self.sim.heard_answer(self, sequence)
        self.waiting.pop(sequence, None)
        if sequence == self._goodbye_sequence:
            self._heard_goodbye()

    def _refused(self, sequence: int, code: str) -> None:
        command = self.waiting.pop(sequence, None)
        if self.sim.data is not None and is_of_data(command):
            self.sim.data.refused(self, sequence)
        elif sequence == self._goodbye_sequence:
            self._heard_goodbye()
        elif command is not None and not self.is_leaving:
            self._mend(command, code)

    def _mend(self, command: AgentCommand, code: str) -> None:
        if isinstance(command, JoinRendezvous) and code == "offer-used":
            self.sim.note(f"{self.node.label} offered a used port")
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
            self.tell(replace(command, node=self.id))
            return
        is_failure_untold = isinstance(command, ReportFailure) and code not in ("too-old", "unknown-round")
        if code == "stale-incarnation" or is_failure_untold:
            self._forget_former_life()
            self.incarnation = Incarnation(0)
            self.drop_connection()
        elif isinstance(command, ReportFinished):
            self.drop_connection()

    def _refused_for_good(self, code: str) -> None:
        self.sim.note(f"{self.node.label} is refused: {code}")
        self.is_leaving = True
        self.exit_code = EXIT_FAILED
        self._want_none(StopCause.FAILURE)
        self._leave_when_stopped()

    # What the master wants.

    def _on_attached(self, attached: Attached) -> None:
        if self.incarnation and attached.incarnation != self.incarnation and not self.is_leaving:
            self._forget_former_life()
        is_renamed = self.rank not in (-1, attached.node_rank)
        self.id, self.rank, self.incarnation = attached.node, attached.node_rank, attached.incarnation
        if is_renamed:
            self.sim.ledger.rename(self)
        self.clock_offset = attached.now - self.sim.events.now
        self.sim.attached(self)
        if self._farewell is not None and self._goodbye_sequence and self._goodbye_incarnation != self.incarnation:
            self._say_goodbye()

    def _forget_former_life(self) -> None:
        self._want_none(StopCause.FAILURE)
        self.sim.checks.leave(self)
        self.has_offer = False
        self.desired = None
        self.joined_round = self.started_round = self._checked_round = Round(0)

    def _on_desired(self, desired: Desired) -> None:
        if not self.incarnation:
            return
        newest = self.desired
        if newest is None or (desired.master_epoch, desired.number) >= (newest.master_epoch, newest.number):
            self.desired = desired
            if not self.is_leaving:
                self._obey(desired)

    def _obey(self, desired: Desired) -> None:
        if not isinstance(desired.wish, Check):
            self.sim.checks.leave(self)
        match desired.wish:
            case Join() | JoinCheck() as join:
                self._enter_round(join)
            case Check(world=world):
                if world.round > self._checked_round:
                    self._checked_round = world.round
                    self.has_offer = False
                    self.sim.checks.enter(self, world)
            case Run(world=world):
                if world.round > self.started_round:
                    self.started_round = world.round
                    self.finished_round = Round(0)
                    self.has_offer = False
                    self._want(world)
            case Wait() | Idle():
                if self._target is not None:
                    self._want_none(StopCause.MEMBERSHIP)
            case Leave(exit_code=exit_code):
                self.exit_code = exit_code
                self.part(LeaveReason.DISMISSED, StopCause.MEMBERSHIP)
            case End(end=end):
                self.is_leaving = True
                self.exit_code = end.exit_code
                self._farewell = LeaveReason.JOB_ENDED
                self._want_none(StopCause.END_OF_JOB)
                self._leave_when_stopped()

    def _enter_round(self, join: Join | JoinCheck) -> None:
        name = NODE_CHECK_RENDEZVOUS if isinstance(join, JoinCheck) else TRAINING_RENDEZVOUS
        if (self._joined_name, self.joined_round) == (name, join.round) and self.has_offer:
            return
        if self._target is not None:
            self._want_none(join.cause)
        self.node.num_ports += 1
        self.has_offer = True
        self._joined_name, self.joined_round = name, join.round
        if isinstance(join, JoinCheck) and join.round <= self._checked_round:
            self._checked_round = Round(join.round - 1)
        self.tell(
            JoinRendezvous(
                node=self.id,
                incarnation=self.incarnation,
                round=join.round,
                local_world_size=self.sim.shape.local_world_size,
                offer=f"host-{self.node.number}:{self.node.num_ports}",
                name=name,
            )
        )

    # Leaving.

    def part(self, reason: LeaveReason, cause: StopCause) -> None:
        """The machine will be taken away, or is not needed: say so, stop the workers meanwhile, and go."""
        self.is_leaving = True
        self._farewell = reason
        if reason is LeaveReason.PREEMPTED:
            self.exit_code = EXIT_TERMINATED
        self.sim.checks.leave(self)
        self._want_none(cause)
        self._say_goodbye()
        self._leave_when_stopped()

    def _leave_when_stopped(self) -> None:
        if not self.is_alive or self.group is not None:
            return  # asked again when it has stopped
        if self._farewell is LeaveReason.JOB_ENDED and not self._goodbye_sequence:
            self._say_goodbye()
        elif self._farewell is None:
            self.exit()

    def _say_goodbye(self) -> None:
        reason = self._farewell
        if reason is None or not self.is_attached:
            self._heard_goodbye()
            return
        self._goodbye_incarnation = self.incarnation
        self._goodbye_sequence = self.tell(LeaveJob(node=self.id, incarnation=self.incarnation, reason=reason))
        self.sim.events.after(FAREWELL, self._stop_waiting, self._goodbye_sequence)

    def _stop_waiting(self, sequence: int) -> None:
        if self.is_alive and sequence == self._goodbye_sequence and self._farewell is not None:
            if self.frozen_since is not None:
                self._thawing.append((self._stop_waiting, sequence))
            else:
                self._heard_goodbye()

    def _heard_goodbye(self) -> None:
        """Or nobody will hear it: then close, because a healed stream would bring us back."""
        self._farewell = None
        self.drop_connection()
        self._leave_when_stopped()

    def exit(self) -> None:
        """The agent process ends by itself, and its launcher with it."""
        self._vanish()
        self.drop_connection()
        machines.exited(self.sim, self)

    def die(self, *, is_seen: bool) -> None:
        """Killed, with its workers. `is_seen`: a kernel is left to close the stream."""
        self._vanish()
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.is_open_below = False
            if is_seen:
                self.sim.network.send_up(connection, CLOSE)
            else:
                self.sim.muted(connection)

    def _vanish(self) -> None:
        self.is_alive = False
        self.check = None
        if self.node.agent is self:
            self.node.agent = None
        group, self.group = self.group, None
        if group is not None and group.is_up:
            machines.workers_ended(self.sim, self, group, None)

    # Workers.

    def _want(self, world: WorldSpec) -> None:
        self._target = world
        self._approach()

    def _want_none(self, cause: StopCause) -> None:
        self._target, self._cause = None, cause
        self._approach()

    def _approach(self) -> None:
        group = self.group
        if group is not None:
            if group.world is not self._target and not group.is_stopping:
                self._begin_stop(group)
        elif self._target is not None and self.is_alive:
            self._begin_start(self._target)

    def _begin_start(self, world: WorldSpec) -> None:
        costs, chance = self.sim.shape.costs, self.sim.chance.nodes
        self._world = world
        group = self.group = Group(world, self.sim.events.now)
        machines.workers_starting(self.sim, self, world)
        low, high = costs.worker_start if self._num_groups else costs.first_start
        self._num_groups += 1
        duration = span(chance, low, high)
        self.sim.events.after(duration * 20 if self.node.is_slow else duration, self._end_start, group)

    def _end_start(self, group: Group) -> None:
        if self.group is not group or group.is_stopping:
            return
        if self.frozen_since is not None:
            self._thawing.append((self._end_start, group))
            return
        group.is_up = True
        if group.world.first_global_rank == 0 and self.sim.is_port_taken():
            self.fail_workers(FailureKind.PORT_TAKEN)
            return
        self.sim.training.started(group.world, self.node.number)

    def _begin_stop(self, group: Group, kind: FailureKind | None = None) -> None:
        costs, chance = self.sim.shape.costs, self.sim.chance.nodes
        group.is_stopping = True
        if group.is_up:
            machines.workers_ended(self.sim, self, group, kind)
        is_stubborn = chance.random() < 0.05
        duration = span(chance, *(costs.stubborn_stop if is_stubborn else costs.stop)) if group.is_up else 1000
        self.sim.events.after(duration, self._end_stop, group)

    def _end_stop(self, group: Group) -> None:
        if self.group is not group:
            return
        if self.frozen_since is not None:
            self._thawing.append((self._end_stop, group))
            return
        self.group = None
        is_late = group.is_up and group.finishes_at is None and self._cause is StopCause.FAILURE
        if is_late and not self.is_leaving and self.sim.chance.nodes.random() < LATE_FAILURE_ODDS:
            self.sim.ledger.charge(self)
            self._report(group, FailureKind.EXCEPTION, "late")
        if self.is_leaving:
            self._leave_when_stopped()
        self._approach()

    def finish_workers(self, coordinator: str) -> None:
        """All workers of that world have done their work."""
        group = self.group
        if not self.is_alive or group is None or group.world.coordinator != coordinator or group.is_stopping:
            return
        if self.frozen_since is not None:
            self._thawing.append((self.finish_workers, coordinator))
            return
        round_ = group.world.round
        group.finishes_at = self.sim.events.now
        self.finished_round, self._finished_at = round_, self.sim.events.now
        step = self.sim.training.step(coordinator)
        self._want_none(StopCause.END_OF_JOB)
        self.tell(ReportFinished(node=self.id, incarnation=self.incarnation, round=round_, step=step))
        if self.outage_since is not None:
            self._plan_outage_check()

    def fail_workers(self, kind: FailureKind, traceback: str = "") -> bool:
        """A worker ends badly. Returns whether there was one."""
        group = self.group
        if not self.is_alive or group is None or not group.is_up or group.is_stopping:
            return False
        self._target, self._cause = None, StopCause.FAILURE
        self._report(group, kind, traceback)
        self._begin_stop(group, kind)
        return True

    def runs(self, coordinator: str) -> bool:
        """Whether its workers of that world are up and not being stopped."""
        group = self.group
        return group is not None and group.world.coordinator == coordinator and group.is_up and not group.is_stopping

    @property
    def is_training(self) -> bool:
        """Whether workers of some world are up and not being stopped."""
        return self.is_alive and self.group is not None and self.group.is_up and not self.group.is_stopping

    def is_overdue(self) -> bool:
        """Without a master for longer than it may be."""
        since = self.outage_since
        is_awake = self.frozen_since is None and not self.is_leaving
        return is_awake and since is not None and self.sim.events.now - since > MASTER_GRACE + SECOND

    def lose_peer(self, coordinator: str) -> None:
        """A collective fails because a worker of another node is gone."""
        group = self.group
        if group is not None and group.world.coordinator == coordinator and self.frozen_since is None:
            self.fail_workers(FailureKind.PEER_LOST)

    def _report(self, group: Group, kind: FailureKind, traceback: str) -> None:
        now = self.sim.events.now
        failure = WorkerFailure(
            global_rank=group.world.first_global_rank,
            local_rank=0,
            pid=self.node.number * 100 + self.node.num_agents,
            kind=kind,
            exited_at=Micros(max(0, now + self.clock_offset)),
            exit_code=1 if kind not in _SIGNALS else None,
            signal=_SIGNALS.get(kind),
            message=kind.value,
            traceback=traceback,
        )
        self.tell(
            ReportFailure(
                node=self.id,
                incarnation=self.incarnation,
                round=group.world.round,
                failures=(failure,),
                step=self.sim.training.step(group.world.coordinator),
                lived=(now - group.started_at) / SECOND,
            )
        )

    def told_step(self) -> int | None:
        """What the newest heartbeat said."""
        return None if self.group is None else self.sim.training.step(self.group.world.coordinator)

    # Standing still.

    def freeze(self) -> bool:
        if not self.is_alive or self.frozen_since is not None:
            return False
        self.frozen_since = self.sim.events.now
        if self.connection is not None:
            self.sim.muted(self.connection)
        if self.group is not None and self.group.is_up and not self.group.is_stopping:
            self.sim.training.froze(self.group.world.coordinator)
        return True

    def thaw(self) -> None:
        """It runs again. Too late: its workers are killed before it talks to anybody."""
        if not self.is_alive or self.frozen_since is None:
            return
        away = self.sim.events.now - self.frozen_since
        self.frozen_since = None
        self.node.disturbed_at = self.sim.events.now
        group = self.group
        if group is not None and group.is_up and not group.is_stopping:
            self.sim.training.thawed(group.world.coordinator)
            if away > micros(self.sim.shape.detection.lease):
                self.sim.ledger.charge(self)
                self.fail_workers(FailureKind.STOPPED_BY_US)
        connection = self.connection
        if connection is not None and away > micros(KEEPALIVE[1]) and self.sim.chance.network.random() < 0.5:
            self.drop_connection()  # its own timer fired before the answer was read
        elif connection is not None:
            self.pulse()
            self.keepalive_soon()
        thawing, self._thawing = self._thawing, []
        inbox, self._inbox = self._inbox, []
        for act, argument in thawing:
            act(argument)
        for sender, parcels in inbox:
            if self.is_alive and self.connection is sender:
                self.receive(sender, parcels)
