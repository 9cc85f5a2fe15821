"""Checkpoints through the master: complete sets, one committer, deadlines, what is told, and break points."""

from __future__ import annotations

import pytest

from dlrover.core.checkpoints.break_points import BREAK_GRACE
from dlrover.core.checkpoints.commits import MAX_DIRECTORIES, MAX_SETTLED, MAX_UNDER_WAY, SHORTEST_COMMIT
from dlrover.core.commit_order import replay
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import (
    AwaitSaveDuties,
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointStatus,
    HeldSnapshot,
    PersistSnapshot,
    RequestSave,
    SaveDuties,
    ShardWritten,
    SnapshotsHeld,
    digest_of_shards,
)
from dlrover.protocol.messages.job import Done, LeaveJob, LeaveReason, LookAgain, NodeId, Round
from tests.core.scene import Scene, terms

DIRECTORY = "/shared/run"


class Saving(Scene):
    """A scene whose agents write shards. Attempts are called `s<step>` unless a test wants more of one step."""

    def wrote(
        self, name: str, shard: int, step: int = 10, *, num_shards: int = 2, attempt: str = "", **details
    ) -> None:
        agent = self.agents[name]
        fields = {
            "directory": DIRECTORY,
            "target": str(step),
            "round": self.job.state.rendezvous.round,
            "digest": f"d{shard}",
        } | details
        command = ShardWritten(
            node=agent.node,
            incarnation=agent.incarnation,
            step=step,
            attempt=attempt or f"s{step}",
            shard=shard,
            num_shards=num_shards,
            **fields,
        )
        assert self.send(name, command).reply == Done()

    def committed(self, name: str, step: int = 10, *, attempt: str = "", **details) -> None:
        agent = self.agents[name]
        command = CheckpointCommitted(
            node=agent.node,
            incarnation=agent.incarnation,
            directory=DIRECTORY,
            attempt=attempt or f"s{step}",
            step=step,
            **details,
        )
        assert self.send(name, command).reply == Done()

    def failed(self, name: str, step: int = 10, *, shard: int = -1, reason: str = "disk full") -> None:
        agent = self.agents[name]
        command = CheckpointFailed(
            node=agent.node,
            incarnation=agent.incarnation,
            directory=DIRECTORY,
            attempt=f"s{step}",
            step=step,
            reason=reason,
            shard=shard,
        )
        assert self.send(name, command).reply == Done()

    def holds(self, name: str, *snapshots: HeldSnapshot, round_: int = 1) -> None:
        agent = self.agents[name]
        command = SnapshotsHeld(node=agent.node, incarnation=agent.incarnation, round=Round(round_), held=snapshots)
        assert self.send(name, command).reply == Done()

    def goes(self, name: str, *snapshots: HeldSnapshot) -> None:
        agent = self.agents[name]
        farewell = LeaveJob(
            node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.PREEMPTED, held=snapshots
        )
        assert self.send(name, farewell).reply == Done()

    def duties(self, name: str, since: int = 0) -> SaveDuties:
        agent = self.agents[name]
        answer = self.job.ask(AwaitSaveDuties(node=agent.node, incarnation=agent.incarnation, since=since))
        reply = answer.otherwise if isinstance(answer, NotYet) else answer
        assert isinstance(reply, SaveDuties)
        return reply

    def to_commit(self, name: str) -> list[int]:
        return [each.step for each in self.duties(name).commits]

    def outcomes_told(self, name: str) -> list[tuple[int, bool]]:
        return [(each.step, each.is_committed) for each in self.duties(name).settled]

    @property
    def status_(self) -> CheckpointStatus:
        return self.job.status().checkpoints

    @property
    def woken(self) -> list[str]:
        effects = self.outcomes[-1].effects
        return [topic for effect in effects if isinstance(effect, LookAgain) for topic in effect.topics]


def held(step: int, shard: int, num_shards: int = 2, **details) -> HeldSnapshot:
    fields = {"directory": DIRECTORY, "attempt": f"s{step}", "round": Round(1)} | details
    return HeldSnapshot(step=step, shard=shard, num_shards=num_shards, **fields)


def saving(*names: str, min_nodes: int = 0, **limits: float) -> Saving:
    scene = Saving(terms(min_nodes or len(names), len(names), **limits))
    scene.gather(*names)
    return scene


