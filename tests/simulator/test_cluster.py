"""
Pods in simulated jobs: the ledger is in the way of an old master, and a pod that comes late is wanted or removed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dlrover.core.fleet import platform_news
from dlrover.platforms.kubernetes.job.ledger_state import LedgerState
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec
from dlrover.simulator.campaign import Failure, draw_plan, run_plan
from dlrover.simulator.faults.kinds import Fault
from dlrover.simulator.nodes.cluster import VirtualCluster
from dlrover.simulator.plan import Result, SeedPlan
from dlrover.simulator.shapes import Shape
from dlrover.simulator.simulation import Simulation

SECOND = 1_000_000
MOST_NODES = 12
MOST_FAULTS = 5000


def plan_of(seed: int) -> SeedPlan:
    """
    An evaluator's pod is deleted, and the create of its replacement is under way when its master falls asleep. The next master makes that
    pod, too, and it is deleted in its turn. Then the first master wakes up.
    """
    replicas = {NodeType.WORKER: ReplicaSpec(count=3), NodeType.EVALUATOR: ReplicaSpec(count=1)}
    fleet = FleetSpec(replicas=replicas, remove_exited=False)
    shape = Shape(min_nodes=2, max_nodes=3, fleet=fleet, num_steps=3000, has_pods=True)
    faults = (
        Fault(at=200 * SECOND, kind="followed-in-a-launch", pick=0, amount=1.0),
        Fault(at=201 * SECOND, kind="eviction", pick=7, amount=0.5),
        Fault(at=350 * SECOND, kind="eviction", pick=7, amount=0.5),
    )
    return SeedPlan(seed=seed, shape=shape, faults=faults, hours=0.3)


def run_whole(plan: SeedPlan) -> VirtualCluster:
    simulation = Simulation(plan)
    assert simulation.run().reason == "Completed"
    assert isinstance(simulation.platform, VirtualCluster)
    return simulation.platform


def seed_of_a_late_create() -> int:
    """Half of the clusters refuse a master whose pod is gone: there nothing comes late."""
    return next(seed for seed in range(1, 40) if run_whole(plan_of(seed)).num_late_creates)


def test_a_create_that_was_past_the_ledger_takes_effect_once_and_the_job_completes() -> None:
    pods = run_whole(plan_of(seed_of_a_late_create()))
    assert pods.num_late_creates == 1
    assert pods.ledger.epoch == 2
    assert pods.num_conflicts > 0, "two masters wrote"


def test_an_id_that_the_ledger_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget() -> None:
        monkeypatch.setattr(LedgerState, "marked", lambda state, ids, *, is_open: state)

    assert noticed_after(forget) == "pods"


def test_a_late_pod_that_nobody_removes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(seed_of_a_late_create())
    monkeypatch.setattr(platform_news, "_hear_of_unwanted", lambda fleet, node: None)
    failure = run_plan(plan)
    assert isinstance(failure, Failure)
    assert failure.invariant == "pods"
    assert "the job neither wants nor removes it" in failure.sentence


def test_pods_of_drawn_jobs_break_nothing() -> None:
    plans = (plan for plan in map(draw_plan, range(1, 400)) if plan.shape.has_pods)
    num_faults, by_kind = 0, set[str]()
    for plan in plans:
        if plan.shape.num_nodes > MOST_NODES:
            continue
        result = run_plan(plan)
        assert isinstance(result, Result), result
        num_faults += result.num_faults
        by_kind |= result.by_kind.keys()
        if num_faults > 500:
            break
    assert {"followed-in-a-launch", "eviction", "cloud-away", "two-masters"} <= by_kind


def noticed_after(mutation: Callable[[], None]) -> str:
    """Which invariant is broken first in jobs with pods."""
    mutation()
    num_faults = 0
    for seed in range(1, 2000):
        plan = draw_plan(seed)
        if not plan.shape.has_pods or plan.shape.num_nodes > MOST_NODES:
            continue
        outcome = run_plan(plan)
        if isinstance(outcome, Failure):
            return outcome.invariant
        num_faults += outcome.num_faults
        assert num_faults < MOST_FAULTS, "nobody noticed"
    raise AssertionError("no such job was drawn")
