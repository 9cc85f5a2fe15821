"""Versions of a cluster by themselves: values in, phases and sentences out."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dlrover.core.clusters.cluster import (
    EVALUATION_PATIENCE,
    FINISH_PATIENCE,
    GATHER_PATIENCE,
    PARK_PATIENCE,
    RESTORE_PATIENCE,
    SAVE_PATIENCE,
    Cluster,
    Seat,
    Surroundings,
    TaskProcess,
    check_saver,
)
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import ClusterPhase
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Incarnation, Micros, NodeId, PlatformId, Round

P = ClusterPhase
START = Micros(0)


@dataclass
class Stage:
    """A cluster and what surrounds it. Nodes are called by type and rank."""

    cluster: Cluster = field(default_factory=Cluster)
    seats: dict[str, Seat] = field(default_factory=dict)
    wanted: list[str] = field(default_factory=list)
    is_complete: bool = True
    now: Micros = START
    said: list[str] = field(default_factory=list)
    num_nodes: int = 0

    @classmethod
    def of(cls, *names: str) -> Stage:
        stage = cls()
        stage.wanted = [name for name in names if name.startswith("ps")]
        return stage.come(*names)

    def come(self, *names: str) -> Stage:
        for name in names:
            kind, rank = name.split("-")
            self.num_nodes += 1
            self.seats[name] = Seat(
                node=NodeId(self.num_nodes),
                incarnation=Incarnation(1),
                node_type=NodeType(kind),
                rank=int(rank),
                platform=PlatformId(100 + self.num_nodes),
            )
        return self.look()

    def go(self, *names: str) -> Stage:
        for name in names:
            del self.seats[name]
        return self.look()

    def want(self, *names: str) -> Stage:
        self.wanted = list(names)
        return self.look()

    def look(self) -> Stage:
        servers = tuple(self.seats[name].platform if name in self.seats else PlatformId(-1) for name in self.wanted)
        around = Surroundings(seats=tuple(self.seats.values()), servers=servers, is_complete=self.is_complete)
        self.said += self.cluster.look(around, self.now)
        return self

    def process(self, name: str) -> TaskProcess:
        return self.cluster.processes[self.seats[name].node]

    def round(self, name: str) -> Round:
        return self.process(name).round

    def bind(self, *names: str) -> Stage:
        for name in names:
            self.cluster.bound(self.process(name), f"{name}:{self.round(name)}")
            self.look()
        return self

    def restore(self, step: int = -1) -> Stage:
        self.said += self.cluster.restored(self.process("chief-0"), step, self.now)
        return self.look()

    def park(self, *names: str) -> Stage:
        for name in names:
            self.cluster.parked(self.process(name))
            self.look()
        return self

    def save(self, step: int) -> Stage:
        self.said += self.cluster.saved(self.process("chief-0"), step, self.now)
        return self.look()

    def fail(self, name: str, *, is_long_life: bool = False) -> int:
        said, count = self.cluster.failed(self.seats[name].node, self.round(name), self.now, is_long_life=is_long_life)
        self.said += said
        self.look()
        return count

    def finish(self, name: str) -> Stage:
        self.said += self.cluster.ended_well(self.seats[name].node, self.round(name), self.now)
        return self.look()

    def after(self, seconds: float) -> Stage:
        self.now = Micros(self.now + round(seconds * 1_000_000))
        self.said += self.cluster.expire(self.now)
        return self.look()

    def _is_training(self, name: str) -> bool:
        return name.startswith(("chief", "worker")) and self.cluster.round_of(self.seats[name].node) > 0

    def train(self) -> Stage:
        """Everybody does what is asked for, until the newest version trains."""
        for _ in range(20):
            if self.cluster.phase is P.TRAINING:
                break
            for name, seat in list(self.seats.items()):
                process = self.cluster.processes.get(seat.node)
                if process is not None and process.is_at_work and not process.is_bound:
                    self.bind(name)
            has_chief = "chief-0" in self.seats and self.cluster.round_of(self.seats["chief-0"].node) > 0
            if self.cluster.phase is P.RESTORING and has_chief:
                self.restore(self.cluster.saved_step)
            if self.cluster.phase is P.PARKING:
                self.park(*(name for name in self.seats if self._is_training(name)))
            if self.cluster.phase is P.SAVING and has_chief:
                self.save(self.cluster.saved_step + 1)
        return self


def usual() -> Stage:
    return Stage.of("ps-0", "ps-1", "chief-0", "worker-0", "evaluator-0").train()


def test_a_version_trains_when_its_servers_are_bound_and_its_chief_has_restored() -> None:
    stage = Stage.of("ps-0", "ps-1", "chief-0", "worker-0")
    assert stage.cluster.phase is P.GATHERING
    stage.bind("ps-1", "chief-0", "worker-0")
    assert stage.cluster.view().servers == ()
    stage.bind("ps-0")
    assert stage.cluster.phase is P.RESTORING
    assert [address.split(":")[0] for address in stage.cluster.view().servers] == ["ps-0", "ps-1"]
    stage.restore(7)
    assert (stage.cluster.phase, stage.cluster.restored_step) == (P.TRAINING, 7)
    assert stage.said[-1] == "Version 1 trains the model of step 7 on 2 parameter servers."


def test_a_lost_server_begins_a_version_of_fresh_processes() -> None:
    stage = usual()
    before = {name: stage.round(name) for name in stage.seats}
    stage.fail("ps-0")
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)
    assert stage.said[-1] == "Version 2 of the cluster begins: ps-0 is lost."
    assert stage.round("evaluator-0") == before["evaluator-0"]
    assert all(stage.round(name) > before[name] for name in ("ps-0", "ps-1", "chief-0", "worker-0"))
    assert stage.train().cluster.phase is P.TRAINING


def test_survivors_start_before_the_replacement_of_a_lost_server_has_come() -> None:
    stage = usual()
    stage.is_complete = False
    stage.go("ps-1")
    stage.bind("ps-0", "chief-0", "worker-0")
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)
    stage.is_complete = True
    stage.come("ps-1").bind("ps-1")
    assert stage.cluster.phase is P.RESTORING


def test_a_restarted_agent_has_lost_its_process() -> None:
    stage = usual()
    stage.seats["ps-0"] = replace(stage.seats["ps-0"], incarnation=Incarnation(2))
    assert stage.look().cluster.version == 2
    stage.train()
    before = stage.round("worker-0")
    stage.seats["worker-0"] = replace(stage.seats["worker-0"], incarnation=Incarnation(2))
    stage.look()
    assert stage.cluster.version == 2
    assert stage.round("worker-0") > before


def test_a_lost_worker_or_chief_is_no_other_version() -> None:
    stage = usual()
    assert stage.fail("worker-0") == 1
    assert stage.fail("chief-0") == 1
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)
    assert stage.cluster.view().restored_step is not None  # by which the new chief knows that the variables live
    assert stage.bind("chief-0").restore(99).cluster.restored_step == -1


def test_a_planned_change_parks_saves_and_begins_the_next_version() -> None:
    stage = usual()
    stage.come("ps-2").want("ps-0", "ps-1", "ps-2")
    assert stage.cluster.phase is P.PARKING
    assert stage.seats["ps-2"].node not in stage.cluster.processes
    stage.park("worker-0")
    assert stage.cluster.phase is P.PARKING
    stage.park("chief-0")
    assert stage.cluster.phase is P.SAVING
    stage.save(40)
    assert (stage.cluster.version, stage.cluster.phase, stage.cluster.saved_step) == (2, P.GATHERING, 40)
    stage.train()
    assert len(stage.cluster.servers) == 3
    assert stage.cluster.is_settled


def test_a_change_waits_until_all_wanted_servers_are_there() -> None:
    stage = usual()
    stage.want("ps-0", "ps-1", "ps-2")
    assert stage.cluster.phase is P.TRAINING
    assert stage.come("ps-2").cluster.phase is P.PARKING


def test_a_second_change_during_the_first_is_a_second_version_at_most() -> None:
    stage = usual().come("ps-2", "ps-3")
    stage.want("ps-0", "ps-1", "ps-2")
    stage.want("ps-0", "ps-1", "ps-2", "ps-3")
    assert stage.cluster.phase is P.PARKING
    stage.train()
    assert (stage.cluster.version, len(stage.cluster.servers)) == (2, 4)
    stage.want("ps-0").train()
    assert (stage.cluster.version, len(stage.cluster.servers)) == (3, 1)


def test_who_does_not_park_in_time_is_ended() -> None:
    stage = usual().want("ps-0").park("chief-0").after(PARK_PATIENCE)
    assert stage.cluster.phase is P.SAVING
    assert stage.cluster.task(stage.seats["worker-0"].node) is None
    assert any("worker-0 has not parked within 30 s" in sentence for sentence in stage.said)


def test_a_chief_that_does_not_park_is_as_lost_as_a_server() -> None:
    stage = usual().want("ps-0").park("worker-0").after(PARK_PATIENCE)
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)


@pytest.mark.parametrize("how", ["late", "failed", "gone"])
def test_a_chief_lost_while_it_saves_leaves_the_last_checkpoint(how: str) -> None:
    stage = usual().want("ps-0").park("chief-0", "worker-0")
    assert stage.cluster.phase is P.SAVING
    if how == "late":
        stage.after(SAVE_PATIENCE)
    elif how == "failed":
        stage.fail("chief-0")
    else:
        stage.go("chief-0")
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)


def test_servers_that_do_not_come_in_time_are_done_without() -> None:
    stage = Stage.of("ps-0", "chief-0")
    stage.is_complete = False
    stage.want("ps-0", "ps-1").bind("ps-0", "chief-0")
    assert stage.cluster.phase is P.GATHERING
    stage.after(GATHER_PATIENCE)
    assert (stage.cluster.phase, stage.cluster.has_failure) == (P.RESTORING, True)
    assert "Only 1 of 2 parameter servers came in time" in stage.said[-1]


def test_without_any_server_the_job_goes_on_waiting() -> None:
    stage = Stage.of("chief-0").want("ps-0").after(GATHER_PATIENCE)
    assert stage.cluster.phase is P.GATHERING
    assert stage.cluster.deadline() is None
    stage.come("ps-0").bind("ps-0")
    assert stage.cluster.phase is P.RESTORING


def test_a_chief_that_does_not_restore_in_time_begins_the_next_version() -> None:
    """It may be about to restore: on the servers of this version it must meet nobody who trains."""
    stage = Stage.of("ps-0", "chief-0").bind("ps-0", "chief-0")
    before = stage.round("chief-0")
    stage.after(RESTORE_PATIENCE)
    assert stage.round("chief-0") > before
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)


def test_a_chief_that_vanishes_while_it_restores_begins_the_next_version() -> None:
    stage = Stage.of("ps-0", "chief-0", "worker-0").bind("ps-0", "chief-0", "worker-0")
    stage.go("chief-0")
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)
    assert stage.said[-1] == "Version 2 of the cluster begins: the chief was lost while it restored the model."


def test_a_chief_whose_process_fails_while_it_restores_starts_again_in_the_same_version() -> None:
    stage = Stage.of("ps-0", "chief-0").bind("ps-0", "chief-0")
    stage.fail("chief-0")
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.RESTORING)


def saving_exactly() -> Stage:
    """A chief that wants an exact save."""
    stage = usual()
    stage.cluster.park_for_save(stage.process("chief-0"), stage.now)
    return stage.look()


def test_an_exact_save_parks_all_and_lets_them_go_on_in_the_same_version() -> None:
    stage = saving_exactly()
    assert stage.cluster.phase is P.PARKING
    first = stage.cluster.view().num_parks
    stage.park("chief-0")
    assert stage.cluster.phase is P.PARKING
    stage.park("worker-0")
    assert stage.cluster.phase is P.SAVING
    rounds = [stage.round(name) for name in ("ps-0", "chief-0", "worker-0")]
    stage.save(7)
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)
    assert [stage.round(name) for name in ("ps-0", "chief-0", "worker-0")] == rounds
    stage.cluster.park_for_save(stage.process("chief-0"), stage.now)
    assert stage.cluster.phase is P.PARKING
    assert stage.cluster.view().num_parks == first + 1
    stage.park("chief-0")
    assert stage.cluster.phase is P.PARKING, "who parked for the save before has to park again"


def test_a_change_of_servers_during_an_exact_save_needs_no_second_one() -> None:
    stage = saving_exactly().come("ps-2")
    stage.want("ps-0", "ps-1", "ps-2").park("chief-0", "worker-0")
    assert stage.cluster.phase is P.SAVING
    stage.save(9)
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)


def test_nobody_is_ended_for_an_exact_save() -> None:
    stage = saving_exactly().park("chief-0").after(PARK_PATIENCE)
    assert stage.cluster.phase is P.SAVING
    assert "worker-0 has not parked within 30 s: this save is not exact." in stage.said
    assert stage.cluster.round_of(stage.seats["worker-0"].node) > 0
    stage.save(7)
    assert stage.cluster.phase is P.TRAINING


def test_a_chief_in_a_long_step_or_a_long_save_holds_up_nobody() -> None:
    stage = saving_exactly().park("worker-0").after(PARK_PATIENCE)
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)
    stage = saving_exactly().park("chief-0", "worker-0").after(SAVE_PATIENCE)
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)


@pytest.mark.parametrize("is_parked", [False, True])
def test_a_chief_lost_in_an_exact_save_costs_no_version(is_parked: bool) -> None:
    stage = saving_exactly()
    if is_parked:
        stage.park("chief-0", "worker-0")
    stage.fail("chief-0")
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)
    stage = saving_exactly()
    if is_parked:
        stage.park("chief-0", "worker-0")
    stage.go("chief-0")
    assert (stage.cluster.version, stage.cluster.phase) == (1, P.TRAINING)


def test_only_the_chief_asks_for_an_exact_save_and_only_while_all_train() -> None:
    stage = usual()
    with pytest.raises(Rejected, match="only the chief does"):
        stage.cluster.park_for_save(stage.process("worker-0"), stage.now)
    stage.want("ps-0").park("chief-0", "worker-0")
    assert stage.cluster.phase is P.SAVING
    stage.cluster.park_for_save(stage.process("chief-0"), stage.now)
    stage.save(3)
    assert stage.cluster.version == 2, "the change goes on"


def test_a_coordinator_begins_the_next_version_when_it_needs_one() -> None:
    """Design 12: nothing of a lost coordinator can be taken over, and to a running one no worker can be added."""
    stage = usual()
    rounds = {name: stage.round(name) for name in ("ps-0", "ps-1", "chief-0", "worker-0", "evaluator-0")}
    stage.said += stage.cluster.renew(stage.process("chief-0"), "a worker has joined", stage.now)
    stage.look()
    assert stage.said[-1] == "Version 2 of the cluster begins: a worker has joined."
    assert stage.round("evaluator-0") == rounds.pop("evaluator-0")
    assert all(stage.round(name) > former for name, former in rounds.items())
    assert stage.cluster.renew(stage.process("chief-0"), "again", stage.now) == [], "one has just begun"
    stage.train().finish("chief-0")
    version = stage.cluster.version
    with pytest.raises(Rejected, match="only the chief"):
        stage.cluster.renew(stage.process("worker-0"), "it wants to", stage.now)
    assert stage.cluster.version == version


@pytest.mark.parametrize("phase", [P.RESTORING, P.PARKING, P.SAVING])
def test_a_coordinator_may_need_the_next_version_in_any_phase(phase: ClusterPhase) -> None:
    stage = Stage.of("ps-0", "chief-0", "worker-0").bind("ps-0", "chief-0", "worker-0")
    if phase is not P.RESTORING:
        stage.restore().come("ps-1").want("ps-0", "ps-1")
    if phase is P.SAVING:
        stage.park("chief-0", "worker-0")
    assert stage.cluster.phase is phase
    stage.cluster.renew(stage.process("chief-0"), "a server does not answer", stage.now)
    stage.look()
    assert (stage.cluster.version, stage.cluster.phase) == (2, P.GATHERING)
    stage.train()
    assert stage.cluster.version == 2


def test_workers_are_found_by_their_ranks_and_come_back_where_they_were() -> None:
    stage = usual().come("worker-1").bind("worker-1")
    addresses = {0: stage.process("worker-0").address, 1: stage.process("worker-1").address}
    assert stage.cluster.view().workers == addresses
    stage.fail("worker-0")
    assert not stage.process("worker-0").is_bound
    assert stage.cluster.view().workers == addresses, "its next process may listen there again"
    number = stage.cluster.number
    stage.bind("worker-0")
    assert stage.cluster.view().workers[0] != addresses[0]
    assert stage.cluster.number > number, "who waits for it hears of it"
    stage.cluster.renew(stage.process("chief-0"), "a worker listens elsewhere", stage.now)
    stage.look()
    assert stage.cluster.view().workers == {}, "the next version begins on other ports"


def test_how_many_workers_are_wanted_is_in_the_view() -> None:
    stage = usual()
    number = stage.cluster.number
    around = Surroundings(seats=tuple(stage.seats.values()), servers=tuple(stage.cluster.servers), num_workers=3)
    stage.cluster.look(around, stage.now)
    assert (stage.cluster.view().num_wanted_workers, stage.cluster.number) == (3, number + 1)
    stage.cluster.look(around, stage.now)
    assert stage.cluster.number == number + 1


def test_a_server_that_fails_while_all_are_gathered_is_only_started_again() -> None:
    stage = Stage.of("ps-0", "ps-1", "chief-0")
    before = stage.round("ps-0")
    stage.fail("ps-0")
    assert stage.cluster.version == 1
    assert stage.round("ps-0") > before


def test_what_an_ended_process_says_changes_nothing() -> None:
    stage = usual()
    old = stage.round("worker-0")
    stage.fail("ps-0")
    with pytest.raises(Rejected, match="older version"):
        stage.cluster.current(stage.seats["worker-0"].node, old)
    assert stage.cluster.failed(stage.seats["worker-0"].node, old, stage.now, is_long_life=False) == ([], 0)
    assert stage.cluster.ended_well(stage.seats["worker-0"].node, old, stage.now) == []


def test_only_the_chief_saves_and_restores() -> None:
    stage = usual()
    for act in (
        lambda: stage.cluster.take_cut(stage.process("worker-0")),
        lambda: check_saver(stage.process("worker-0")),
        lambda: stage.cluster.restored(stage.process("worker-0"), 5, stage.now),
    ):
        with pytest.raises(Rejected):
            act()


def test_cuts_only_grow() -> None:
    stage = usual()
    assert [stage.cluster.take_cut(stage.process("chief-0")) for _ in range(3)] == [0, 1, 2]
    stage.cluster.returned_to(10)
    assert stage.cluster.take_cut(stage.process("chief-0")) == 11
    stage.cluster.returned_to(-1)
    assert stage.cluster.cut == 12


def test_failures_in_a_row_are_counted_until_there_is_progress() -> None:
    stage = usual()
    assert [stage.fail("worker-0") for _ in range(3)] == [1, 2, 3]
    stage.cluster.progress += 1
    assert stage.fail("worker-0") == 1
    assert stage.fail("worker-0", is_long_life=True) == 1


def test_the_job_is_complete_when_chief_workers_and_the_last_evaluation_have_ended() -> None:
    stage = usual().bind("evaluator-0").finish("chief-0")
    assert not stage.cluster.is_complete(stage.now)
    stage.finish("worker-0")
    assert not stage.cluster.is_complete(stage.now)
    stage.finish("evaluator-0")
    assert stage.cluster.is_complete(stage.now)


def test_workers_and_evaluations_that_do_not_end_are_waited_for_only_so_long() -> None:
    stage = usual().bind("evaluator-0").finish("chief-0").after(FINISH_PATIENCE)
    assert stage.cluster.is_complete(stage.now)
    stage = usual().bind("evaluator-0").finish("chief-0").finish("worker-0").after(FINISH_PATIENCE)
    assert not stage.cluster.is_complete(stage.now)
    assert stage.after(EVALUATION_PATIENCE).cluster.is_complete(stage.now)


def test_a_worker_that_had_finished_starts_again_after_the_loss_of_a_server() -> None:
    stage = usual().finish("worker-0")
    assert stage.cluster.task(stage.seats["worker-0"].node) is None
    stage.fail("ps-0")
    assert stage.cluster.task(stage.seats["worker-0"].node) is not None


_NAMES = ("ps-0", "ps-1", "ps-2", "chief-0", "worker-0", "worker-1", "evaluator-0")
_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("come", "go", "bind", "fail", "want", "restore", "park", "save", "cut", "after", "train")),
        st.sampled_from(_NAMES),
        st.integers(0, 700),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(_OPERATIONS)
def test_whatever_happens_versions_grow_and_every_phase_has_a_way_out(operations: list[tuple[str, str, int]]) -> None:
    stage = Stage.of("ps-0", "chief-0", "worker-0")
    for operation, name, number in operations:
        cluster = stage.cluster
        version, starts, cut, view = cluster.version, cluster.starts, cluster.cut, cluster.number
        _try(stage, operation, name, number)
        assert cluster.version >= version
        assert cluster.starts >= starts
        assert cluster.cut >= cut
        assert cluster.number >= view
        assert len({each.round for each in cluster.processes.values()}) == len(cluster.processes)
        if cluster.phase is not P.GATHERING and cluster.finished_at is None:
            bound = {each.seat.platform: each for each in cluster.processes.values() if each.is_bound}
            assert cluster.servers
            assert all(platform in bound for platform in cluster.servers), "a version without one of its servers"
            assert [bound[each].address for each in cluster.servers] == cluster.addresses
    # Faults stop, everybody comes back and time passes.
    for name in ("ps-0", "chief-0", "worker-0"):
        if name not in stage.seats:
            stage.come(name)
    stage.want(*(name for name in stage.seats if name.startswith("ps")))
    for _ in range(4):
        stage.train().after(700)
    assert stage.train().cluster.phase is P.TRAINING
    assert len(stage.cluster.servers) == len(stage.wanted)


def _try(stage: Stage, operation: str, name: str, number: int) -> None:
    """What makes no sense now is left out, or refused."""
    is_there = name in stage.seats and stage.seats[name].node in stage.cluster.processes
    try:
        if operation == "come" and name not in stage.seats:
            stage.come(name)
        elif operation == "go" and name in stage.seats:
            stage.go(name)
        elif operation == "want":
            stage.want(*(f"ps-{rank}" for rank in range(1 + number % 3)))
        elif operation == "after":
            stage.after(number)
        elif operation == "train":
            stage.train()
        elif operation in ("restore", "save", "cut"):
            chief = stage.seats.get("chief-0")
            if chief is not None and stage.cluster.round_of(chief.node):
                process = stage.cluster.current(chief.node, stage.cluster.round_of(chief.node))
                if operation == "cut":
                    stage.cluster.take_cut(process)
                elif operation == "restore":
                    stage.restore(number)
                else:
                    stage.save(number)
        elif is_there and operation == "fail":
            stage.fail(name)
        elif is_there and operation == "bind":
            stage.bind(name)
        elif is_there and operation == "park" and not name.startswith("ps"):
            stage.park(name)
    except Rejected:
        pass