class TestCommit:
    def test_one_writer_commits_when_the_set_is_complete(self) -> None:
        scene = saving("a", "b")
        scene.wrote("b", 1)
        assert scene.to_commit("a") == scene.to_commit("b") == []
        scene.wrote("a", 0)
        assert scene.to_commit("b") == []
        (duty,) = scene.duties("a").commits
        assert (duty.step, duty.is_newest) == (10, True)
        assert duty.digest == digest_of_shards({0: "d0", 1: "d1"})
        assert scene.woken == [f"save-duties/{scene.agents['a'].node}"]

    def test_the_same_shard_twice_completes_nothing(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 0)
        assert scene.to_commit("a") == scene.to_commit("b") == []

    def test_all_nodes_hear_of_the_outcome_once(self) -> None:
        scene = saving("a", "b", "c")
        scene.wrote("a", 0, num_shards=1)
        scene.committed("a")
        for name in "abc":
            told = scene.duties(name)
            assert [(each.step, each.is_committed) for each in told.settled] == [(10, True)]
            assert scene.duties(name, since=told.number).settled == ()
        assert scene.status_.committed[0].step == 10
        assert scene.status_.num_under_way == 0

    def test_a_dead_committer_is_followed_by_another_writer(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 1)
        scene.silent("a")
        assert scene.to_commit("b") == [10]

    def test_a_restarted_agent_knows_nothing_of_its_duty(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 1)
        before = scene.duties("a").commits[0].number
        scene.restart_agent("a")
        # Asked again under a new number, for it is there and may have adopted the save.
        assert [each.number > before for each in scene.duties("a").commits] == [True]

    def test_a_committer_that_fails_is_followed_by_another_and_then_nobody(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 1)
        scene.failed("a", reason="permission denied")
        assert scene.to_commit("b") == [10]
        assert scene.status_.trouble is None
        scene.failed("b", reason="disk full")
        assert scene.outcomes_told("a") == [(10, False)]
        trouble = scene.status_.trouble
        assert trouble is not None
        assert (trouble.reason, trouble.step, trouble.host) == ("disk full", 10, "host-b")

    def test_a_committer_that_takes_too_long_is_followed_by_another(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 1, save_timeout=5.0)
        scene.tick(600.0)
        assert scene.to_commit("b") == [10]

    def test_who_was_replaced_as_too_slow_may_still_have_committed(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        scene.wrote("b", 1)
        scene.tick(600.0)
        scene.committed("a")
        assert scene.to_commit("b") == []
        assert scene.outcomes_told("b") == [(10, True)]

    def test_a_late_commit_takes_the_tracker_from_an_older_attempt(self) -> None:
        """Step 11 fails and step 10 has its turn. Then the first committer of step 11 succeeds after all."""
        scene = saving("a", "b")
        for step in (11, 10):
            scene.wrote("a", 0, step)
            scene.wrote("b", 1, step)
        scene.failed("a", 11)
        assert [(each.step, each.is_newest) for each in scene.duties("a").commits] == [(10, True)]
        scene.committed("a", 11)
        assert [(each.step, each.is_newest) for each in scene.duties("a").commits] == [(10, False)]

    def test_nobody_else_can_say_that_an_incomplete_attempt_is_committed(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0)
        with pytest.raises(Rejected, match="was not told to commit"):
            scene.committed("a")
        scene.committed("a", is_by_files=True)  # the files were complete: the report of the other was lost
        assert scene.outcomes_told("b") == [(10, True)]

    def test_one_attempt_of_a_directory_after_the_other(self) -> None:
        scene = saving("a", "b")
        for step in (20, 10):
            scene.wrote("a", 0, step)
            scene.wrote("b", 1, step)
        assert scene.to_commit("a") == [20]
        scene.committed("a", 20)
        (duty,) = scene.duties("a").commits
        assert (duty.step, duty.is_newest) == (10, False)
        scene.committed("a", 10)
        assert scene.status_.committed[0].step == 20

    def test_a_smaller_step_of_a_later_round_is_newer(self) -> None:
        scene = saving("a")
        scene.wrote("a", 0, 50, num_shards=1)
        scene.committed("a", 50)
        scene.fail("a")
        scene.join("a")
        scene.wrote("a", 0, 40, num_shards=1)
        assert scene.duties("a").commits[0].is_newest
        scene.committed("a", 40)
        assert scene.status_.committed[0].step == 40

    def test_an_attempt_that_is_over_takes_no_more_shards(self) -> None:
        scene = saving("a", "b")
        scene.failed("a", shard=0)
        with pytest.raises(Rejected, match="disk full") as refusal:
            scene.wrote("b", 1)
        assert refusal.value.code == "attempt-over"

    def test_a_shard_that_never_comes_ends_the_attempt(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0, save_timeout=30.0)
        scene.tick(29.0)
        assert scene.outcomes_told("a") == []
        scene.tick(30.0)
        assert scene.outcomes_told("a") == [(10, False)]
        assert "only 1 of 2 shards were written; missing: 1" in scene.duties("a").settled[0].reason

    def test_the_same_trouble_is_said_once_and_forgotten_with_success(self) -> None:
        scene = saving("a")
        scene.failed("a", 1, shard=0)
        assert scene.verdicts
        scene.failed("a", 2, shard=0)
        assert not scene.verdicts
        assert scene.status_.trouble is not None
        assert scene.status_.trouble.count == 2
        scene.wrote("a", 0, 3, num_shards=1)
        scene.committed("a", 3)
        assert scene.status_.trouble is None

    def test_former_lives_foreign_rounds_and_nonsense_are_refused(self) -> None:
        scene = saving("a", "b")
        former = scene.agents["a"]
        scene.restart_agent("a")
        newest, scene.agents["a"] = scene.agents["a"], former
        with pytest.raises(Rejected):
            scene.wrote("a", 0)
        scene.agents["a"] = newest
        for nonsense in (
            {"round": 7},
            {"digest": ""},
            {"save_timeout": float("nan")},
            {"directory": ""},
            {"target": ""},
        ):
            with pytest.raises(Rejected):
                scene.wrote("b", 0, **nonsense)
        with pytest.raises(Rejected):
            scene.wrote("b", 2)
        scene.wrote("b", 0)
        with pytest.raises(Rejected, match="differs from that") as refusal:
            scene.wrote("a", 1, num_shards=3)
        assert refusal.value.code == "attempt-differs"

    def test_nothing_grows_without_bounds(self) -> None:
        scene = saving("a")
        for step in range(MAX_UNDER_WAY + MAX_SETTLED + 5):
            scene.wrote("a", 0, step, directory=f"/{step % 40}")
        room = scene.job.state.checkpoints
        assert len(room.attempts) == MAX_UNDER_WAY
        assert len(room.settled) == MAX_SETTLED
        for step in range(100, 140):
            scene.committed("a", step, is_by_files=True)
        assert len(room.committed) <= MAX_DIRECTORIES

    def test_a_master_that_died_goes_on_where_it_was(self) -> None:
        scene = saving("a", "b")
        scene.wrote("a", 0, save_timeout=30.0)
        scene.at(29.0).restart_master()
        scene.attach("a")
        scene.attach("b")
        scene.tick(29.5)
        scene.wrote("b", 1, save_timeout=30.0)
        assert scene.to_commit("a") == [10]
        assert replay(None, scene.journal).job.digest() == scene.job.digest()

    def test_an_agent_that_heard_greater_numbers_hears_everything_of_a_master_without_its_journal(self) -> None:
        scene = saving("a")
        scene.wrote("a", 0, num_shards=1)
        assert len(scene.duties("a", since=10_000).commits) == 1


class TestRequest:
    def test_a_save_on_request_is_told_to_all_until_one_is_committed(self) -> None:
        scene = saving("a", "b")
        scene.do(RequestSave(reason="maintenance"))
        for name in "ab":
            request = scene.duties(name).request
            assert request is not None
            assert request.reason == "maintenance"
            assert scene.duties(name, since=request.number).request is None
        scene.wrote("a", 0, num_shards=1)
        scene.committed("a")
        assert scene.duties("b").request is None

    def test_a_job_that_ended_is_not_saved(self) -> None:
        scene = saving("a")
        scene.stop()
        with pytest.raises(Rejected, match="ended"):
            scene.do(RequestSave())


class TestBreakPoint:
    def test_the_newest_step_that_all_shards_have_is_written(self) -> None:
        scene = saving("a", "b")
        scene.fail("a")
        scene.holds("a", held(10, 0), held(11, 0))
        assert scene.duties("a").persists == ()
        scene.holds("b", held(9, 1), held(10, 1))
        (of_a,), (of_b,) = scene.duties("a").persists, scene.duties("b").persists
        assert (of_a.step, of_a.attempt, of_a.shards) == (10, "s10", (0,))
        assert (of_b.step, of_b.attempt, of_b.shards) == (10, "s10", (1,))

    def test_a_copy_of_a_dead_nodes_shard_is_as_good(self) -> None:
        scene = saving("a", "b", "c")
        scene.fail("b")
        scene.holds("b", held(10, 1), held(10, 0, directory=DIRECTORY))
        scene.holds("c", held(10, 0))
        scene.silent("a")
        shares = {name: scene.duties(name).persists[0].shards for name in "bc"}
        assert sorted(shares["b"] + shares["c"]) == [0, 1]

    def test_without_a_dead_nodes_shard_nothing_is_written(self) -> None:
        scene = saving("a", "b")
        scene.fail("b")
        scene.holds("b", held(10, 1))
        scene.silent("a")
        (decision,) = scene.duties("b").persists
        assert decision == PersistSnapshot(number=decision.number, round=Round(1))

    def test_what_a_leaving_node_writes_by_itself_is_completed_by_the_others(self) -> None:
        scene = saving("a", "b", min_nodes=1)
        scene.goes("b", held(10, 1), held(11, 1))
        scene.holds("a", held(9, 0), held(10, 0))
        assert scene.duties("a").persists[0].shards == (0,)
        scene.wrote("a", 0)
        (duty,) = scene.duties("a").commits
        assert (duty.step, duty.is_waiting, duty.digest) == (10, True, "")

    def test_a_leaving_node_alone_is_left_to_itself(self) -> None:
        scene = saving("a", "b", min_nodes=1)
        scene.goes("b", held(10, 1, num_shards=2), held(10, 0, num_shards=2))
        scene.holds("a", held(9, 0))
        assert scene.duties("a").persists[0].attempt == ""

    def test_nonsense_of_a_leaving_node_keeps_it_from_nothing(self) -> None:
        scene = saving("a", "b", min_nodes=1)
        scene.goes("b", held(-5, 9))
        assert scene.job.state.checkpoints.breaks.open is None

    def test_who_does_not_tell_is_not_waited_for_long(self) -> None:
        scene = saving("a", "b")
        scene.fail("b")
        scene.holds("b", held(10, 0, num_shards=1))
        assert scene.duties("b").persists == ()
        scene.tick(BREAK_GRACE)
        assert scene.duties("b").persists[0].shards == (0,)
        with pytest.raises(Rejected, match="decided without"):
            scene.holds("a", held(10, 0, num_shards=1))

    def test_what_is_committed_is_not_written_again(self) -> None:
        scene = saving("a")
        scene.wrote("a", 0, 10, num_shards=1)
        scene.committed("a", 10)
        scene.fail("a")
        scene.holds("a", held(10, 0, num_shards=1))
        assert scene.duties("a").persists[0].attempt == ""

    def test_what_failed_before_may_be_tried_again(self) -> None:
        scene = saving("a")
        scene.failed("a", 10, shard=0)
        scene.fail("a")
        scene.holds("a", held(10, 0, num_shards=1))
        scene.wrote("a", 0, 10, num_shards=1)
        assert scene.to_commit("a") == [10]

    def test_reports_may_come_when_the_next_round_runs_already(self) -> None:
        scene = saving("a", "b")
        scene.fail("a")
        scene.rejoin("a", "b")
        assert scene.job.state.rendezvous.round == 2
        scene.holds("a", held(10, 0))
        scene.holds("b", held(10, 1))
        assert scene.duties("b").persists[0].shards == (1,)

    def test_nonsense_is_refused(self) -> None:
        scene = saving("a")
        for nonsense in (held(10, 2), held(-1, 0), held(10, 0, attempt=""), held(10, 0, directory="x" * 5000)):
            with pytest.raises(Rejected):
                scene.holds("a", nonsense)
        with pytest.raises(Rejected, match="newest round"):
            scene.holds("a", round_=5)


def test_a_commit_has_time_even_if_shards_have_little() -> None:
    scene = saving("a")
    scene.wrote("a", 0, num_shards=1, save_timeout=0.5)
    scene.tick(SHORTEST_COMMIT - 1)
    assert scene.to_commit("a") == [10]


def test_nodes_are_named_in_the_topics() -> None:
    scene = saving("a")
    answer = scene.job.ask(AwaitSaveDuties(node=NodeId(1), incarnation=scene.agents["a"].incarnation))
    assert isinstance(answer, NotYet)
    assert answer.topics == ("save-duties/1",)


def test_an_incomplete_save_of_a_former_round_ends_with_the_next_checkpoint() -> None:
    """A worker died between its neighbour's save and its own: nobody shall wait for its shard until the end of the job."""
    scene = saving("a", "b")
    scene.wrote("a", 0, step=10)
    scene.fail("b")
    for name in ("a", "b"):
        scene.join(name)
    scene.wrote("a", 0, step=12)
    scene.wrote("b", 1, step=12)
    scene.committed("a", 12)
    outcomes = {each.attempt: each for each in scene.job.state.checkpoints.settled}
    assert outcomes["s12"].is_committed
    assert not outcomes["s10"].is_committed
    assert "1 of 2 shards were never written" in outcomes["s10"].reason
    assert not scene.job.state.checkpoints.attempts
