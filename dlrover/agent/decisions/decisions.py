"""
What an agent decides: wishes of the master, ends of workers, refusals and outages come in, acts come out.

No I/O, no clock, no task: what depends on time gets it as an argument. The agent (`dlrover/agent/agent.py`) hosts it beside real
processes and sockets, the simulator beside virtual ones. A wish is a level: it may be repeated, or skipped when a newer one exists.
"""

from __future__ import annotations

from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.decisions.acts import (
    Act,
    AskFailover,
    Depart,
    DropOffer,
    EnterWhenStopped,
    KillWorkers,
    Note,
    Reattach,
    StartWorkers,
    StopCheck,
    StopWorkers,
    TellMaster,
    Waiting,
)
from dlrover.agent.decisions.departure import Departure, Urgency, broken, dismissed, ended, paused, without_master
from dlrover.agent.decisions.joining import Joining, Membership, WorkerFacts
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.messages.check import ReportCheck
from dlrover.protocol.messages.checkpoint import HeldSnapshot
from dlrover.protocol.messages.cluster import ClusterTask
from dlrover.protocol.messages.fleet import ErrorLevel, ReportNodeError
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Check,
    Desired,
    End,
    Idle,
    Incarnation,
    Join,
    JoinCheck,
    JoinRendezvous,
    Leave,
    LeaveJob,
    ReportFailure,
    ReportFinished,
    Round,
    Run,
    StopCause,
    Wait,
    Wish,
    WorldSpec,
)


class AgentTerms(Struct, frozen=True, kw_only=True):
    """How this agent shall behave. Durations in seconds."""

    master_addr: str = ""
    """For messages."""
    master_grace: float = 600.0
    """Workers train on without a master for so long."""
    first_connection: float = 120.0
    """For the master to appear at all, however short its later absences may be."""
    finished: float = 30.0
    """A finished training waits so long for its master, then leaves with exit code 0."""
    lease: float = 30.0
    """An agent that did not run for so long kills its workers before it talks to the master."""
    coordinator_port: int = 0
    """The user's, offered in every round of the training; 0: any."""
    has_failover: bool = False
    """An extension of the user is asked what shall follow a failure."""


