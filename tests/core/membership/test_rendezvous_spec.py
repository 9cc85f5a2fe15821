"""
How rounds complete, as tables and short stories: sizes, units, replacements, slow members, returning masters.

Each test names what went wrong in systems before us.
"""

from __future__ import annotations

import pytest

from dlrover.core.job import Job
from dlrover.core.membership.forming import explain_timeout
from dlrover.core.membership.nodes import NodeLife
from dlrover.core.membership.rendezvous import Rendezvous
from dlrover.protocol.codec import encode_frame
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.frames import Push
from dlrover.protocol.messages.job import (
    AskStatus,
    Attach,
    Attached,
    ExitReason,
    Incarnation,
    JobTerms,
    Join,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    NodeId,
    NodeRank,
    RestartPolicy,
    Round,
    Run,
    Wait,
)
from tests.core.scene import Scene, failure, micros, terms


@pytest.mark.parametrize(
    ("low", "high", "unit", "waiting", "is_call_over", "size"),
    [
        (3, 3, 1, 2, True, 0),
        (3, 3, 1, 3, False, 3),
        (2, 3, 1, 2, False, 0),
        (2, 3, 1, 2, True, 2),
        (8, 12, 4, 10, True, 8),
        (2, 3, 1, 5, False, 3),  # more than the maximum: complete, capped
        (4, 8, 4, 7, True, 4),
        (4, 4, 4, 3, True, 0),  # never an empty world, never one below the minimum
    ],
)
def test_when_a_round_completes_and_how_large_it_is(
    low: int, high: int, unit: int, waiting: int, is_call_over: bool, size: int
) -> None:
    scene = Scene(terms(low, high, node_unit=unit, last_call=30.0, first_call=30.0))
    scene.gather(*(f"n{number}" for number in range(waiting)))
    if is_call_over:
        scene.tick(30)
    assert scene.members() == list(range(size))
    beyond = [f"n{number}" for number in range(size, waiting)]
    assert all(isinstance(scene.wish(name), Wait) for name in beyond), "the rest keeps waiting"


def test_a_restarted_node_brings_everybody_into_the_next_round_with_the_same_ranks() -> None:
    scene = Scene(terms(3)).gather(*"abc")
    before = {name: scene.world(name).group_rank for name in "abc"}
    scene.at(10).restart_agent("b")
    assert all(isinstance(scene.wish(name), Join) for name in "abc"), "told at once, nobody polls"
    scene.rejoin(*"abc")
    assert {name: scene.world(name).group_rank for name in "abc"} == before
    assert scene.world("a").round == 2


def test_a_replacement_joins_before_its_predecessor_is_removed() -> None:
    """One entry for the rank, the new one; the late removal of the old one changes nothing."""
    scene = Scene(terms(2)).gather("a", "b")
    scene.at(10).break_stream("b")
    old = scene.agents["b"]
    scene.attach("new", rank=1)
    with pytest.raises(Rejected) as refused:
        scene.silent("b")
    assert refused.value.code == "stale-incarnation"
    scene.rejoin("new", "a")
    assert scene.members() == [0, 1]
    nodes = scene.job.state.nodes
    assert nodes.holders[NodeRank(1)] == scene.agents["new"].node != old.node
    assert nodes.live[scene.agents["new"].node].life is NodeLife.ALIVE


def test_a_slow_member_is_told_to_join_again_at_once() -> None:
    """It had not yet heard of its world when another one failed and joined the next: no wait for any timeout."""
    scene = Scene(terms(3)).gather(*"abc")
    scene.at(1).fail("a")
    scene.join("a")
    assert isinstance(scene.wish("c"), Join), "its world is superseded, and it is told so"
    scene.rejoin("b", "c")
    assert scene.world("c").round == 2


def test_a_join_never_destroys_the_world_that_others_run_in() -> None:
    scene = Scene(terms(2)).gather("a", "b")
    world = scene.world("b")
    scene.at(1).gather("c", "d")
    assert scene.world("b") == world
    assert isinstance(scene.wish("c"), Wait)


def test_nodes_beyond_the_unit_wait_until_there_are_enough_of_them() -> None:
    scene = Scene(terms(2, 6, node_unit=2, first_call=0.0)).gather(*"abc")
    assert scene.members() == [0, 1]
    scene.at(10).gather("d")
    scene.obey("a", "b")
    assert scene.members() == [0, 1, 2, 3]


def test_after_a_master_restart_nothing_of_old_rounds_can_be_confused_with_new_ones() -> None:
    scene = Scene(terms(2)).gather("a", "b")
    scene.at(10).restart_master()
    scene.attach("a")
    scene.attach("b")
    assert scene.world("a").round == 1, "nobody restarts"
    scene.fail("a")
    with pytest.raises(Rejected):
        scene.join("a", round_=1)
    scene.rejoin("a", "b")
    assert scene.world("a").round == 2
    assert scene.world("a").coordinator not in ("host-a:1", "host-b:1")


def test_rounds_leave_nothing_behind() -> None:
    """What is kept of each round is bounded, however long the job runs."""
    scene = Scene(terms(2, restarts=RestartPolicy(max_restarts=1000))).gather("a", "b")
    sizes = []
    for number in range(1, 200):
        scene.at(100 * number).fail("a", failure(at=100 * number, traceback=f"line {number}"), step=number)
        scene.rejoin("a", "b")
        sizes.append(len(scene.job.encode()))
    assert scene.world("a").round == 200
    assert max(sizes[100:]) < 1.05 * max(sizes[:100])


