"""What a failure means and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.agreed.worker_failure import describe, traceback_digest
from dlrover.core.failures.blame import NUM_DISTINCT
from dlrover.protocol.messages.goodput import AskFault, FaultTold
from dlrover.protocol.messages.job import (
    End,
    ExitReason,
    FailureKind,
    JobTerms,
    Join,
    RestartPolicy,
    Round,
    Run,
    StopCause,
)
from dlrover.protocol.messages.watch import Reach
from tests.core.scene import Scene, failure, terms

PEER_LOST = FailureKind.PEER_LOST
SIGNAL = FailureKind.SIGNAL
TRACEBACK = 'File "train.py", line 7, in step\nRuntimeError: boom'


def given(max_restarts: int, min_nodes: int = 2) -> JobTerms:
    return terms(min_nodes, restarts=RestartPolicy(max_restarts=max_restarts))


def crash(scene: Scene, name: str = "b", *, at: float | None = None, **report: Any) -> None:
    """A worker of the node dies of an exception, and everybody comes back if the job goes on."""
    if at is not None:
        scene.at(at)
    scene.fail(name, failure(at=scene.now / 1e6, global_rank=1, traceback=TRACEBACK), **report)
    rejoin(scene)


def rejoin(scene: Scene) -> None:
    for name in scene.agents:
        if isinstance(scene.wish(name), Join):
            scene.join(name)


MISTAKE: dict[str, Any] = {
    "traceback": TRACEBACK,
    "exceptions": ("RuntimeError", "Exception", "BaseException"),
    "is_before_step": True,
}


class TestMistakeInTheScript:
    """The same exception in all ranks before any step, in the first life: docs/reference/dlrover-run.md."""

    def test_one_report_of_all_ranks_ends_the_job_at_once(self) -> None:
        scene = Scene(terms(1)).gather("a", procs=2)
        scene.fail("a", *(failure(at=1, global_rank=rank, **MISTAKE) for rank in (0, 1)), lived=1.0)
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert scene.end.num_restarts == 0
        assert "All ranks failed with the same exception before the first step" in scene.end.message

    def test_the_last_rank_of_the_last_node_completes_the_proof(self) -> None:
        scene = Scene(terms(2)).gather("a", "b", procs=2)
        scene.at(1).fail("a", failure(at=1, global_rank=1, **MISTAKE))
        assert "Restart 1 of at most 3" in scene.verdicts[-1]
        scene.at(1.1).fail("b", failure(at=1.1, global_rank=2, **MISTAKE), failure(at=1.1, global_rank=3, **MISTAKE))
        assert scene.job.end is None
        scene.at(1.2).fail("a", failure(at=0.9, **(MISTAKE | {"traceback": f"[rank0]:{TRACEBACK}"})))
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.failure.global_rank == 0

    @pytest.mark.parametrize(
        "other",
        [
            {"traceback": f"{TRACEBACK} elsewhere"},
            {"kind": PEER_LOST},
            {"kind": SIGNAL, "signal": 9},
            {"is_before_step": False},
            {"exceptions": ()},
            {"node_error": "Xid 79"},
            *(
                {"exceptions": (name, "Exception")}
                for name in ("OSError", "ConnectionError", "TimeoutError", "DistError", "DistStoreError", "ReadTimeout")
            ),
        ],
        ids=str,
    )
    def test_a_rank_that_failed_otherwise_or_of_what_may_pass_is_restarted(self, other: dict[str, Any]) -> None:
        scene = Scene(terms(1)).gather("a", procs=2)
        second = failure(other.pop("kind", FailureKind.EXCEPTION), at=1.1, global_rank=1, **(MISTAKE | other))
        scene.fail("a", failure(at=1, **MISTAKE), second)
        assert scene.job.end is None
        rejoin(scene)
        assert scene.world("a").round == 2

    def test_a_rank_that_was_stopped_has_told_nothing(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("a", failure(at=1, **MISTAKE))
        scene.fail("b", failure(FailureKind.STOPPED_BY_US, at=1.1, global_rank=1, **MISTAKE))
        rejoin(scene)
        assert scene.world("a").round == 2

    @pytest.mark.parametrize("max_restarts", [1, 3])
    def test_who_asks_for_restarts_gets_them(self, max_restarts: int) -> None:
        scene = Scene(given(max_restarts, min_nodes=1)).gather("a")
        scene.fail("a", failure(at=1, **MISTAKE))
        rejoin(scene)
        assert scene.world("a").round == 2

    def test_a_step_shows_that_the_script_is_sound(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.fail("a", failure(at=1, **MISTAKE), step=3)
        rejoin(scene)
        assert scene.world("a").round == 2

    def test_later_lives_have_the_usual_rules(self) -> None:
        scene = Scene(terms(1)).gather("a")
        scene.fail("a", failure(SIGNAL, at=1, signal=9))
        rejoin(scene)
        scene.fail("a", failure(at=2, **MISTAKE))
        rejoin(scene)
        assert scene.world("a").round == 3


def ask_fault(scene: Scene, round_: int) -> FaultTold:
    told = scene.job.ask(AskFault(round=Round(round_)))
    assert isinstance(told, FaultTold)
    return told


class TestGivenNumber:
    def test_it_is_counted_on_the_node_of_the_first_failure(self) -> None:
        """Failovers decrease only on that node."""
        scene = Scene(given(1)).gather("a", "b")
        crash(scene, "b")
        crash(scene, "a")
        assert scene.world("a").round == 3
        assert scene.job.state.restarts.spent == {0: 1, 1: 1}
        crash(scene, "b")
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert scene.end.exit_code == 1
        assert scene.end.num_restarts == 2
        assert "All 1 restarts of node rank 1 are used up" in scene.end.message

    def test_zero_ends_the_job_at_the_first_failure(self) -> None:
        """The first failure ends the job."""
        scene = Scene(given(0)).gather("a", "b")
        crash(scene, "b")
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.node_rank == 1
        assert scene.end.first_failure.host == "host-b"

    def test_progress_restores_nothing(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        crash(scene, step=10)
        crash(scene, step=20)
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT

    def test_membership_changes_cost_nothing(self) -> None:
        scene = Scene(terms(1, 2, RestartPolicy(max_restarts=0))).gather("a", "b")
        for second in range(100, 1000, 100):
            scene.at(second).silent("b")
            rejoin_a = scene.wish("a")
            assert isinstance(rejoin_a, Join)
            assert rejoin_a.cause is StopCause.MEMBERSHIP
            scene.join("a")
            del scene.agents["b"]
            scene.attach("b", launch=f"launch-b{second}")
            scene.join("b")
            scene.join("a")
            assert scene.world("b").group_world_size == 2

    def test_a_restarted_agent_is_a_failure_of_its_node(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        scene.restart_agent("b")
        rejoin(scene)
        assert scene.job.state.restarts.spent == {1: 1}
        scene.restart_agent("b")
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert "agent of the node was restarted" in scene.end.message

    def test_a_restarted_agent_takes_the_blame_from_those_who_lost_it(self) -> None:
        """The others' workers notice the broken connection before the agent is back."""
        scene = Scene(given(1)).gather("a", "b")
        scene.at(10).fail("a", failure(PEER_LOST, at=10))
        scene.break_stream("b")
        scene.at(11).restart_agent("b")
        rejoin(scene)
        assert scene.job.state.restarts.spent == {1: 1}
        scene.at(20).fail("a", failure(PEER_LOST, at=20))
        scene.at(21).restart_agent("b")
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.node_rank == 1

    def test_but_not_from_a_worker_that_failed_by_itself(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        scene.at(10).fail("a", failure(at=9.9))
        scene.at(11).restart_agent("b")
        rejoin(scene)
        assert scene.job.state.restarts.spent == {0: 1}

    def test_an_agent_that_restarts_after_it_has_come_back_had_no_workers_to_lose(self) -> None:
        scene = Scene(given(1, min_nodes=3)).gather("a", "b", "c")
        scene.at(10).fail("a", failure(PEER_LOST, at=10))
        scene.join("b")
        scene.at(11).restart_agent("b")
        rejoin(scene)
        assert scene.job.state.restarts.spent == {0: 1}

    def test_what_stopped_a_round_is_told_better_as_soon_as_it_is_known(self) -> None:
        """Who lost a peer reports first, then the lost one's agent, or the master gives its node up."""
        scene = Scene(given(1)).gather("a", "b")
        assert scene.job.ask(AskFault(round=Round(1))) == FaultTold()
        scene.at(10).fail("a", failure(PEER_LOST, at=10.2, global_rank=0))
        assert ask_fault(scene, 1).global_rank == 0
        scene.at(10.5).fail("b", failure(SIGNAL, at=10, global_rank=1, signal=9))
        told = ask_fault(scene, 1)
        assert (told.kind, told.node_rank, told.global_rank) == ("worker", 1, 1)
        assert told.cause.startswith("Round 1: global rank 1 on node rank 1 (host-b) failed: killed by signal 9")
        rejoin(scene)
        scene.at(20).fail("a", failure(PEER_LOST, at=20, global_rank=0))
        scene.break_stream("b")
        scene.tick(30)
        told = ask_fault(scene, 2)
        assert (told.kind, told.node_rank, told.global_rank) == ("node", 1, None), "a consequence of its loss"
        assert "node rank 1 (host-b) lost its connection" in told.cause
        assert ask_fault(scene, 1).global_rank == 1

    def test_a_node_that_was_given_up_and_came_back_is_still_what_the_others_lost(self) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.at(10).break_stream("b")
        scene.fail("a", failure(PEER_LOST, at=10))
        scene.tick(15)
        scene.at(16).attach("b")
        rejoin(scene)
        assert isinstance(scene.wish("a"), Run)
        assert scene.job.state.restarts.spent == {}

    def test_a_node_without_power_is_what_the_others_lost_before_its_silence_is_believed(self) -> None:
        """Found by the simulator: the last call ends first, and the messenger paid."""
        scene = Scene(terms(1, 2, RestartPolicy(max_restarts=0), last_call=5.0)).gather("a", "b")
        scene.at(10).fail("a", failure(PEER_LOST, at=10))
        scene.join("a")
        scene.tick(15)
        assert isinstance(scene.wish("a"), Run)
        assert scene.world("a").group_world_size == 1
        assert scene.job.state.restarts.spent == {}


class TestAsLongAsThereIsProgress:
    def test_three_in_a_row_without_progress(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for _ in range(3):
            scene.fail("b", failure(SIGNAL, signal=9))
            rejoin(scene)
        assert isinstance(scene.wish("a"), Run)
        scene.fail("b", failure(SIGNAL, signal=9))
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert "3 restarts in a row brought no progress" in scene.end.message

    def test_a_greater_step_restores_the_budget(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for step in range(1, 50):
            crash(scene, step=step)
        assert scene.world("a").restart_count == 49

    def test_a_step_that_was_reached_before_is_no_progress(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        crash(scene, step=100)
        for step in (98, 99):
            crash(scene, step=step)
            assert isinstance(scene.wish("a"), Run)
        crash(scene, step=97)
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT

    def test_workers_that_never_tell_a_step_have_to_live_long(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for _ in range(10):
            crash(scene, lived=60.0)
        assert isinstance(scene.wish("a"), Run)
        for _ in range(2):
            crash(scene, lived=59.0)
        assert isinstance(scene.wish("a"), Run)
        crash(scene, lived=59.0)
        assert scene.job.end is not None

    @pytest.mark.parametrize("is_step_first", [True, False])
    def test_the_order_of_two_reports_does_not_decide_about_progress(self, is_step_first: bool) -> None:
        """Seed 1535 of a campaign: a long life without a step was progress, until its other node reported an old step."""
        scene = Scene(terms(2)).gather("a", "b")
        for step in (100, 98, 99):
            crash(scene, step=step)
        assert isinstance(scene.wish("a"), Run)
        killed = failure(SIGNAL, signal=9, at=1)
        lost = failure(FailureKind.PEER_LOST, at=2, global_rank=1)
        reports = [("a", killed, {"lived": 90.0}), ("b", lost, {"step": 97, "lived": 90.0})]
        for name, told, details in reversed(reports) if is_step_first else reports:
            scene.fail(name, told, **details)
        rejoin(scene)
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
        assert "3 restarts in a row brought no progress" in scene.end.message

    def test_the_step_of_a_dead_agent_comes_with_its_broken_stream(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for step in range(10, 100, 10):
            scene.break_stream("b", step=step)
            scene.restart_agent("b")
            rejoin(scene)
        assert isinstance(scene.wish("a"), Run)
        assert scene.job.status().nodes[1].step == 90

    def test_a_crash_loop_at_one_step_is_the_scripts_fault(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for _ in range(4):
            crash(scene, step=57)
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert "the same traceback at step 57, 4 times" in scene.end.message
        assert "Correct the script" in scene.end.message

    def test_a_crash_loop_is_seen_through_progress_in_between(self) -> None:
        policy = RestartPolicy(max_without_progress=100)
        scene = Scene(terms(2, restarts=policy)).gather("a", "b")
        for other_step in (58, 59, 60):
            crash(scene, step=57)
            scene.fail("b", failure(SIGNAL, signal=9), step=other_step)
            rejoin(scene)
        crash(scene, step=57)
        assert scene.end.reason is ExitReason.CODE_ERROR

    def test_a_crash_loop_before_any_step(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for _ in range(4):
            crash(scene)
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert "before any step was reported" in scene.end.message


class TestWhatProgressIs:
    """Decision 48, both ways: what grows from life to life, and what a crash loop does again and again."""

    def die(self, scene: Scene, step: int | None, lives: int = 10, **counts: Any) -> None:
        """Killed at the same reported step each time, which tells no traceback. A list has the counts of one life after the other."""
        for number in range(lives):
            told = {name: each[number] if isinstance(each, list) else each for name, each in counts.items()}
            scene.fail("b", failure(SIGNAL, signal=9), step=step, reach=Reach(**told))
            rejoin(scene)
            if scene.job.end is not None:
                return

    @pytest.mark.parametrize(
        "counts",
        [
            {"model_step": list(range(20, 120, 10)), "model_start": list(range(10, 110, 10))},
            {"model_step": list(range(20, 120, 10))},
            {"data": [(epoch, 0) for epoch in range(1, 11)]},
            {"data": [(1, done) for done in range(100, 1100, 100)]},
            {"checkpoint_step": list(range(1, 11))},
        ],
        ids=["model step", "model step at least", "data epoch", "records of an epoch", "checkpoint"],
    )
    def test_a_script_that_counts_anew_goes_on_while_another_count_grows(self, counts: dict[str, Any]) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        self.die(scene, step=10, is_counting_anew=True, **counts)
        assert scene.world("a").restart_count == 10

    @pytest.mark.parametrize(
        "counts",
        [
            {},
            {"model_step": 105, "model_start": 100, "has_whole_epoch": True},
            {"data": (3, 200), "has_whole_epoch": True},
            {"checkpoint_step": 100},
        ],
        ids=["nothing", "model step", "data", "checkpoint"],
    )
    def test_a_crash_loop_that_restores_the_same_state_ends_after_three_restarts(self, counts: dict[str, Any]) -> None:
        """It restores step 100, trains to 105 and dies: its step grew in each life, and nothing was gained."""
        for is_counting_anew in (False, True):
            scene = Scene(terms(2)).gather("a", "b")
            self.die(scene, step=105, is_counting_anew=is_counting_anew, **counts)
            assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT
            assert scene.end.num_restarts == 3
            assert "3 restarts in a row brought no progress" in scene.end.message

    def test_a_whole_epoch_is_progress_where_nothing_tells_where_the_life_began(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        self.die(scene, step=10, is_counting_anew=True, has_whole_epoch=True, model_step=10)
        assert scene.world("a").restart_count == 10
        self.die(scene, step=10, is_counting_anew=True, model_step=10)
        assert scene.end.num_restarts == 12, "and a part of one is not"

    def test_but_not_of_a_script_whose_steps_can_be_compared(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        self.die(scene, step=10, has_whole_epoch=True)
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT

    def test_that_a_script_counts_anew_is_remembered(self) -> None:
        """A life that ends in its first epoch cannot tell."""
        scene = Scene(terms(2)).gather("a", "b")
        self.die(scene, step=10, lives=1, is_counting_anew=True, has_whole_epoch=True)
        self.die(scene, step=10, has_whole_epoch=True)
        assert scene.world("a").restart_count == 11

    def test_the_same_traceback_at_the_same_step_of_one_epoch_is_a_loop_although_epochs_are_trained(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        reach = Reach(is_counting_anew=True, has_whole_epoch=True, model_step=10)
        for _ in range(4):
            crash(scene, step=10, reach=reach)
        assert scene.end.reason is ExitReason.CODE_ERROR
        assert "the same traceback at step 10, 4 times" in scene.end.message

    def test_the_same_step_of_another_epoch_is_another_step(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for epoch in range(10):
            crash(scene, step=10, reach=Reach(is_counting_anew=True, model_step=10 * epoch + 10, data=(epoch, 0)))
        assert scene.world("a").restart_count == 10

    def test_a_count_of_the_optimizer_never_ends_a_job_that_reports_nothing(self) -> None:
        """As before it only has to live long; to have got further helps it."""
        scene = Scene(terms(2)).gather("a", "b")
        for _ in range(6):
            scene.fail("b", failure(SIGNAL, signal=9), lived=60.0, reach=Reach(model_step=5, model_start=0))
            rejoin(scene)
        for model_step in range(6, 16):
            scene.fail("b", failure(SIGNAL, signal=9), lived=1.0, reach=Reach(model_step=model_step, model_start=0))
            rejoin(scene)
        assert scene.world("a").restart_count == 16

    def test_what_any_node_tells_of_the_round_counts(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        for epoch in range(1, 8):
            scene.fail("a", failure(SIGNAL, signal=9), step=10, reach=Reach(is_counting_anew=True))
            scene.fail("b", failure(PEER_LOST), step=10, reach=Reach(data=(epoch, 0)))
            rejoin(scene)
        assert scene.world("a").restart_count == 7


class TestKinds:
    def test_a_bad_script_ends_the_job_at_once(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("a", failure(FailureKind.BAD_SCRIPT, message="SyntaxError: invalid syntax (train.py, line 3)"))
        assert (scene.end.reason, scene.end.exit_code) == (ExitReason.CODE_ERROR, 1)
        assert "SyntaxError: invalid syntax (train.py, line 3)" in scene.end.message
        assert scene.end.num_restarts == 0

    def test_a_module_that_vanishes_later_is_an_ordinary_failure(self) -> None:
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("a", failure(FailureKind.BAD_SCRIPT), step=10)
        assert isinstance(scene.wish("a"), Join)

    def test_taken_ports_with_other_rounds_in_between_are_chance(self) -> None:
        scene = Scene(terms(1, 2, RestartPolicy(max_restarts=0))).gather("a", "b")
        for second in range(100, 600, 100):
            scene.at(second).fail("a", failure(FailureKind.PORT_TAKEN))
            rejoin(scene)
            scene.silent("b")
            scene.join("a")
            scene.attach("b")
            scene.rejoin("b", "a")
            assert isinstance(scene.wish("b"), Run)

    def test_a_taken_port_costs_nothing_but_not_for_ever(self) -> None:
        scene = Scene(given(0)).gather("a", "b")
        for _ in range(3):
            scene.fail("a", failure(FailureKind.PORT_TAKEN))
            rejoin(scene)
        assert scene.world("a").round == 4
        assert scene.job.state.restarts.spent == {}
        scene.fail("a", failure(FailureKind.PORT_TAKEN))
        assert scene.end.reason is ExitReason.WORKER_ERROR
        assert "taken 4 times in a row" in scene.end.message

    @pytest.mark.parametrize("kind", [FailureKind.OUT_OF_MEMORY, FailureKind.MEMORY_ERROR])
    def test_lack_of_memory_is_named_as_the_reason(self, kind: FailureKind) -> None:
        scene = Scene(given(1)).gather("a", "b")
        for _ in range(2):
            scene.fail("a", failure(kind))
            rejoin(scene)
        assert scene.end.reason is ExitReason.WORKER_OOM

    @pytest.mark.parametrize("code", [14, 128, 201, 202])
    def test_a_device_fault_is_named_and_restarted_in_place(self, code: int) -> None:
        """No platform can replace the node yet."""
        scene = Scene(terms(2)).gather("a", "b")
        scene.fail("b", failure(FailureKind.EXIT_CODE, exit_code=code, message=""))
        assert f"exit code {code}, a device fault of that node" in scene.verdicts[0]
        assert isinstance(scene.wish("a"), Join)

    @pytest.mark.parametrize("code", [3, 201])
    def test_an_exit_code_is_said_once(self, code: int) -> None:
        """An agent that found no exception tells of nothing else."""
        scene = Scene(given(0)).gather("a", "b")
        scene.fail("b", failure(FailureKind.EXIT_CODE, exit_code=code, message=f"exit code {code}"))
        assert scene.end.message.count(f"exit code {code}") == 1

    @pytest.mark.parametrize(
        ("message", "said"),
        [
            ("ended by SIGSEGV", "killed by signal 11 (SIGSEGV)."),
            ("ended by SIGSEGV, core dumped: bad pointer", "killed by signal 11 (SIGSEGV), core dumped: bad pointer."),
            ("the agent was restarted", "killed by signal 11 (SIGSEGV) (the agent was restarted)."),
        ],
    )
    def test_a_signal_is_said_once(self, message: str, said: str) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.fail("b", failure(SIGNAL, signal=11, message=message))
        assert said in scene.end.message
        assert scene.end.message.count("SIGSEGV") == 1

    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_every_kind_has_a_sentence(self, kind: FailureKind) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.fail("b", failure(kind, message="details", log_file="/logs/1.err"), step=3)
        incident = scene.job.state.restarts.incident
        assert incident is not None
        sentence = describe(incident.first)
        assert sentence.startswith("Round 1: global rank 0 on node rank 1 (host-b) failed at step 3: ")
        assert "details" in sentence
        assert sentence.endswith("Its log: /logs/1.err.")


class TestFirstFailure:
    def test_the_earliest_exit_that_is_no_consequence(self) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.at(10).fail(
            "b",
            failure(PEER_LOST, at=9.0, global_rank=1),
            failure(SIGNAL, at=9.5, global_rank=3, signal=9),
            failure(at=9.6, global_rank=2),
        )
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.failure.global_rank == 3

    def test_one_restart_per_round_however_many_report(self) -> None:
        scene = Scene(given(5, min_nodes=3)).gather("a", "b", "c")
        for name in "abc":
            scene.fail(name)
        for name in "abc":
            scene.fail(name)
        rejoin(scene)
        assert scene.job.state.restarts.num_restarts == 1
        assert sum(scene.job.state.restarts.spent.values()) == 1

    def test_the_cause_pays_although_the_messenger_came_first(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        for _ in range(2):
            scene.at(scene.now / 1e6 + 100)
            seconds = scene.now / 1e6
            scene.fail("a", failure(PEER_LOST, at=seconds))
            assert isinstance(scene.wish("b"), Join), "nobody waits for the cause"
            scene.fail("b", failure(SIGNAL, at=seconds - 0.1, global_rank=1, signal=9))
            rejoin(scene)
        assert scene.job.state.restarts.spent == {1: 1}
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.node_rank == 1

    def test_the_messenger_pays_if_nobody_else_tells_anything(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        scene.fail("a", failure(PEER_LOST))
        rejoin(scene)
        assert scene.job.state.restarts.spent == {0: 1}
        scene.fail("a", failure(PEER_LOST))
        assert scene.job.end is None, "the cause may still be reported"
        rejoin(scene)
        assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT, "it was not, and no budget is left"

    def test_an_earlier_exit_takes_the_blame_until_the_next_round_completes(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        scene.at(10).fail("a", failure(at=9.9))
        scene.at(10.1).fail("b", failure(SIGNAL, at=9.8, global_rank=1, signal=9))
        rejoin(scene)
        assert scene.job.state.restarts.spent == {1: 1}

    def test_after_the_round_only_the_record_improves_and_only_for_five_seconds(self) -> None:
        scene = Scene(given(1)).gather("a", "b")
        scene.at(10).fail("a", failure(at=9.9))
        rejoin(scene)
        scene.at(14).fail("b", failure(SIGNAL, at=9.8, global_rank=1, signal=9), round_=1)
        incident = scene.job.state.restarts.incident
        assert incident is not None
        assert incident.first.node_rank == 1
        assert scene.job.state.restarts.spent == {0: 1}
        scene.at(15.1).fail("a", failure(at=9.7), round_=1)
        assert incident.first.node_rank == 1
        assert isinstance(scene.wish("a"), Run), "a report of a former round restarts nobody"

    def test_the_end_names_the_better_first_failure_if_it_comes_in_time(self) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.at(10).fail("a", failure(at=9.9))
        scene.at(10.2).fail("b", failure(SIGNAL, at=9.8, global_rank=1, signal=9))
        assert scene.end.first_failure is not None
        assert scene.end.first_failure.node_rank == 1
        assert "killed by signal 9 (SIGKILL)" in scene.end.message
        assert "--max-restarts 0" in scene.end.message
        scene.at(20).fail("a", failure(at=1.0))
        assert scene.end.first_failure.node_rank == 1


def test_the_same_bug_has_the_same_digest_on_every_rank_and_run() -> None:
    one = failure(traceback="[rank0]: <Net at 0x7f00aa> failed")
    two = failure(traceback="[rank3]: <Net at 0x7fff01> failed")
    other = failure(traceback="[rank0]: <Net at 0x7f00aa> exploded")
    assert traceback_digest(one) == traceback_digest(two) != traceback_digest(other)
    assert traceback_digest(failure(traceback="")) == ""


class TestDistinctFailures:
    def test_each_way_to_fail_is_kept_once_and_counted(self) -> None:
        scene = Scene(given(5)).gather("a", "b")
        scene.fail("a", failure(traceback="first"), failure(traceback="first", global_rank=1))
        scene.fail("b", failure(traceback="first"), failure(FailureKind.PEER_LOST), failure(FailureKind.STOPPED_BY_US))
        told = scene.job.status().distinct_failures
        assert [(each.kind, each.count, each.node_rank) for each in told] == [
            (FailureKind.EXCEPTION, 3, 0),
            (FailureKind.PEER_LOST, 1, 1),
        ]

    def test_the_end_names_them(self) -> None:
        scene = Scene(given(0)).gather("a", "b")
        scene.fail("a", failure(traceback="first"))
        assert [each.count for each in scene.end.distinct_failures] == [1]
        scene.fail("b", failure(traceback="second"))
        assert len(scene.end.distinct_failures) == 2, "what comes during the end is told, too"
        assert scene.job.desired(scene.agents["b"].node).wish == End(scene.end)

    def test_a_storm_of_them_keeps_the_job_small(self) -> None:
        scene = Scene(given(5)).gather("a", "b")
        scene.fail("a", failure(traceback="the very first", at=0.0))
        size = 0
        for number in range(1, 1000):
            storm = failure(traceback=f"{number} {'x' * 3000}", message="m" * 500, at=float(number))
            scene.fail("b", storm, round_=1)
            if number == 50:
                size = len(scene.job.encode())
        assert len(scene.job.encode()) < size + 2000
        told = scene.job.status().distinct_failures
        assert len(told) == NUM_DISTINCT
        assert told[0].traceback_digest == traceback_digest(failure(traceback="the very first"))
        incident = scene.job.state.restarts.incident
        assert incident is not None
        assert incident.first.failure.traceback == "the very first"
        assert max(len(each.message) for each in told) <= 160
