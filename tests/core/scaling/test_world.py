"""An all-reduce job that finds its own size: what people are told, brakes, room, restarts of the master, and what a decision costs."""

from __future__ import annotations

import time

import pytest

from dlrover.core.scaling import facts
from dlrover.core.scaling.verdict import decide_world
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import FleetSpec, LaunchRefused, NodeType, ScaleJob
from dlrover.protocol.messages.scaling import (
    AskScaling,
    Brake,
    Configuration,
    DefineScaling,
    GroupSize,
    JobFacts,
    PlannedGroup,
    PlanOffered,
    RoomSeen,
    RunMeasured,
    ScaleFor,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    ScaleTo,
    ScalingStatus,
    SetScaling,
    SizePlan,
)
from tests.core.fleet.fleet_scene import FleetScene, workers
from tests.core.scaling.driver import Driver, family
from tests.core.scene import terms

LINEAR = family((1.0, 0.0, 0.0, 0.0))
BEST_AT_2 = family((0.01, 0.0, 0.0, 0.08))


def test_a_job_that_is_best_at_2_tries_3_takes_it_back_once_and_rests() -> None:
    driver = Driver(BEST_AT_2, max_nodes=4, noise=0.05)
    driver.minutes(20)
    assert driver.sizes == [1, 2, 3, 2]
    taken = next(made for made in driver.status.decisions if made.outcome is ScaleOutcome.TAKEN_BACK)
    assert "records/s before" in taken.sentence
    assert taken.speed_before > taken.speed_after > 0
    assert driver.status.decisions[-1].outcome is ScaleOutcome.RESTED


def test_people_are_told_sentence_candidates_brake_and_fit() -> None:
    driver = Driver(family((0.1, 0.01, 0.05, 0.02)), max_nodes=16, terms=ScaleTerms(mode=ScaleMode.DRY_RUN), start=16)
    driver.minutes(1)
    status = driver.status
    assert status.sentence
    assert status.configuration is not None
    assert (status.min_nodes, status.max_nodes, status.target) == (1, 16, 16)
    assert status.speed == pytest.approx(driver.speed(16))
    grown = Driver(family((0.1, 0.01, 0.05, 0.02)), max_nodes=16).minutes(12).status
    assert grown.fit is not None
    assert grown.fit.is_used
    assert grown.fit.error < 0.01
    assert 1 <= len(grown.candidates) <= 5
    assert all(candidate.why for candidate in grown.candidates if candidate.brake)
    assert any(point.is_predicted for point in grown.points)


def test_growth_is_never_more_than_twice_the_largest_size_that_was_seen() -> None:
    driver = Driver(LINEAR, max_nodes=64).minutes(14)
    assert driver.sizes == [1, 2, 3, 6, 12, 24, 48, 64]


def test_an_unknown_room_is_asked_for_one_unit_at_a_time() -> None:
    driver = Driver(LINEAR, max_nodes=8, room=None).minutes(12)
    assert driver.sizes == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_room_that_shrinks_is_an_order() -> None:
    driver = Driver(LINEAR, min_nodes=2, max_nodes=8, start=8)
    driver.do(RoomSeen(most=4, reason="a quota was cut"))
    assert driver.nodes == 4
    assert "(a quota was cut)" in driver.verdicts[-1] or any("a quota was cut" in said for said in driver.verdicts)
    driver.do(RoomSeen(most=1))
    assert driver.nodes == 2
    assert "fewer than the minimum of 2" in driver.status.decisions[-1].sentence
    driver.do(RoomSeen(most=8))
    driver.minutes(8)
    assert driver.nodes == 8, "and it grows again when there is room"


def test_a_room_is_no_order_for_who_ignores_it() -> None:
    driver = Driver(LINEAR, max_nodes=8, start=8, terms=ScaleTerms(mode=ScaleMode.ON, ignore_room=True))
    driver.do(RoomSeen(most=4))
    assert driver.nodes == 8


def test_a_person_sets_the_target_and_holds_it() -> None:
    driver = Driver(LINEAR, max_nodes=8, terms=ScaleTerms(mode=ScaleMode.ON, manual_hold=600))
    driver.minute()
    driver.do(ScaleTo(nodes=3, reason="a test"))
    assert driver.nodes == 3
    driver.minutes(3)
    assert driver.nodes == 3
    assert driver.status.brake is Brake.MANUAL_HOLD
    driver.minutes(8)
    assert driver.nodes > 3
    driver.do(ScaleTo(nodes=10))
    assert driver.job.state.terms is not None
    assert driver.job.state.terms.limits.max_nodes == 10
    assert driver.nodes == 10
    with pytest.raises(Rejected):
        driver.do(ScaleTo(nodes=0))
    driver.do(ScaleJob(min_nodes=1, max_nodes=4))
    assert driver.nodes == 4


def test_a_refused_launch_ends_the_plan_and_waits_ever_longer() -> None:
    driver = Driver(LINEAR, max_nodes=4, room=None)
    driver.is_platform_quick = False
    driver.minute()
    assert driver.target == 2
    driver.do(LaunchRefused(node=driver.launches[-1].id, reason="no quota"))
    assert driver.target == 1
    assert driver.job.state.scaling.no_room_until == driver.now + 300_000_000
    driver.minutes(4)
    assert driver.target == 2
    driver.do(LaunchRefused(node=driver.launches[-1].id, reason="no quota"))
    assert driver.job.state.scaling.no_room_until == driver.now + 600_000_000


