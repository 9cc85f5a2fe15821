"""Where the time of a job went. That the classes of each place always sum up is checked after each command of each test (`scene.py`)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from dlrover.core.commit_order import replay
from dlrover.core.goodput.progress_ledger import ProgressLedger
from dlrover.core.job import Job
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.goodput import SPLIT, AccountGoodput, AskGoodput, GoodputStatus, NodeAccount, TimeClass
from dlrover.protocol.messages.job import LeaveReason, NodeId, Round
from dlrover.protocol.messages.watch import Phase, ProgressReport, WorkerProgress
from tests.core.scene import Scene, failure, micros, terms

T = TimeClass


def account(scene: Scene, name: str, seconds: dict[TimeClass, float], *, step: int | None = None) -> None:
    agent = scene.agents[name]
    millis = tuple(round(1000 * seconds.get(class_, 0.0)) for class_ in SPLIT)
    round_ = scene.job.state.goodput.places[agent.node_rank].round
    scene.do(AccountGoodput(accounts=(NodeAccount(agent.node, agent.incarnation, round_, step, millis),)))


def seconds_of(scene: Scene, rank: int = 0) -> dict[TimeClass, float]:
    return scene.job.goodput(scene.now).nodes[rank].seconds


def a_job(*names: str, **limits: float) -> Scene:
    """All have joined at second 10 and run since then."""
    scene = Scene(terms(len(names), **limits))
    for name in names:
        scene.attach(name)
    scene.at(10).rejoin(*names)
    return scene


class TestBooking:
    def test_what_the_job_decides_it_books_itself(self) -> None:
        scene = a_job("a", "b")
        scene.at(30).fail("a", failure(at=30))
        scene.at(32).join("a")
        scene.at(33).join("b")
        scene.at(40)
        assert seconds_of(scene, 0) == {T.START_UP: 10.0, T.RENDEZVOUS: 1.0, T.COMPUTE: 27.0, T.STOPPING: 2.0}
        assert seconds_of(scene, 1) == {T.START_UP: 10.0, T.COMPUTE: 27.0, T.STOPPING: 3.0}

    def test_a_stop_that_somebody_wanted_is_no_fault(self) -> None:
        scene = a_job("a")
        scene.at(30).leave("a", LeaveReason.STOPPED_BY_USER)
        assert scene.job.state.end is not None
        assert scene.job.goodput(scene.now).num_faults == 0

    def test_one_node_that_is_stopped_while_the_job_goes_on_is_a_fault(self) -> None:
        scene = a_job("a", "b")
        scene.at(30).leave("b", LeaveReason.STOPPED_BY_USER)
        assert [fault.kind for fault in scene.job.goodput(scene.now).faults] == ["stopped"]
        scene.at(31).leave("a", LeaveReason.STOPPED_BY_USER)
        assert scene.job.goodput(scene.now).num_faults == 0, "it did not go on: both were stopped"
        assert scene.job.goodput(scene.now).faults == ()

    def test_what_is_booked_only_grows_although_it_looked_otherwise_before(self) -> None:
        scene = a_job("a")
        seen = []
        scene.at(20)
        seen.append(scene.job.goodput(scene.now))
        account(scene, "a", {T.START_UP: 8, T.COMPUTE: 1})
        seen.append(scene.job.goodput(scene.now))
        scene.at(40).fail("a", failure(at=40))
        seen.append(scene.job.goodput(scene.now))
        scene.at(45).rejoin("a")
        seen.append(scene.job.goodput(scene.now))
        assert [status.seconds[T.COMPUTE] for status in seen[:2]] == [10, 2]
        assert [status.booked.get(T.COMPUTE, 0) for status in seen] == [0, 1, 1, 22]
        for before, after in pairwise(seen):
            assert all(after.booked[class_] >= seconds for class_, seconds in before.booked.items())

    def test_running_time_is_split_as_the_workers_tell(self) -> None:
        scene = a_job("a")
        scene.at(20)
        account(scene, "a", {T.START_UP: 3, T.DATA_WAIT: 1, T.COMPUTE: 6}, step=6)
        assert seconds_of(scene) == {T.START_UP: 13, T.DATA_WAIT: 1, T.COMPUTE: 6}
        assert scene.job.goodput(scene.now).goodput == pytest.approx(6 / 20)
        assert scene.job.goodput(scene.now).goodput_since_start == pytest.approx(6 / 7)

    def test_an_account_is_a_sum_and_may_be_repeated_or_lost(self) -> None:
        scene = a_job("a")
        scene.at(20)
        account(scene, "a", {T.START_UP: 3, T.COMPUTE: 7})
        account(scene, "a", {T.START_UP: 3, T.COMPUTE: 7})
        scene.at(40)
        account(scene, "a", {T.START_UP: 3, T.COMPUTE: 17, T.CHECKPOINT: 10})
        assert seconds_of(scene) == {T.START_UP: 13, T.COMPUTE: 17, T.CHECKPOINT: 10}

    def test_nobody_can_account_for_more_time_than_there_was(self) -> None:
        scene = a_job("a")
        scene.at(20)
        account(scene, "a", {T.COMPUTE: 1e9})
        assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 10}
        agent = scene.agents["a"]
        for millis in ((-1,), (2**60,)):
            accounts = (NodeAccount(agent.node, agent.incarnation, Round(1), None, millis),)
            with pytest.raises(Rejected):
                scene.do(AccountGoodput(accounts=accounts))

    def test_the_last_moments_of_killed_workers_are_like_those_before(self) -> None:
        scene = a_job("a")
        scene.at(20)
        account(scene, "a", {T.START_UP: 10})
        scene.at(40)
        account(scene, "a", {T.START_UP: 10, T.DATA_WAIT: 5, T.COMPUTE: 15})
        scene.at(44).fail("a", failure(at=44))
        scene.join("a")
        assert seconds_of(scene) == {T.START_UP: 20, T.DATA_WAIT: 6, T.COMPUTE: 18}

    def test_the_last_words_of_killed_workers_count_although_they_come_late(self) -> None:
        scene = a_job("a")
        scene.at(20).fail("a", failure(at=20))
        scene.at(20.5)
        account(scene, "a", {T.START_UP: 4, T.COMPUTE: 6})
        scene.at(21).join("a")
        assert seconds_of(scene) == {T.START_UP: 14, T.COMPUTE: 6, T.STOPPING: 1}

    def test_a_lost_node_is_down_since_it_was_last_seen(self) -> None:
        scene = a_job("a", "b", join_timeout=600)
        scene.at(20).break_stream("b")
        scene.tick(25)
        scene.at(60)
        assert seconds_of(scene, 1) == {T.START_UP: 10, T.COMPUTE: 10, T.DOWN: 40}
        scene.at(61).attach("c", rank=1)
        scene.rejoin("a", "c")
        scene.at(70)
        assert seconds_of(scene, 1) == {T.START_UP: 10, T.COMPUTE: 19, T.DOWN: 41}

    def test_standby_is_idle_and_replaces_a_place(self) -> None:
        scene = Scene(terms(2, standby=1))
        for name in ("a", "b", "c"):
            scene.attach(name)
        scene.at(10).rejoin("a", "b", "c")
        scene.at(20).leave("b")
        scene.at(21).join("a")
        scene.at(31)
        standby, lost = seconds_of(scene, 2), seconds_of(scene, 1)
        assert standby[T.IDLE] == 10
        assert standby[T.COMPUTE] == 10
        assert lost[T.DOWN] == 1  # then the world was full again and nobody missed it

    def test_it_survives_a_master_and_a_replay(self) -> None:
        scene = a_job("a")
        scene.at(20)
        account(scene, "a", {T.START_UP: 2, T.COMPUTE: 8}, step=5)
        scene.at(30).restart_master()
        scene.attach("a")
        scene.at(40)
        account(scene, "a", {T.START_UP: 2, T.COMPUTE: 28}, step=9)
        assert seconds_of(scene) == {T.START_UP: 12, T.COMPUTE: 28}
        again = replay(None, scene.journal).job
        assert again.goodput(scene.now) == scene.job.goodput(scene.now)
        assert Job.decode(again.encode()).goodput(scene.now) == scene.job.goodput(scene.now)

    def test_the_end_closes_the_books(self) -> None:
        scene = a_job("a")
        scene.at(20).finish("a")
        scene.at(22).leave("a")
        wall = scene.job.goodput(micros(99)).nodes[0]
        assert (wall.lived, wall.doing) == (22, None)
        assert sum(wall.seconds.values()) == 22


class TestFaults:
    def test_a_fault_costs_what_is_lost_until_new_steps(self) -> None:
        scene = a_job("a", "b")
        for name in ("a", "b"):
            account(scene.at(20), name, {T.START_UP: 4, T.COMPUTE: 6}, step=60)
        scene.at(20).fail("a", failure(at=20, global_rank=0), step=60)
        scene.at(21).rejoin("a", "b")
        for name in ("a", "b"):
            account(scene.at(31), name, {T.START_UP: 1, T.RESTORE: 1, T.REDO: 2, T.COMPUTE: 6}, step=100)
        for name in ("a", "b"):
            account(scene.at(41), name, {T.START_UP: 5, T.RESTORE: 1, T.REDO: 2, T.COMPUTE: 12}, step=120)
        status = scene.job.goodput(scene.now)
        (fault,) = status.faults
        assert (fault.number, fault.kind, fault.node_rank, fault.global_rank) == (1, "worker", 0, 0)
        assert "boom" in fault.cause
        assert fault.seconds == {T.START_UP: 2, T.RESTORE: 2, T.REDO: 4, T.STOPPING: 2}
        assert (fault.stood_still, fault.recovered_after) == (1, 11)
        assert status.beginning == {T.START_UP: 28}
        saved = {each.choice: each.seconds for each in status.counterfactuals}
        assert saved == {"save-every-step": 4}

    def test_a_standby_would_have_saved_the_wait_for_a_lost_node(self) -> None:
        scene = a_job("a", "b", join_timeout=600)
        scene.at(20).silent("b")
        scene.at(80).attach("c", rank=1)
        scene.rejoin("a", "c")
        status = scene.job.goodput(scene.now)
        assert status.faults[0].kind == "node"
        (standby,) = status.counterfactuals
        assert standby.choice == "standby"
        assert 60 <= standby.seconds <= 130

    def test_faults_are_bounded_and_go_on_counting(self) -> None:
        scene = a_job("a")
        for number in range(1, 101):
            scene.at(10 + 10 * number).fail("a", failure(at=10 + 10 * number), step=number)
            scene.join("a")
        status = scene.job.goodput(scene.now)
        assert status.num_faults == 100
        assert [fault.number for fault in status.faults] == list(range(37, 101))


def progress(
    scene: Scene,
    name: str,
    seconds: dict[Phase, float],
    *,
    step: int | None = None,
    num_steps: int = 0,
    model: tuple[int, int | None] | None = None,
    **details: float,
) -> ProgressReport:
    agent = scene.agents[name]
    worker = WorkerProgress(
        local_rank=0,
        global_rank=agent.node_rank,
        step=step,
        num_steps=num_steps,
        is_step_comparable=bool(details.get("is_step_comparable", True)),
        model_step=None if model is None else model[0],
        model_start=None if model is None else model[1],
        seconds=seconds,
        phase=Phase.FORWARD,
        phase_seconds=details.get("phase_seconds", 0.0),
        has_hooks=bool(details.get("has_hooks", True)),
    )
    round_ = scene.job.state.goodput.places[agent.node_rank].round
    return ProgressReport(node=agent.node, incarnation=agent.incarnation, round=round_, workers=(worker,))


def hear(scene: Scene, ledger: ProgressLedger, name: str, seconds: dict[Phase, float], **told: float) -> None:
    ledger.heard(progress(scene, name, seconds, **told), scene.job.state, scene.now)  # type: ignore[arg-type]
    booked = ledger.account(scene.now, at_once=True)
    if booked is not None:
        scene.do(booked)


class TestProgress:
    def test_phases_become_classes(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        told = {Phase.START: 2.0, Phase.DATA: 1.0, Phase.FORWARD: 3.0, Phase.BACKWARD: 2.0, Phase.CHECKPOINT: 1.0}
        hear(scene.at(20), ledger, "a", told, step=5, num_steps=5)
        expected = {T.START_UP: 13, T.DATA_WAIT: 1, T.COMPUTE: 5, T.CHECKPOINT: 1}
        assert seconds_of(scene) == expected  # the second between the round and the first worker is start-up

    def test_a_worker_of_which_nothing_tells_when_its_start_ends_computes(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        for second in (20, 1000, 3610):
            hear(scene.at(second), ledger, "a", {Phase.START: second - 11.0}, has_hooks=False)
        assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 3600}
        hear(scene.at(3620), ledger, "a", {Phase.START: 3600.0, Phase.END: 9.0}, has_hooks=False)
        assert seconds_of(scene) == {T.START_UP: 11, T.COMPUTE: 3600, T.STOPPING: 9}

    def test_a_program_that_has_no_page_computes(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        for second in (15, 3610):
            hear(scene.at(second), ledger, "a", {}, has_hooks=False)
        assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 3600}

    def test_the_start_counts_once_something_tells_that_it_is_over(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.START: 10.0}, has_hooks=False)
        told = {Phase.START: 12.0, Phase.FORWARD: 8.0}  # by the script's own reports
        hear(scene.at(30), ledger, "a", told, step=5, num_steps=5, has_hooks=False)
        assert seconds_of(scene) == {T.START_UP: 22, T.COMPUTE: 8}

    def test_the_start_of_a_worker_with_hooks_counts_at_once(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.START: 10.0})
        assert seconds_of(scene) == {T.START_UP: 20}

    def test_steps_done_before_are_done_again(self) -> None:
        scene, ledger = a_job("a", "b"), ProgressLedger()
        for name in ("a", "b"):
            hear(scene.at(20), ledger, name, {Phase.FORWARD: 10.0}, step=10, num_steps=10)
        scene.at(20).fail("a", failure(at=20), step=10)
        scene.rejoin("a", "b")  # from step 6 on
        for name in ("a", "b"):
            hear(scene.at(30), ledger, name, {Phase.FORWARD: 10.0}, step=16, num_steps=10)
        for rank in (0, 1):
            assert seconds_of(scene, rank) == {T.START_UP: 10, T.COMPUTE: 16, T.REDO: 4}

    def again(self, model: tuple[int, int | None] | None, **told: Any) -> Scene:
        """A life of 10 s and 10 steps in the model, and one of 10 s that the hooks count or that counts anew in each epoch."""
        scene, ledger = a_job("a"), ProgressLedger()
        told = {"is_step_comparable": False, "step": 4, "num_steps": 10} | told
        hear(scene.at(20), ledger, "a", {Phase.FORWARD: 10.0}, **told, model=(10, 0))
        scene.at(20).fail("a", failure(at=20))
        scene.join("a")
        hear(scene.at(30), ledger, "a", {Phase.FORWARD: 10.0}, **told, model=model)
        return scene

    def test_steps_in_the_model_tell_what_is_done_again_where_the_steps_of_the_script_cannot(self) -> None:
        scene = self.again((16, 6))
        assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 16, T.REDO: 4}
        assert scene.job.goodput(scene.now).is_redo_known
        assert scene.job.goodput(scene.now).highest_step == 16
        assert seconds_of(self.again((20, 10))) == {T.START_UP: 10, T.COMPUTE: 20}
        assert seconds_of(self.again((10, 0))) == {T.START_UP: 10, T.COMPUTE: 10, T.REDO: 10}

    def test_redo_is_unknown_where_nothing_tells_from_where_the_workers_went_on(self) -> None:
        for model in ((10, None), None):
            scene = self.again(model)
            assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 20}
            status = scene.job.goodput(scene.now)
            assert (status.is_redo_known, status.faults[0].is_redo_known) == (False, False)
            assert Job.decode(scene.job.encode()).goodput(scene.now) == status

    def test_no_advice_is_given_from_redo_that_is_known_in_part(self) -> None:
        scene, ledger = self.again((16, 6)), ProgressLedger()
        assert [each.choice for each in scene.job.goodput(scene.now).counterfactuals] == ["save-every-step"]
        scene.at(30).fail("a", failure(at=30))
        scene.join("a")
        told = {"is_step_comparable": False, "step": 4}
        hear(scene.at(40), ledger, "a", {Phase.FORWARD: 10.0}, **told, model=(10, None))
        status = scene.job.goodput(scene.now)
        assert status.counterfactuals == ()
        assert [fault.is_redo_known for fault in status.faults] == [True, False]

    def test_what_the_first_step_of_a_life_is_shows_when_it_has_ended(self) -> None:
        """Else a look in the middle of it would take it for new, and the fault for over."""
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.FORWARD: 10.0}, step=10, num_steps=10, model=(10, 0))
        scene.at(20).fail("a", failure(at=20))
        scene.join("a")
        hear(scene.at(22), ledger, "a", {Phase.START: 1.0, Phase.FORWARD: 1.0})
        told = {"is_step_comparable": False, "step": 16, "num_steps": 10}
        hear(scene.at(31), ledger, "a", {Phase.START: 1.0, Phase.FORWARD: 10.0}, **told, model=(16, 6))
        assert seconds_of(scene) == {T.START_UP: 11, T.COMPUTE: 16, T.REDO: 4}
        assert scene.job.goodput(scene.now).faults[0].seconds[T.REDO] == 4

    def test_the_script_s_own_steps_win_and_are_compared_among_themselves(self) -> None:
        """It counts samples, say. Until its first report only the hooks tell."""
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.FORWARD: 10.0}, step=640, num_steps=10, model=(10, 0))
        scene.at(20).fail("a", failure(at=20), step=640)
        scene.join("a")
        told = {"is_step_comparable": False, "step": 11, "num_steps": 1}
        hear(scene.at(21), ledger, "a", {Phase.FORWARD: 1.0}, **told, model=(11, 10))
        hear(scene.at(30), ledger, "a", {Phase.FORWARD: 10.0}, step=1280, num_steps=10, model=(20, 10))
        assert seconds_of(scene) == {T.START_UP: 10, T.COMPUTE: 20}

    def test_a_new_master_goes_on_with_the_steps_in_the_model(self) -> None:
        scene = self.again((5, 0))
        scene.at(31).restart_master()
        scene.attach("a")
        told = {"is_step_comparable": False, "step": 4}
        hear(scene.at(45), ProgressLedger(), "a", {Phase.FORWARD: 25.0}, **told, model=(20, 0))
        assert seconds_of(scene)[T.REDO] == pytest.approx(15, abs=0.01)

    def test_a_new_master_goes_on_where_the_old_one_booked(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.FORWARD: 10.0}, step=10, num_steps=10)
        scene.at(25).fail("a", failure(at=20), step=10)
        scene.join("a")  # from step 0 on
        hear(scene.at(30), ledger, "a", {Phase.FORWARD: 5.0}, step=5, num_steps=5)
        scene.at(31).restart_master()
        scene.attach("a")
        hear(scene.at(45), ProgressLedger(), "a", {Phase.FORWARD: 20.0}, step=20, num_steps=20)
        seconds = seconds_of(scene)
        assert seconds[T.REDO] == pytest.approx(10, abs=0.01)
        assert sum(seconds.values()) == 45

    def test_a_phase_that_does_not_end_may_be_a_hang(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        hear(scene.at(20), ledger, "a", {Phase.FORWARD: 10.0}, step=10, num_steps=10, phase_seconds=8.0)
        scene.at(20)
        scene.job.state.goodput.hung(scene.now, micros(8.0))
        assert seconds_of(scene)[T.HANG] == 8
        assert seconds_of(scene)[T.COMPUTE] == 2

    def test_waiting_in_collectives_for_the_slowest_is_told_apart(self) -> None:
        scene, ledger = a_job("a", "b"), ProgressLedger()
        slow = {Phase.FORWARD: 9.5, Phase.COLLECTIVE: 0.5}
        hear(scene.at(20), ledger, "a", slow, step=5, num_steps=5)
        hear(scene.at(20), ledger, "b", {Phase.FORWARD: 5.0, Phase.COLLECTIVE: 5.0}, step=5, num_steps=5)
        assert seconds_of(scene, 0)[T.COMPUTE] == 10
        assert seconds_of(scene, 1)[T.STRAGGLER_WAIT] == pytest.approx(4.5, abs=0.01)

    def test_rubbish_harms_nobody(self) -> None:
        scene, ledger = a_job("a"), ProgressLedger()
        rubbish = {Phase.FORWARD: float("nan"), Phase.DATA: float("inf"), Phase.BACKWARD: -5.0, Phase.START: 1e300}
        hear(scene.at(20), ledger, "a", rubbish, step=-5)
        stranger = ProgressReport(node=NodeId(77), incarnation=1, round=Round(1), workers=())  # type: ignore[arg-type]
        ledger.heard(stranger, scene.job.state, scene.now)
        assert sum(seconds_of(scene).values()) == 20


def test_a_thousand_nodes_share_one_small_record_every_thirty_seconds() -> None:
    import msgspec

    millis = tuple(3_600_000 + 7 * number for number in range(len(SPLIT)))
    accounts = tuple(NodeAccount(NodeId(node), 1, Round(3), 12345, millis) for node in range(1000))  # type: ignore[arg-type]
    assert len(msgspec.msgpack.encode(AccountGoodput(accounts=accounts))) < 70_000


def test_the_question_is_answered_up_to_the_last_command() -> None:
    scene = a_job("a")
    status = scene.job.ask(AskGoodput())
    assert isinstance(status, GoodputStatus)
    assert status.wall == 10
