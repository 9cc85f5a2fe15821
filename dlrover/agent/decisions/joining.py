"""
How a node enters a round: it stops what runs, is warm, offers a port, and joins.

Joining makes the others stop, so a node joins only when it could start workers at once. The port that it offers is kept until
what meets there starts, and serves one round.
"""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from dlrover.agent.decisions.acts import (
    Act,
    BindPort,
    DropOffer,
    EnterWhenStopped,
    Interrupted,
    Note,
    OfferPort,
    StartCheck,
    StopWorkers,
    TellMaster,
    WarmUp,
)
from dlrover.protocol.messages.job import (
    NODE_CHECK_RENDEZVOUS,
    TRAINING_RENDEZVOUS,
    Check,
    Desired,
    Incarnation,
    Join,
    JoinCheck,
    JoinRendezvous,
    NodeId,
    NodeRank,
    Round,
    StopCause,
)


class WorkerFacts(Protocol):
    """What runs on this node. `WorkerDriver` says what each means."""

    @property
    def running_round(self) -> Round: ...

    @property
    def is_wanted(self) -> bool: ...

    @property
    def is_settled(self) -> bool: ...

    @property
    def is_patient(self) -> bool: ...


class Membership(Struct):
    """What an agent knows of its place in the job."""

    node: NodeId = NodeId(-1)
    node_rank: NodeRank = NodeRank(-1)
    incarnation: Incarnation = Incarnation(0)
    """0: the master has given no life to this agent, or the agent has given its life up."""
    desired: Desired | None = None
    """The newest wish of the master."""
    is_leaving: bool = False
    """The result is known: nothing that is still refused or wished can bring this node back into the job."""

    def who(self) -> tuple[NodeId, Incarnation]:
        """Under which the master knows this node."""
        return self.node, self.incarnation


class Joining:
    """Of one agent."""

    def __init__(
        self,
        membership: Membership,
        workers: WorkerFacts,
        *,
        local_world_size: int,
        coordinator_port: int,
        is_warm: bool,
    ) -> None:
        self._membership = membership
        self._workers = workers
        self._local_world_size = local_world_size
        self._coordinator_port = coordinator_port
        self._is_warm = is_warm
        self._is_warming = False
        self._joined = ("", Round(0))
        """Rendezvous and round that we joined last."""
        self._offer: str | None = None
        """The address that we offered for `_joined`, until what meets there starts."""
        self._noted = ""
        """What was said last of this node, so that it is not said again in every round."""
        self.num_untold = 0
        """Failures whose report waits for what an extension makes of it."""
        self.checked_round = Round(0)
        """Newest round of the node check whose task we started. Each is run once, as with workers."""

    def forget(self) -> None:
        """It was of a former life."""
        self._joined, self._offer, self.checked_round = ("", Round(0)), None, Round(0)

    def give_offer(self) -> None:
        """What meets at the offered port starts."""
        self._offer = None

    def is_offered(self, address: str) -> bool:
        """Whether it is the newest that we offered, and what meets there has not started."""
        return self._offer == address

    def enter(self, join: Join | JoinCheck) -> list[Act]:
        if self._joined == (_name(join), join.round) and self._offer is not None:
            return []
        acts: list[Act] = []
        if isinstance(join, Join) and join.note and join.note != self._noted:
            self._noted = join.note
            acts.append(Note(join.note))
        if self._workers.running_round:
            acts.append(Interrupted(self._workers.running_round, join.reason))
        if self._workers.is_wanted:
            acts.append(StopWorkers(join.cause, is_patient=join.cause is StopCause.FAILURE))
        acts.append(DropOffer())
        self._offer = None
        if self._is_warm:
            acts.append(OfferPort(join))
        elif not self._is_warming:
            # Joining makes the others stop. Workers that cannot start before torch is imported would keep them waiting.
            self._is_warming = True
            acts.append(WarmUp())
        return acts

    def offer(self, join: Join | JoinCheck) -> list[Act]:
        """
        Offer a port, or enter the round later: when the workers have stopped, or what failed is told.

        At the port of the user they would find the coordinator of the next round, and take part there. And what they tell of a
        mistake in the script must be known before the next round begins, as must any failure: else its victims are blamed.
        """
        if self.num_untold:
            return []
        port = self._coordinator_port if isinstance(join, Join) else 0
        if (port and not self._workers.is_settled) or self._workers.is_patient:
            return [EnterWhenStopped(join)]
        return [BindPort(join, port)]

    def offered(self, join: Join | JoinCheck, address: str, *, is_reused: bool = False) -> list[Act]:
        """The port is bound: join with it."""
        self._offer = address
        self._joined = (_name(join), join.round)
        if isinstance(join, JoinCheck) and join.round <= self.checked_round:
            # A master without its journal took our world up, but counts the rounds of its node checks anew.
            self.checked_round = Round(join.round - 1)
        command = JoinRendezvous(
            node=self._membership.node,
            incarnation=self._membership.incarnation,
            round=join.round,
            local_world_size=self._local_world_size,
            offer=address,
            is_offer_reused=is_reused,
            name=_name(join),
        )
        return [TellMaster(command)]

    def start_check(self, check: Check) -> list[Act]:
        self.checked_round = check.world.round
        self.give_offer()
        return [StartCheck(check)]

    def offer_another(self, refused: JoinRendezvous) -> list[Act]:
        """The port has served an earlier round by chance: join the same round with another."""
        if not self.is_offered(refused.offer):
            return []  # we have joined anew since
        self._offer = None
        return [DropOffer(), *self.enter_newest()]

    def stopped(self, join: Join | JoinCheck) -> list[Act]:
        """Neither workers nor a node check run any more. Is it still wanted that we enter this round?"""
        desired = self._membership.desired
        is_wanted = not self._membership.is_leaving and desired is not None and desired.wish == join
        return self.enter(join) if is_wanted else []

    def warmed_up(self) -> list[Act]:
        self._is_warm = True
        return self.enter_newest()

    def enter_newest(self) -> list[Act]:
        """The round that is wanted now, if any."""
        desired = None if self._membership.is_leaving else self._membership.desired
        return self.enter(desired.wish) if desired is not None and isinstance(desired.wish, Join | JoinCheck) else []


def _name(join: Join | JoinCheck) -> str:
    return NODE_CHECK_RENDEZVOUS if isinstance(join, JoinCheck) else TRAINING_RENDEZVOUS