def test_nodes_that_do_not_come_in_time_end_the_plan() -> None:
    driver = Driver(LINEAR, max_nodes=4)
    driver.is_platform_quick = False
    driver.minute().wait(601)
    assert driver.target == 1
    assert driver.nodes == 1


def test_an_offer_is_judged_by_the_brakes() -> None:
    driver = Driver(LINEAR, max_nodes=4, start=2)
    group = PlannedGroup(node_type=NodeType.WORKER, count=9)
    driver.minute()
    assert driver.target == 3
    quiet = Driver(LINEAR, max_nodes=4, start=2, terms=ScaleTerms(mode=ScaleMode.ON, optimizer="none"))  # type: ignore[arg-type]
    quiet.minute()
    quiet.do(PlanOffered(plan=SizePlan(groups=(group,)), expected_speed=1000))
    assert quiet.target == 2
    assert quiet.status.decisions[-1].brake is Brake.BOUND
    fitting = PlannedGroup(node_type=NodeType.WORKER, count=4)
    quiet.do(PlanOffered(plan=SizePlan(groups=(fitting,)), expected_speed=1000, sentence="like the last five jobs"))
    assert quiet.target == 4
    assert "as brain proposes: like the last five jobs" in quiet.status.decisions[-1].sentence


def test_nothing_pays_at_the_end_of_a_job() -> None:
    driver = Driver(LINEAR, max_nodes=4)
    driver.do(JobFacts(max_steps=1000))
    driver.wait(75)
    driver.do(driver.measured(last_step=999))
    assert driver.target == 1
    assert driver.status.decisions[-1].brake is Brake.COST


def test_cost_lets_a_job_shrink_and_balanced_does_not() -> None:
    flat = family((0.0, 0.0, 0.1, 0.1))
    for scale_for, nodes in ((ScaleFor.BALANCED, 8), (ScaleFor.COST, 1)):
        driver = Driver(flat, max_nodes=8, start=8, terms=ScaleTerms(mode=ScaleMode.ON, scale_for=scale_for))
        driver.minutes(150)
        assert driver.nodes <= 2 if nodes == 1 else driver.nodes == 8


def test_a_person_switches_it_off_and_on() -> None:
    driver = Driver(LINEAR, max_nodes=8)
    driver.do(SetScaling(mode=ScaleMode.OFF))
    driver.minutes(4)
    assert driver.nodes == 1
    driver.do(SetScaling(mode=ScaleMode.ON))
    driver.minutes(2)
    assert driver.nodes > 1


def test_a_master_that_is_killed_after_each_step_carries_each_plan_out_once() -> None:
    scene = FleetScene(terms(1, 4))
    scene.do(DefineScaling(terms=ScaleTerms(mode=ScaleMode.ON, nodes_start=1)))
    scene.begin(FleetSpec(replicas=workers(4)))
    scene.do(RoomSeen(most=4))
    scene.train(0)
    num_kills = 0

    def kill() -> None:
        nonlocal num_kills
        num_kills += 1
        digest = scene.job.encode()
        target = scene.job.state.limits.max_nodes
        assert digest
        scene.restart_master()
        scene.list()
        for name in list(scene.agents):
            scene.attach(name, running_round=scene.job.state.rendezvous.round)
        assert scene.job.state.limits.max_nodes == target

    seconds = 100.0
    for count in (1, 2, 3):
        scene.tick(seconds)
        configuration = Configuration(groups=(GroupSize(NodeType.WORKER, count),), micro_batch=32)
        kill()
        scene.do(RunMeasured(number=count, configuration=configuration, seconds=70.0, steps=70, step_time=1.0))
        kill()
        assert scene.launched == list(range(count + 1))
        assert scene.job.state.limits.max_nodes == count + 1
        scene.run(count)
        kill()
        scene.come(count)
        kill()
        scene.rejoin_nodes(count)
        kill()
        scene.obey(*(f"n{node}" for node in range(count + 1)))
        kill()
        scene.tick(seconds + 60)
        assert len(scene.members()) == count + 1
        kill()
        seconds += 200
    assert num_kills >= 20
    assert scene.launched == [0, 1, 2, 3]
    answer = scene.job.ask(AskScaling())
    assert isinstance(answer, ScalingStatus)
    assert any("4 nodes instead of 3" in made.sentence for made in answer.decisions)


def test_a_decision_with_64_runs_and_1000_candidates_is_quick() -> None:
    driver = Driver(family((0.1, 0.01, 0.05, 0.0001)), max_nodes=1000, room=5000)
    driver.minute()
    scaling = driver.job.state.scaling
    for index in range(70):
        nodes = 600 + index % 30
        configuration = driver.configuration(nodes)
        driver.number += 1
        run = RunMeasured(
            number=driver.number, configuration=configuration, seconds=60, steps=60, step_time=driver.law(nodes)
        )
        from dlrover.core.scaling import evidence

        evidence.keep_run(scaling, run, driver.now)
    assert len(scaling.runs) > 50
    known = facts.gather(driver.job.state, driver.now)
    from msgspec.structs import replace

    known = replace(known, nodes=1, configuration=driver.configuration(1), speed=32.0, off="", under_way="", unseen="")
    began = time.process_time()
    for _ in range(20):
        decide_world(scaling, known)
    seconds = (time.process_time() - began) / 20
    print(f"\none decision: {1000 * seconds:.2f} ms")
    assert seconds < 0.05, "ten times the budget"
