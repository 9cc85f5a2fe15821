"""
Parameter-server jobs in the simulator: servers, chiefs and workers are lost, servers are scaled and exchanged, masters die.

Each mutation takes one promise of `core/clusters` or of the cuts away, and the simulator has to notice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlrover.core.clusters.cluster import Cluster, TaskProcess
from dlrover.core.data import cuts
from dlrover.core.data.dataset import Dataset
from dlrover.protocol.messages.cluster import ClusterPhase
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job import Micros
from dlrover.simulator.campaign import Failure, draw_task_plan, run_plan
from dlrover.simulator.plan import Result
from dlrover.simulator.simulation import Simulation

NUM_FAULTS = 12_000
LIKELY = {"nobody_parks": 15, "saving_has_no_end": 450, "servers_leave_before_all_have_moved": 517}
"""Seeds from which a mutation that few seeds notice is soon noticed. Only the time of the search hangs on them."""
Mutation = Callable[[pytest.MonkeyPatch], None]


def test_two_thousand_faults_break_nothing_and_every_phase_is_met() -> None:
    num_faults, num_planned, kinds, phases = 0, 0, set[str](), set[ClusterPhase]()
    for seed in range(1, 400):
        simulation = Simulation(draw_task_plan(seed))
        result = simulation.run()
        assert simulation.tasks is not None
        num_faults += result.num_faults
        num_planned += simulation.tasks.num_planned
        kinds |= result.by_kind.keys()
        phases |= simulation.tasks.phases.keys()
        if num_faults > 2000:
            break
    assert phases == set(ClusterPhase)
    assert num_planned > 5
    assert {"scaling", "exchange", "worker-crash", "master-crash", "machine-gone", "partition", "freeze"} <= kinds


def test_the_same_seed_is_the_same_life() -> None:
    first, second = run_plan(draw_task_plan(7)), run_plan(draw_task_plan(7))
    assert isinstance(first, Result)
    assert first == second


def saves_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "take_cut", lambda self, process: self.cut)


def books_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "_return_to_cut", lambda decision, cut, data_state: None)


def nobody_parks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_unparked", lambda self: [])


def parking_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Cluster.deadline
    monkeypatch.setattr(
        Cluster, "deadline", lambda self: None if self.phase is ClusterPhase.PARKING else deadline(self)
    )


def saving_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief that is lost while it saves is waited for."""
    chief = Cluster._chief

    def anyone(self: Cluster) -> TaskProcess | None:
        found = chief(self)
        return (
            found
            if found is not None or self.phase is not ClusterPhase.SAVING
            else next(iter(self.processes.values()), None)
        )

    deadline = Cluster.deadline
    monkeypatch.setattr(Cluster, "_chief", anyone)
    monkeypatch.setattr(Cluster, "deadline", lambda self: None if self.phase is ClusterPhase.SAVING else deadline(self))


def servers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of the servers that are left serve the next version, too."""
    begin = Cluster._begin_version

    def keep(self: Cluster, why: str, now: Micros, said: list[str]) -> None:
        kept = {node: each for node, each in self.processes.items() if each.seat.node_type is NodeType.PS}
        begin(self, why, now, said)
        self.processes |= kept

    monkeypatch.setattr(Cluster, "_begin_version", keep)


def a_lost_server_is_no_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "_vital_ended", lambda self, process, now: self._restart(process) or [])


def a_lost_chief_restores_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorFlow's own chief: under the feet of the workers."""
    restart = Cluster._restart

    def forget(self: Cluster, process: TaskProcess) -> None:
        restart(self, process)
        if process.seat.node_type is NodeType.CHIEF:
            self.restored_step, self.phase = None, ClusterPhase.RESTORING

    monkeypatch.setattr(Cluster, "_restart", forget)


def servers_leave_before_all_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "is_settled", property(lambda self: True))


def leases_of_an_old_version_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "end_leases", lambda self, readers: 0)


@pytest.mark.parametrize(
    ("mutation", "invariants"),
    [
        (saves_do_not_divide, {"I3"}),
        (books_stay_where_they_are, {"I3"}),
        (nobody_parks, {"cluster", "I3"}),
        (parking_has_no_end, {"cluster"}),
        (saving_has_no_end, {"cluster", "servers"}),
        (servers_are_kept, {"cluster", "I8"}),
        (a_lost_server_is_no_new_version, {"cluster", "I8", "I3"}),
        (a_lost_chief_restores_again, {"cluster", "I3", "core"}),
        (servers_leave_before_all_have_moved, {"servers", "core", "I8"}),
        (leases_of_an_old_version_stay, {"I3", "I8", "core"}),
    ],
)
def test_a_broken_promise_is_noticed(mutation: Mutation, invariants: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    num_faults = 0
    first = LIKELY.get(mutation.__name__, 1)
    for seed in range(first, first + 2000):
        outcome: Any = run_plan(draw_task_plan(seed))
        if isinstance(outcome, Failure):
            assert outcome.invariant in invariants, outcome.sentence
            monkeypatch.undo()
            assert isinstance(run_plan(draw_task_plan(seed)), Result), "the mutation broke it, nothing else"
            return
        num_faults += outcome.num_faults
        assert num_faults < NUM_FAULTS, "nobody noticed"
