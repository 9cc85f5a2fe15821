"""Sync points and barriers: who is waited for, for how long, and how a name is used again."""

from __future__ import annotations

import pytest

from dlrover.core.commit_order import replay
from dlrover.core.exchange.sync_points import SYNC_TIMEOUT
from dlrover.core.outcome import NotYet
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Strategy
from dlrover.protocol.messages.job import DeadlineKind, DeadlinePassed, Done, LookAgain, Reply, Round, Run
from dlrover.protocol.messages.sync import (
    MAX_NAME_BYTES,
    MAX_NAMES,
    BarrierOpen,
    JoinSync,
    NotifyBarrier,
    SyncFinished,
    SyncJoined,
    SyncState,
)
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import Scene, terms


class Meeting(Scene):
    """A scene whose workers meet. The worker `a1` is local rank 1 of node `a`."""

    def join_sync(self, worker: str, name: str = "x", round_: int | None = None) -> SyncJoined:
        agent = self.agents[worker[0]]
        command = JoinSync(
            name=name,
            round=self.round if round_ is None else Round(round_),
            local_rank=int(worker[1:] or 0),
            node=agent.node,
            incarnation=agent.incarnation,
        )
        reply = self.send(agent.name, command).reply
        assert isinstance(reply, SyncJoined)
        return reply

    def notify(self, worker: str, name: str = "x") -> Reply:
        agent = self.agents[worker]
        command = NotifyBarrier(name=name, round=self.round, node=agent.node, incarnation=agent.incarnation)
        return self.send(worker, command).reply

    @property
    def round(self) -> Round:
        return self.job.state.rendezvous.round

    def is_finished(self, name: str = "x", generation: int = 0) -> bool:
        return reached(self.job.ask(SyncFinished(name=name, round=self.round, generation=generation)))

    def is_open(self, name: str = "x", generation: int = 1) -> bool:
        return reached(self.job.ask(BarrierOpen(name=name, round=self.round, generation=generation)))

    @property
    def woken(self) -> list[str]:
        effects = self.outcomes[-1].effects
        return [topic for effect in effects if isinstance(effect, LookAgain) for topic in effect.topics]


def reached(answer: Reply | NotYet) -> bool:
    reply = answer.otherwise if isinstance(answer, NotYet) else answer
    assert isinstance(reply, SyncState)
    assert reply.is_reached != isinstance(answer, NotYet), "who has no good answer may wait for one"
    return reply.is_reached


def meeting(*names: str, procs: int = 1) -> Meeting:
    scene = Meeting(terms(len(names)))
    scene.gather(*names, procs=procs)
    return scene


class TestSyncPoint:
    def test_it_is_reached_when_all_who_ran_at_the_first_join_have_joined(self) -> None:
        scene = meeting("a", "b", "c")
        assert scene.join_sync("a") == SyncJoined(generation=1)
        assert scene.join_sync("b") == SyncJoined(generation=1)
        assert (scene.is_finished(), scene.woken) == (False, [])
        assert scene.join_sync("c") == SyncJoined(generation=1)
        assert (scene.is_finished(), scene.woken) == (True, ["sync/1/x"])

    def test_each_worker_of_a_node_is_waited_for(self) -> None:
        scene = meeting("a", "b", procs=2)
        for worker in ("a0", "a1", "b1"):
            scene.join_sync(worker)
            assert not scene.is_finished()
        scene.join_sync("b0")
        assert scene.is_finished()

    def test_joining_twice_counts_once(self) -> None:
        scene = meeting("a", "b")
        scene.join_sync("a")
        assert scene.join_sync("a") == SyncJoined(generation=1)
        assert not scene.is_finished()

    def test_an_unknown_name_is_not_finished(self) -> None:
        assert not meeting("a").is_finished("never heard of")

    def test_a_name_is_used_again_by_who_used_it_before(self) -> None:
        scene = meeting("a", "b")
        for generation in (1, 2, 3):
            assert scene.join_sync("a").generation == generation
            assert not scene.is_finished()
            assert scene.is_finished(generation=generation - 1) == (generation > 1), "slow ones still pass the old one"
            assert not scene.is_finished(generation=generation)
            assert scene.join_sync("b").generation == generation
            assert scene.is_finished(generation=generation)

    @pytest.mark.parametrize("how", ["finish", "leave", "silent", "gone"])
    def test_nobody_waits_for_who_has_ended(self, how: str) -> None:
        scene = Meeting(terms(1, 2, last_call=0))
        scene.gather("a", "b")
        scene.at(10)
        scene.join_sync("a")
        if how == "gone":
            scene.break_stream("b")
            scene.tick(20)
        else:
            getattr(scene, how)("b")
        assert scene.woken == [f"sync/{scene.round}/x"]
        assert scene.is_finished()

    def test_who_was_dropped_is_told_that_it_is_late(self) -> None:
        scene = meeting("a", "b")
        scene.join_sync("a")
        scene.tick(SYNC_TIMEOUT)
        assert scene.verdicts == (
            "Sync point 'x' waits no longer, after 3600 s without node rank 1 (host-b), local rank 0.",
        )
        assert (scene.is_finished(), scene.woken) == (True, ["sync/1/x"])
        assert scene.join_sync("b") == SyncJoined(generation=1, is_late=True)
        assert scene.join_sync("a") == SyncJoined(generation=2)

    def test_before_its_time_and_after_its_end_the_deadline_changes_nothing(self) -> None:
        scene = meeting("a", "b")
        scene.join_sync("a")
        assert scene.job.next_deadline() == SYNC_TIMEOUT * 1e6
        scene.do(DeadlinePassed(kind=DeadlineKind.SYNC_TIMEOUT, id=1))
        assert not scene.is_finished()
        scene.join_sync("b")
        assert scene.job.next_deadline() is None
        scene.at(SYNC_TIMEOUT + 1).do(DeadlinePassed(kind=DeadlineKind.SYNC_TIMEOUT, id=1))
        assert scene.verdicts == ()

    def test_a_new_round_begins_without_old_meetings(self) -> None:
        scene = meeting("a", "b")
        scene.join_sync("a")
        scene.notify("a")
        scene.fail("b")
        scene.rejoin("a", "b")
        assert (scene.round, scene.is_finished(), scene.is_open()) == (2, False, False)
        assert scene.job.state.sync.open == {}
        assert scene.join_sync("a") == SyncJoined(generation=1)

    def test_a_worker_of_an_older_round_is_refused(self) -> None:
        scene = meeting("a", "b")
        scene.fail("b")
        scene.rejoin("a", "b")
        with pytest.raises(Rejected, match="A worker of round 1") as refused:
            scene.join_sync("a", round_=1)
        assert refused.value.code == "stale-round"

    def test_it_survives_the_master(self) -> None:
        scene = meeting("a", "b")
        scene.join_sync("a")
        scene.at(SYNC_TIMEOUT - 1).restart_master()
        assert replay(None, scene.journal).job.digest() == scene.job.digest()
        scene.attach("a"), scene.attach("b")
        scene.join_sync("b")
        assert scene.is_finished()

    @pytest.mark.parametrize(
        ("worker", "name", "code"),
        [("a", "", "malformed"), ("a", "x" * (MAX_NAME_BYTES + 1), "malformed"), ("a7", "x", "malformed")],
    )
    def test_bad_joins_change_nothing(self, worker: str, name: str, code: str) -> None:
        scene = meeting("a")
        with pytest.raises(Rejected) as refused:
            scene.join_sync(worker, name)
        assert refused.value.code == code

    def test_names_are_limited(self) -> None:
        scene = meeting("a")
        scene.job.state.sync.points[scene.round] = {}
        scene.job.state.sync.barriers[scene.round] = {f"b{number}": 1 for number in range(MAX_NAMES)}
        with pytest.raises(Rejected, match="Names can be used again") as refused:
            scene.notify("a", "one more")
        assert refused.value.code == "sync-full"
        assert scene.notify("a", "b7") == Done()


