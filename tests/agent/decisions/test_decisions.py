"""What an agent decides, without a process or a socket: facts in, acts out."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from dlrover.agent.decisions import departure
from dlrover.agent.decisions.acts import (
    Act,
    AskFailover,
    BindPort,
    Depart,
    DropOffer,
    EnterWhenStopped,
    KillWorkers,
    OfferPort,
    Reattach,
    StartWorkers,
    StopCheck,
    StopWorkers,
    TellMaster,
    Waiting,
    WarmUp,
)
from dlrover.agent.decisions.decisions import AgentDecisions, AgentTerms, last_words
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Desired,
    FailureKind,
    Idle,
    Incarnation,
    JobTerms,
    Join,
    JoinRendezvous,
    LeaveReason,
    Limits,
    Micros,
    NodeId,
    NodeRank,
    ReportFailure,
    Round,
    Run,
    StopCause,
    StopJob,
    Wait,
    Wish,
    WorkerFailure,
    WorldSpec,
)

OFFER = "host:1"
NO_ROUND = Round(0)


@dataclass
class Facts:
    """What runs on the node, as the test says."""

    running_round: Round = NO_ROUND
    is_wanted: bool = False
    is_settled: bool = True
    is_patient: bool = False


class Node:
    """An agent that is attached, and follows what it is told."""

    def __init__(self, *, is_warm: bool = True, **terms: object) -> None:
        identity = Attach(
            launch="a", host="host", terms=JobTerms(limits=Limits(min_nodes=1, max_nodes=2)), local_world_size=1
        )
        self.facts = Facts()
        self.decisions = AgentDecisions(identity, self.facts, AgentTerms(**terms), is_warm=is_warm)  # type: ignore[arg-type]
        self._number = 0
        self.attach(1)

    def attach(self, incarnation: int) -> list[Act]:
        return self.decisions.attached(
            Attached(
                node=NodeId(4),
                node_rank=NodeRank(0),
                incarnation=Incarnation(incarnation),
                job_name="a-job",
                master_epoch=1,
                now=Micros(0),
                desired=Desired(1, 0, Idle("nothing yet")),
            )
        )

    def wish(self, wish: Wish) -> list[Act]:
        self._number += 1
        assert self.decisions.take(Desired(1, self._number, wish))
        return [act for act in self.follow() if not isinstance(act, StopCheck)]

    def follow(self, *, now: float = 0.0, outage: float = 0.0) -> list[Act]:
        return self.decisions.follow(now, outage)

    def join(self, round_: int = 2) -> JoinRendezvous:
        """Follow the wish to join up to the command."""
        wanted = a_join(round_)
        assert OfferPort(wanted) in self.wish(wanted)
        assert self.decisions.joining.offer(wanted) == [BindPort(wanted, 0)]
        (told,) = self.decisions.joining.offered(wanted, OFFER)
        assert isinstance(told, TellMaster)
        assert isinstance(told.command, JoinRendezvous)
        return told.command

    def run(self, round_: int) -> None:
        assert self.wish(Run(a_world(round_))) == [StartWorkers(a_world(round_))]
        self.facts.running_round, self.facts.is_wanted = Round(round_), True

    def report(self) -> ReportFailure:
        failure = WorkerFailure(
            global_rank=0, local_rank=0, pid=1, kind=FailureKind.EXIT_CODE, exited_at=Micros(0), exit_code=1
        )
        me = self.decisions.membership
        return ReportFailure(
            node=me.node, incarnation=me.incarnation, round=Round(1), failures=(failure,), step=None, lived=1.0
        )


def a_join(round_: int) -> Join:
    return Join(round=Round(round_), cause=StopCause.FAILURE, reason="a worker failed")


def a_world(round_: int) -> WorldSpec:
    return WorldSpec(
        round=Round(round_),
        group_rank=0,
        group_world_size=1,
        first_global_rank=0,
        local_world_size=1,
        world_size=1,
        coordinator=OFFER,
        restart_count=0,
    )


def test_a_wish_is_followed_once_and_a_round_started_once() -> None:
    node = Node()
    node.run(1)
    assert node.wish(Run(a_world(1))) == []
    assert node.follow() == []


def test_an_older_wish_is_not_taken() -> None:
    node = Node()
    node.wish(Wait("for others"))
    assert not node.decisions.take(Desired(1, 0, Run(a_world(1))))


def test_workers_stop_before_a_port_is_offered() -> None:
    node = Node()
    node.run(1)
    acts = node.wish(a_join(2))
    assert acts[-3:] == [StopWorkers(StopCause.FAILURE, is_patient=True), DropOffer(), OfferPort(a_join(2))]


def test_a_node_that_shall_wait_stops_its_workers() -> None:
    node = Node()
    node.run(1)
    assert node.wish(Wait("for others")) == [Waiting("for others"), StopWorkers(StopCause.MEMBERSHIP)]


def test_a_cold_node_warms_up_once_and_joins_then() -> None:
    node = Node(is_warm=False)
    assert node.wish(a_join(1)) == [DropOffer(), WarmUp()]
    assert node.wish(a_join(2)) == [DropOffer()]
    assert node.decisions.joining.warmed_up() == [DropOffer(), OfferPort(a_join(2))]


def test_a_used_port_is_replaced_by_another() -> None:
    node = Node()
    refused = node.join(2)
    assert node.decisions.mend(refused, ErrorCode.OFFER_USED) == [DropOffer(), DropOffer(), OfferPort(a_join(2))]
    assert node.decisions.mend(refused, ErrorCode.OFFER_USED) == [], "it has joined anew since"


def test_the_port_of_the_user_is_offered_when_the_old_workers_have_stopped() -> None:
    node = Node(coordinator_port=29500)
    node.facts.is_settled = False
    node.wish(a_join(2))
    assert node.decisions.joining.offer(a_join(2)) == [EnterWhenStopped(a_join(2))]
    node.facts.is_settled = True
    assert node.decisions.joining.stopped(a_join(2)) == [DropOffer(), OfferPort(a_join(2))]
    assert node.decisions.joining.offer(a_join(2)) == [BindPort(a_join(2), 29500)]


def test_a_node_joins_when_its_failure_is_told() -> None:
    """Else the round completes without the report, and a victim is charged (seed 51 of the simulator)."""
    node = Node(has_failover=True)
    report = node.report()
    assert node.decisions.failed(report) == [AskFailover(report)]
    node.wish(a_join(2))
    assert node.decisions.joining.offer(a_join(2)) == []
    assert node.decisions.decided([report]) == [TellMaster(report), DropOffer(), OfferPort(a_join(2))]
    assert node.decisions.joining.offer(a_join(2)) == [BindPort(a_join(2), 0)]


def test_an_extension_may_end_the_job_without_a_report() -> None:
    node = Node(has_failover=True)
    node.decisions.failed(node.report())
    assert node.decisions.decided([StopJob(message="no more")]) == [TellMaster(StopJob(message="no more"))]


@pytest.mark.parametrize("code", [ErrorCode.STALE_INCARNATION, ErrorCode.UNAVAILABLE])
def test_a_failure_that_cannot_be_told_begins_a_new_life(code: ErrorCode) -> None:
    node = Node()
    acts = node.decisions.mend(node.report(), code)
    assert acts == [StopWorkers(StopCause.FAILURE), StopCheck(), DropOffer(), Reattach()]
    assert node.decisions.presentation().incarnation == 0


def test_a_refusal_to_a_former_life_means_nothing() -> None:
    node = Node()
    report = node.report()
    node.attach(2)
    assert node.decisions.mend(report, ErrorCode.STALE_INCARNATION) == []


def test_a_new_life_stops_what_the_former_one_ran() -> None:
    node = Node()
    node.run(1)
    assert node.attach(2) == [StopWorkers(StopCause.FAILURE), StopCheck(), DropOffer()]
    node.run(1)


def test_workers_of_an_agent_that_slept_too_long_are_killed() -> None:
    node = Node(lease=30.0)
    node.run(1)
    assert node.decisions.woke(30.0) == []
    assert node.decisions.woke(31.0) == [KillWorkers()]


def test_of_two_reasons_to_go_the_more_urgent_one_counts() -> None:
    node = Node()
    node.decisions.leave(departure.broken("no port"))
    node.decisions.leave(departure.by_signal(signal.SIGTERM, is_alone=False))
    node.decisions.leave(departure.preempted("the machine goes"))
    (act,) = node.follow()
    assert isinstance(act, Depart)
    assert act.departure.farewell is LeaveReason.STOPPED_BY_USER
    assert node.follow() == []
    assert node.decisions.mend(node.report(), ErrorCode.STALE_INCARNATION) == [], "nothing brings it back"


@pytest.mark.parametrize(("is_finished", "exit_code"), [(False, departure.EXIT_MASTER_LOST), (True, 0)])
def test_without_a_master_an_agent_stays_for_a_while(is_finished: bool, exit_code: int) -> None:
    node = Node(master_grace=600.0, finished=30.0)
    node.run(1)
    if is_finished:
        node.decisions.finished(Round(1), 9, 1000.0)
    limit = 30.0 if is_finished else 600.0
    assert node.follow(now=1000.0 + limit, outage=limit) == []
    (act,) = node.follow(now=1001.0 + limit, outage=limit + 1)
    assert isinstance(act, Depart)
    assert act.departure.exit_code == exit_code


def test_a_released_node_did_not_fail() -> None:
    node = Node()
    node.decisions.rejected(ErrorCode.NODE_RELEASED, "The job was scaled down.")
    (act,) = node.follow()
    assert isinstance(act, Depart)
    assert (act.departure.exit_code, act.departure.is_job_alive) == (0, True)
    assert act.departure.message == "This node left the job: The job was scaled down."


def test_a_farewell_is_said_again_in_a_new_life() -> None:
    node = Node()
    going = departure.preempted("the machine goes")
    said = last_words(node.decisions.membership, going, None)
    assert said is not None
    assert last_words(node.decisions.membership, going, said) is None
    node.decisions.leave(going)
    node.follow()
    assert node.attach(2) == [], "its workers stop already"
    again = last_words(node.decisions.membership, going, said)
    assert again is not None
    assert again.incarnation == 2


def test_who_gives_up_the_master_names_it_in_words_that_fit_into_a_sentence() -> None:
    node = Node(master_addr="10.0.0.1:50001", master_grace=600.0)
    (act,) = node.follow(now=1000.0, outage=746.0)
    assert isinstance(act, Depart)
    said = last_words(node.decisions.membership, act.departure, None)
    assert said is not None
    assert said.message == (
        "No master at 10.0.0.1:50001 for 746 s (limit --master-grace 600 s): the workers were stopped. Start the job again where the "
        "master's host is back"
    )
    assert act.departure.message == f"{said.message}."
