"""A node for which the others wait is exchanged for another one, elsewhere, if that pays."""

from __future__ import annotations

from typing import Any

from dlrover.protocol.messages.fleet import LaunchRefused, NodeType
from dlrover.protocol.messages.identity import NodeRank, PlatformId
from dlrover.protocol.messages.scaling import JobFacts, NodeUse, ScaleMode, ScaleOutcome, ScaleTerms
from tests.core.scaling.driver import Driver, family

LAW = family((1.0, 0.0, 0.0, 0.0))


def job(**more: Any) -> Driver:
    """Three nodes, as many as it may have: only an exchange can change it."""
    driver = Driver(LAW, 2, 3, start=3, **more)
    driver.wait(600)
    return driver


def slow(driver: Driver, rank: int, wait: float) -> NodeUse:
    fleet = driver.job.state.fleet
    assert fleet is not None
    node = fleet.holder(NodeType.WORKER, rank)
    assert node is not None
    return NodeUse(platform_node=PlatformId(node.id), rank=NodeRank(rank), wait_per_step=wait)


def holder(driver: Driver, rank: int) -> int:
    fleet = driver.job.state.fleet
    assert fleet is not None
    node = fleet.holder(NodeType.WORKER, rank)
    assert node is not None
    return node.id


def test_a_slow_node_is_exchanged_once_and_away_from_its_machine() -> None:
    driver = job()
    old = holder(driver, 1)
    driver.minute(nodes=(slow(driver, 1, 0.3),))
    assert holder(driver, 1) != old
    assert driver.launches[-1].rank == 1
    assert f"m{old}" in driver.launches[-1].avoid_hosts
    made = driver.status.decisions[-1]
    assert made.outcome is ScaleOutcome.PLANNED
    assert "The others wait 0.3 s for it in each step of 1 s (+43% speed is expected" in made.sentence
    assert driver.nodes == 3
    fleet = driver.job.state.fleet
    assert fleet is not None
    assert not fleet.workers.spent, "it costs no relaunch"
    newer = holder(driver, 1)
    for _ in range(5):
        driver.minute(nodes=(slow(driver, 1, 0.3),))
    assert holder(driver, 1) == newer, "once for each rank: another node is no cure"


def test_two_nodes_in_an_hour_at_most() -> None:
    driver = job()
    num_launched = len(driver.launches)
    for rank in (0, 1, 2):
        driver.wait(400).minute(nodes=(slow(driver, rank, 0.3),))
    assert len(driver.launches) == num_launched + 2
    driver.wait(3600).minute(nodes=(slow(driver, 2, 0.3),))
    assert len(driver.launches) == num_launched + 3


def test_it_stays_where_the_exchange_does_not_pay() -> None:
    for wait, max_steps, why in ((0.02, 0, "less than 5 %"), (0.3, 1000, "the job is over")):
        driver = job()
        driver.do(JobFacts(max_steps=max_steps))
        old = holder(driver, 1)
        driver.minute(nodes=(slow(driver, 1, wait),), last_step=1000)
        assert holder(driver, 1) == old, why


def test_people_decide_where_scaling_is_off_and_a_dry_run_only_tells() -> None:
    for mode in (ScaleMode.OFF, ScaleMode.DRY_RUN):
        driver = job(terms=ScaleTerms(mode=mode))
        old = holder(driver, 1)
        driver.minute(nodes=(slow(driver, 1, 0.3),))
        assert holder(driver, 1) == old
        told = [made for made in driver.status.decisions if made.outcome is ScaleOutcome.DRY]
        assert bool(told) == (mode is ScaleMode.DRY_RUN)


def test_an_exchange_whose_new_node_does_not_come_is_called_off() -> None:
    for is_refused in (True, False):
        driver = job()
        old = holder(driver, 1)
        driver.is_platform_quick = False
        driver.minute(nodes=(slow(driver, 1, 0.3),))
        fleet = driver.job.state.fleet
        assert fleet is not None
        assert list(fleet.migrations) == [old]
        if is_refused:
            driver.do(LaunchRefused(node=driver.launches[-1].id, reason="no quota"))
        else:
            driver.wait(601)
        assert not fleet.migrations
        assert holder(driver, 1) == old
        assert driver.nodes == 3, "and it trains on"
        assert any("stays, because" in said for said in driver.verdicts)