class TestLaggardsOfAPlatform:
    def begin(self, min_nodes: int, strategy: Strategy, critical: str = "none") -> FleetScene:
        """Four workers; the first two are at a sync point."""
        replicas = {NodeType.WORKER: ReplicaSpec(count=4, critical=critical)}
        if strategy is not Strategy.ALLREDUCE:
            replicas[NodeType.PS] = ReplicaSpec(count=1)
        scene = FleetScene(terms(min_nodes, 4)).begin(FleetSpec(replicas=replicas, strategy=strategy))
        nodes = sorted(scene.fleet.workers.holders.values())
        scene.run().train(*nodes)
        for node in nodes[:2]:
            agent = scene.agents[f"n{node}"]
            join = JoinSync(name="x", round=Round(1), local_rank=0, node=agent.node, incarnation=agent.incarnation)
            scene.send(f"n{node}", join)
        return scene

    @pytest.mark.parametrize(
        ("min_nodes", "critical", "removed"),
        [(1, "none", [3, 4]), (1, "3:1", [3]), (3, "none", [3]), (4, "none", [])],
        ids=["all", "not who is critical", "only whom a world can do without", "nobody if there is no other way"],
    )
    def test_who_did_not_come_in_time_is_removed(self, min_nodes: int, critical: str, removed: list[int]) -> None:
        scene = self.begin(min_nodes, Strategy.CUSTOM, critical)
        scene.tick(SYNC_TIMEOUT - 1)
        assert scene.removed == []
        scene.tick(SYNC_TIMEOUT)
        assert scene.removed == removed
        assert scene.launched == [0, 1, 2, 3, 4], "and not replaced"
        assert scene.verdicts[0].startswith("Sync point 'x' waits no longer"), "the reason comes first"
        assert sum(scene.fleet.workers.spent.values()) == 0
        assert scene.job.end is None

    def test_nobody_is_removed_in_the_last_minutes(self) -> None:
        scene = self.begin(1, Strategy.CUSTOM)
        scene.finish("n1")
        scene.tick(SYNC_TIMEOUT)
        assert scene.removed == []
        assert isinstance(scene.wish("n2"), Run)

    def test_a_world_that_would_have_to_restart_keeps_them(self) -> None:
        scene = self.begin(1, Strategy.ALLREDUCE)
        scene.tick(SYNC_TIMEOUT)
        assert scene.removed == []
        assert isinstance(scene.wish("n0"), Run), "the point has let it go on"
        assert isinstance(scene.wish("n3"), Run)


class TestBarrier:
    def test_it_is_closed_until_somebody_opens_it(self) -> None:
        scene = meeting("a", "b")
        assert not scene.is_open()
        assert scene.notify("a") == Done()
        assert (scene.is_open(), scene.woken) == (True, ["barrier/1/x"])

    def test_the_second_passage_needs_the_second_notification(self) -> None:
        scene = meeting("a")
        scene.notify("a")
        assert not scene.is_open(generation=2)
        scene.notify("a")
        assert scene.is_open(generation=2)