@pytest.mark.parametrize(("low", "high", "unit"), [(3, 8, 4), (4, 6, 4), (3, 3, 4), (0, 0, 1), (2, 1, 1)])
def test_limits_that_no_world_could_obey_cannot_be_given(low: int, high: int, unit: int) -> None:
    with pytest.raises(ValueError, match="node"):
        Limits(min_nodes=low, max_nodes=high, node_unit=unit)


def test_before_anybody_has_come_no_round_completes() -> None:
    scene = Scene(terms(1))
    scene.tick(1000)
    assert scene.job.state.rendezvous.world is None
    assert scene.job.status().max_nodes == 1


def test_an_unknown_rendezvous_is_refused_with_the_known_ones() -> None:
    scene = Scene(terms(1))
    scene.attach("a")
    agent = scene.agents["a"]
    join = JoinRendezvous(
        node=agent.node,
        incarnation=agent.incarnation,
        round=Round(1),
        local_world_size=1,
        offer="host-a:1",
        name="elastic-trainign",
    )
    with pytest.raises(Rejected) as refused:
        scene.send("a", join)
    assert refused.value.code == "unknown-rendezvous"
    assert "elastic-training and network-check" in str(refused.value)
    scene.join("a")
    assert isinstance(scene.wish("a"), Run)


def test_the_join_delay_of_a_long_wait_is_told_in_seconds_since_it_began() -> None:
    """Not since 1970: the message of a timeout names the limit and who is missing."""
    scene = Scene(terms(3, join_timeout=600.0)).gather("a", "b")
    scene.tick(600)
    assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT
    assert "2 of at least 3 nodes joined within 600 s; node rank 2 is missing" in scene.end.message


def test_an_absurd_minimum_costs_nothing_to_explain() -> None:
    limits = Limits(min_nodes=10**15, max_nodes=10**15)
    text = explain_timeout(Rendezvous(), limits)
    assert "node ranks 0, 1, 2, 3, 4, 5, 6, 7 and others are missing" in text


def test_a_master_that_keeps_restarting_cannot_postpone_the_join_timeout_for_ever() -> None:
    scene = Scene(terms(2, join_timeout=120.0)).gather("a")
    second = 0.0
    while scene.job.end is None and second < 2000:
        second += 30
        scene.at(second).restart_master()
        scene.attach("a")
        scene.tick(second + 1)
    assert scene.end.reason is ExitReason.RENDEZVOUS_TIMEOUT
    assert second <= 120 + 120 + 60


def test_one_node_that_ends_early_does_not_end_the_job_of_the_others() -> None:
    scene = Scene(terms(2, 3)).gather(*"abc")
    scene.finish("a")
    scene.at(10).fail("b")
    scene.rejoin("b", "c")
    assert scene.members() == [1, 2]
    scene.finish("b")
    scene.finish("c")
    assert scene.end.reason is ExitReason.COMPLETED


def test_a_shrunken_world_is_no_failure_of_anybody() -> None:
    scene = Scene(terms(1, 2)).gather("a", "b")
    scene.at(100).leave("b", LeaveReason.PREEMPTED)
    scene.obey("a")
    assert scene.members() == [0]
    status = scene.job.status()
    assert (status.num_restarts, status.distinct_failures) == (0, ())


@pytest.mark.parametrize("num_nodes", [20, 2000])
def test_what_a_node_is_told_of_its_world_is_no_longer_in_a_large_one(num_nodes: int) -> None:
    """A world that names its members costs the master the square of their number. Here only numbers have more digits."""
    job, nodes = gathered(num_nodes, terms(num_nodes))
    for node, _ in (nodes[0], nodes[-1]):
        desired = job.desired(node)
        assert isinstance(desired.wish, Run)
        assert desired.wish.world.group_world_size == num_nodes
        assert len(encode_frame([Push(desired=desired)])) < 300


def gathered(num_nodes: int, wanted: JobTerms) -> tuple[Job, list[tuple[NodeId, Incarnation]]]:
    """Without the scene, which looks at everything after each command."""
    job, now = Job(), micros(0)
    job.apply(MasterStarted(1, "a-job"), now)
    nodes = []
    for number in range(num_nodes):
        attach = Attach(launch=f"l{number}", host=f"h{number}", terms=wanted, local_world_size=1)
        attached = job.apply(attach, now).reply
        assert isinstance(attached, Attached)
        nodes.append((attached.node, attached.incarnation))
        join = JoinRendezvous(
            node=attached.node,
            incarnation=attached.incarnation,
            round=Round(1),
            local_world_size=1,
            offer=f"h{number}:1",
        )
        job.apply(join, now)
    return job, nodes


def test_a_thousand_joins_and_nine_hundred_departures_leave_a_hundred_waiting() -> None:
    job, nodes = gathered(1000, terms(2000))
    for number, (node, incarnation) in enumerate(nodes[:900]):
        job.apply(LeaveJob(node=node, incarnation=incarnation, reason=LeaveReason.PREEMPTED), micros(0))
        if number % 30 == 0:
            assert job.ask(AskStatus()) == job.status(), "asking changes nothing"
            job.next_deadline()
    assert len(job.state.rendezvous.waiting) == 100
    assert sum(node.status == "alive" for node in job.status().nodes) == 100