class AgentDecisions:
    """Of one agent process."""

    def __init__(self, identity: Attach, workers: WorkerFacts, terms: AgentTerms, *, is_warm: bool) -> None:
        """`identity`: what does not change while the agent lives. `is_warm`: no import keeps the first workers waiting."""
        self._identity = identity
        self._workers = workers
        self._terms = terms
        self.membership = Membership()
        self.joining = Joining(
            self.membership,
            workers,
            local_world_size=identity.local_world_size,
            coordinator_port=terms.coordinator_port,
            is_warm=is_warm,
        )
        self._is_followed = False
        """A wish that came again is followed again: it means nothing in the same life, and everything in a new one."""
        self.started_round = Round(0)
        """Newest round whose workers we started. Each is started once: a repeated wish for it means nothing."""
        self._world: WorldSpec | None = None
        """Of `started_round`: told to a master whose journal was lost."""
        self.finished_round = Round(0)
        self._finished_at = 0.0
        self._called_away: Departure | None = None

    @property
    def task(self) -> ClusterTask | None:
        """What this node's process is in a cluster; None: its workers meet in a world."""
        return None if self._world is None else self._world.task

    # Who we are.

    def presentation(self) -> Attach:
        """To a master, on each new stream."""
        me, round_ = self.membership, max(self._workers.running_round, self.finished_round)
        return replace(
            self._identity,
            incarnation=me.incarnation,
            running_round=round_,
            is_finished=self.finished_round > 0,
            world=self._world if self._world is not None and self._world.round == round_ else None,
            former_rank=me.node_rank if me.node_rank >= 0 else None,
        )

    def attached(self, attached: Attached) -> list[Act]:
        me, acts = self.membership, list[Act]()
        if me.incarnation and attached.incarnation != me.incarnation and not me.is_leaving:
            # The master gave up our former life; whatever still runs belongs to it and may not disturb the new world.
            acts = self._forget_former_life()
        me.node, me.node_rank, me.incarnation = attached.node, attached.node_rank, attached.incarnation
        return acts

    def rejected(self, code: str, text: str) -> None:
        """The master does not want this node, for good. One that it has released did not fail."""
        if code == ErrorCode.NODE_RELEASED:
            self.leave(dismissed(text.rstrip("."), urgency=Urgency.RELEASE))
        else:
            self.leave(broken(f"The master at {self._terms.master_addr} refused this node: {text}"))

    def _forget_former_life(self) -> list[Act]:
        self.membership.desired = None
        self.joining.forget()
        self.started_round, self._world = Round(0), None
        return [StopWorkers(StopCause.FAILURE), StopCheck(), DropOffer()]

    # What the master wants.

    def take(self, desired: Desired) -> bool:
        """Whether it is the newest wish; then `follow` it."""
        me = self.membership
        if not me.incarnation:
            return False  # for the life that we have just given up
        if me.desired is not None and _order(desired) < _order(me.desired):
            return False
        me.desired, self._is_followed = desired, False
        return True

    def leave(self, departure: Departure) -> None:
        """A reason to go; `follow` it. The most urgent one counts, and of those the first."""
        if self._called_away is None or departure.urgency < self._called_away.urgency:
            self._called_away = departure

    def follow(self, now: float, outage: float) -> list[Act]:
        """What to do about what is known. `outage`: for so many seconds there is no master."""
        me = self.membership
        if me.is_leaving:
            return []
        if self._called_away is None and self._has_lost_master(now, outage):
            grace, is_finished = self._terms.master_grace, self.finished_round > 0
            self.leave(without_master(self._terms.master_addr, outage, limit=grace, is_finished=is_finished))
        if self._called_away is not None:
            return self._depart(self._called_away)
        if me.desired is None or self._is_followed:
            return []
        self._is_followed = True
        wish = me.desired.wish
        return [*([] if isinstance(wish, Check) else [StopCheck()]), *self._obey(wish)]

    def _obey(self, wish: Wish) -> list[Act]:
        match wish:
            case Join() | JoinCheck():
                return self.joining.enter(wish)
            case Check(world=world):
                return self.joining.start_check(wish) if world.round > self.joining.checked_round else []
            case Run(world=world):
                return self._start(world) if world.round > self.started_round else []
            case Wait() | Idle():
                stop = [StopWorkers(StopCause.MEMBERSHIP)] if self._workers.is_wanted else []
                return [Waiting(wish.reason), *stop]
            case End():
                return self._depart(ended(wish))
            case Leave():
                return self._depart(paused(wish.reason) if wish.is_pause else dismissed(wish.reason, wish.exit_code))
            case _:
                assert_never(wish)

    def _start(self, world: WorldSpec) -> list[Act]:
        self.started_round, self._world = world.round, world
        self.finished_round = Round(0)  # of an earlier one, which then was not enough
        self.joining.give_offer()
        return [StartWorkers(world)]

    def not_offered(self, join: Join | JoinCheck, why: str, *, is_idle: bool) -> list[Act]:
        """No port is free. `is_idle`: neither workers nor a node check run, so none that is being stopped holds it."""
        if not is_idle:
            return [EnterWhenStopped(join)]
        self.leave(broken(f"This node can offer no port to its workers: {why}. Check HOST_PORTS."))
        return []

    # What happened here.

    def finished(self, round_: Round, step: int | None, now: float) -> list[Act]:
        """All workers of the round have ended well."""
        self.finished_round, self._finished_at = round_, now
        me = self.membership
        return [TellMaster(ReportFinished(node=me.node, incarnation=me.incarnation, round=round_, step=step))]

    def failed(self, report: ReportFailure) -> list[Act]:
        """A worker has failed."""
        if not self._terms.has_failover:
            return [TellMaster(report)]
        self.joining.num_untold += 1
        return [AskFailover(report)]

    def decided(self, commands: list[AgentCommand]) -> list[Act]:
        """What the extension of the user made of a failure."""
        self.joining.num_untold -= 1
        return [*map(TellMaster, commands), *self.joining.enter_newest()]

    def woke(self, away: float) -> list[Act]:
        """This process got no time for so many seconds: others may have taken the places of its workers."""
        return [KillWorkers()] if away > self._terms.lease and self._workers.running_round else []

    def found_stopped(self, pid: int) -> list[Act]:
        """A process of a cluster is stopped (SIGSTOP) and holds up all others: killed, it is a loss like any other."""
        me, task = self.membership, self.task
        if task is None:
            return []
        message = (
            f"{task.node_type.value}-{task.rank} (pid {pid}) is stopped (SIGSTOP) and holds up the others: it is killed"
        )
        report = ReportNodeError(node=me.node, incarnation=me.incarnation, level=ErrorLevel.WARNING, message=message)
        return [Note(message), TellMaster(report), KillWorkers()]

    def mend(self, command: AgentCommand, code: str) -> list[Act]:
        """What was refused cannot be told; see to it that the master and we do not wait for each other."""
        me = self.membership
        if me.is_leaving:
            return []
        if isinstance(command, JoinRendezvous) and code == ErrorCode.OFFER_USED:
            return self.joining.offer_another(command)
        if not isinstance(command, JoinRendezvous | ReportFailure | ReportFinished | ReportCheck):
            return []
        if command.incarnation != me.incarnation or not me.incarnation:
            return []  # of a former life, and refused because the new one has begun: no reason for a third
        if code == ErrorCode.WRONG_SENDER and command.node != me.node:
            # The same life under another number: a master without its journal has numbered the nodes anew.
            return [TellMaster(replace(command, node=me.node))]
        is_old = code in (ErrorCode.TOO_OLD, ErrorCode.UNKNOWN_ROUND)
        if code == ErrorCode.STALE_INCARNATION or (isinstance(command, ReportFailure) and not is_old):
            acts = self._forget_former_life()
            me.incarnation = Incarnation(0)  # as a fresh agent we get a round in any case
            return [*acts, Reattach()]
        return [Reattach()] if isinstance(command, ReportFinished) else []  # presenting ourselves says it too

    def _depart(self, departure: Departure) -> list[Act]:
        self.membership.is_leaving = True
        return [Depart(departure)]

    def _has_lost_master(self, now: float, outage: float) -> bool:
        terms = self._terms
        if self.finished_round:
            return min(outage, now - self._finished_at) > terms.finished
        return outage > (
            terms.master_grace if self.membership.node >= 0 else max(terms.master_grace, terms.first_connection)
        )


def last_words(
    me: Membership, departure: Departure, said: LeaveJob | None, held: tuple[HeldSnapshot, ...] = ()
) -> LeaveJob | None:
    """
    The farewell that the master has yet to hear; `said`: the newest that it was told.

    If its answer was lost, attaching again has brought us back as a new life, which has to leave, too. The notice goes without its
    full stop, as the master puts it into a sentence.
    """
    if departure.farewell is None or me.node < 0 or (said is not None and said.incarnation == me.incarnation):
        return None
    reason, message = departure.farewell, departure.notice.rstrip(".")
    return LeaveJob(node=me.node, incarnation=me.incarnation, reason=reason, message=message, held=held)


def _order(desired: Desired) -> tuple[int, int]:
    return desired.master_epoch, desired.number
