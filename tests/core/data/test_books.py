"""Datasets in a job: lives of workers, rounds, restored models, checkpoints, and bad input."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from dlrover.core.commit_order import replay
from dlrover.core.data.books import MAX_RESTORED, RESTORE_PATIENCE, DataBooks
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import CheckpointCommitted, ShardWritten
from dlrover.protocol.messages.data import (
    MAX_PARTITIONS,
    MAX_SHARDS_AT_ONCE,
    AskDataCheckpoint,
    AskDataset,
    Claim,
    Consumption,
    DataCheckpoint,
    DatasetSpec,
    DatasetState,
    ExchangeShards,
    ExtendStream,
    LeasedShard,
    RegisterDataset,
    RestoreAgreed,
    RestoreDataset,
    ShardError,
    ShardsGiven,
    StorageKind,
    Supply,
    TaskType,
    last_shared,
)
from dlrover.protocol.messages.job import ExitReason, FailureKind, MasterStarted, Round
from tests.core.scene import Scene, failure, terms

SPEC = DatasetSpec(name="d", size=100, shard_size=10)


class Reading(Scene):
    """A scene whose workers read. The worker `a1` is local rank 1 of node `a`."""

    def begin(self, *nodes: str, procs: int = 2, spec: DatasetSpec = SPEC) -> Reading:
        for node in nodes:
            self.attach(node, procs=procs)
            self.join(node, procs=procs)
        self.register(nodes[0], spec)
        return self

    def register(self, worker: str, spec: DatasetSpec = SPEC) -> DatasetState:
        reply = self.send(worker[0], RegisterDataset(dataset=spec.name, spec=spec, **self.who(worker))).reply
        assert isinstance(reply, DatasetState)
        return reply

    def who(self, worker: str) -> dict[str, object]:
        agent = self.agents[worker[0]]
        return {
            "node": agent.node,
            "incarnation": agent.incarnation,
            "round": self.round,
            "local_rank": int(worker[1:] or 0),
        }

    @property
    def round(self) -> Round:
        return self.job.state.rendezvous.round

    def exchange(self, worker: str, dataset: str = "d", **fields: object) -> ShardsGiven:
        command = ExchangeShards(**({"dataset": dataset, **self.who(worker)} | fields))  # type: ignore[arg-type]
        reply = self.send(worker[0], command).reply
        assert isinstance(reply, ShardsGiven)
        return reply

    def take(self, worker: str, want: int = 1) -> list[LeasedShard]:
        return list(self.exchange(worker, want=want).shards)

    def consume(self, worker: str, shard: LeasedShard, step: int = -1, count: int = 0) -> None:
        self.exchange(worker, consumed=(Consumption(shard.id, count or shard.end - shard.start, step),))

    def restored(self, worker: str, step: int, **fields: object) -> None:
        self.send(worker[0], RestoreAgreed(step=step, **({**self.who(worker)} | fields)))  # type: ignore[arg-type]

    def state(self, dataset: str = "d") -> DatasetState:
        reply = self.job.ask(AskDataset(dataset=dataset))
        assert isinstance(reply, DatasetState)
        return reply

    def new_round(self, *nodes: str) -> None:
        self.fail(nodes[0])
        for node in nodes:
            self.join(node)

    def checkpoint(self, step: int = -1) -> str:
        reply = self.job.ask(AskDataCheckpoint(dataset="d", step=step))
        assert isinstance(reply, DataCheckpoint)
        return reply.content

    def go_back(self, worker: str, content: str) -> DatasetState:
        reply = self.send(worker[0], RestoreDataset(dataset="d", content=content, **self.who(worker))).reply  # type: ignore[arg-type]
        assert isinstance(reply, DatasetState)
        return reply


def places(shards: list[LeasedShard]) -> list[tuple[int, int]]:
    return [(shard.start, shard.end) for shard in shards]


@pytest.fixture
def scene() -> Reading:
    return Reading(terms(2)).begin("a", "b")


def refused(scene: Reading, code: str, **fields: object) -> str:
    with pytest.raises(Rejected) as caught:
        scene.exchange("a", **fields)
    assert caught.value.code == code
    return str(caught.value)


def test_the_survivor_waits_and_gets_the_rest(scene: Reading) -> None:
    mine = []
    while shards := scene.take("a"):
        mine += shards
        for shard in shards:
            scene.consume("a", shard)
        if len(mine) == 8:
            break
    others = scene.take("b", 2) + scene.take("b", 2)
    assert len(others) == 2
    assert scene.exchange("a", want=1).supply is Supply.WAIT
    scene.at(50).silent("b")
    again = scene.take("a") + scene.take("a")
    assert places(again) == places(others)
    for shard in again:
        scene.consume("a", shard)
    assert scene.exchange("a", want=1).supply is Supply.END
    assert scene.state().is_complete


def test_two_workers_of_one_node_read_apart(scene: Reading) -> None:
    [first], [second] = scene.take("a0"), scene.take("a1")
    assert first.start != second.start
    with pytest.raises(Rejected) as caught:
        scene.consume("a1", first)
    assert caught.value.code == "stale-lease"
    assert "local rank 0 of node" in str(caught.value)


def test_a_new_round_ends_all_leases(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.new_round("a", "b")
    assert scene.state().num_doing == 0
    refused(scene, "stale-lease", consumed=(Consumption(shard.id, 1),))
    assert places(scene.take("b")) == places([shard])


def test_a_worker_of_an_older_round_is_not_heard(scene: Reading) -> None:
    old = scene.round
    scene.new_round("a", "b")
    refused(scene, "stale-round", want=1, round=old)


def test_what_a_restarted_agent_held_goes_back(scene: Reading) -> None:
    taken = scene.take("a", 3)
    scene.restart_agent("a")
    assert scene.state().num_doing == 0
    assert scene.state().num_todo == 100
    assert taken


def test_the_model_decides_what_is_read_again(scene: Reading) -> None:
    one, two = scene.take("a", 2)
    scene.consume("a", one, step=1)
    scene.consume("a", two, step=2)
    scene.new_round("a", "b")
    assert scene.exchange("b", want=1).supply is Supply.WAIT, "nobody has said yet which model goes on"
    scene.restored("a", 1)
    assert places(scene.take("b")) == places([two])
    assert scene.state().num_consumed == 10


def test_a_model_from_scratch_reads_everything(scene: Reading) -> None:
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    scene.new_round("a", "b")
    scene.restored("b", -1)
    assert scene.state().num_todo == 100


def test_a_restored_model_knows_of_records_that_nobody_was_told_of(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.new_round("a", "b")
    scene.restored("a", 7, claims={"d": (Claim(0, shard.start, shard.start + 4, 7),)})
    assert places(scene.take("b")) == [(shard.start + 4, shard.end)]


def test_said_twice_is_said_once_and_two_models_are_refused(scene: Reading) -> None:
    scene.restored("a", 3)
    scene.restored("b", 3)
    with pytest.raises(Rejected) as caught:
        scene.restored("b", 4)
    assert caught.value.code == "restore-differs"


def commit(scene: Reading, step: int, round_: int) -> None:
    agent = scene.agents["a"]
    scene.send(
        "a",
        CheckpointCommitted(
            node=agent.node, incarnation=agent.incarnation, directory="/c", attempt=f"{round_}-{step}", step=step,
            round=Round(round_), is_by_files=True,
        ),
    )  # fmt: skip


def test_a_model_in_storage_makes_its_records_final(scene: Reading) -> None:
    one, two = scene.take("a", 2)
    scene.consume("a", one, step=1)
    scene.consume("a", two, step=2)
    commit(scene, 1, scene.round)
    assert (scene.state().num_committed, scene.state().num_consumed) == (10, 20)


def test_a_checkpoint_of_a_history_that_was_given_up_counts_as_far_as_that_is_shared(scene: Reading) -> None:
    old = scene.round
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    scene.new_round("a", "b")
    scene.restored("a", 1)
    [shard] = scene.take("a")
    scene.consume("a", shard, step=2)  # another step 2 than the one before
    commit(scene, 3, old)
    assert (scene.state().num_committed, scene.state().num_consumed) == (10, 20)


def test_a_late_checkpoint_counts_when_the_ranks_have_said_what_they_found(scene: Reading) -> None:
    old = scene.round
    for step, shard in enumerate(scene.take("a", 2), 1):
        scene.consume("a", shard, step=step)
    scene.new_round("a", "b")
    commit(scene, 2, old)
    assert scene.state().num_committed == 0, "they may have looked before it was there"
    scene.restored("a", 1)
    assert (scene.state().num_committed, scene.state().num_consumed) == (10, 10)


def test_a_checkpoint_of_a_history_that_was_given_up_twice_counts_no_further(scene: Reading) -> None:
    old = scene.round
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    for restored in (1, 2):
        scene.new_round("a", "b")
        scene.restored("a", restored)
        [shard] = scene.take("a")
        scene.consume("a", shard, step=restored + 1)
    commit(scene, 3, old)
    assert (scene.state().num_committed, scene.state().num_consumed) == (10, 30)


def shard_written(scene: Reading, step: int, round_: Round, attempt: str, shard: int = 0, num_shards: int = 2) -> None:
    agent = scene.agents["a"]
    scene.send(
        "a",
        ShardWritten(
            node=agent.node, incarnation=agent.incarnation, directory="/c", target="t", step=step, attempt=attempt,
            shard=shard, num_shards=num_shards, round=round_, digest="d",
        ),
    )  # fmt: skip


def test_saves_of_a_history_that_was_given_up_become_no_checkpoints(scene: Reading) -> None:
    old = scene.round
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    shard_written(scene, 1, old, "kept")
    shard_written(scene, 3, old, "under-way")
    scene.new_round("a", "b")
    scene.restored("a", 1)
    assert [each.attempt for each in scene.job.state.checkpoints.attempts.values()] == ["kept"]
    shard_written(scene, 1, old, "kept", shard=1)
    for attempt in ("under-way", "new"):
        with pytest.raises(Rejected) as caught:
            shard_written(scene, 3, old, attempt, shard=1)
        assert caught.value.code == "attempt-over"


def test_saves_of_a_history_that_others_went_past_become_no_checkpoints(scene: Reading) -> None:
    """Back to step 1 by name, on from there, and then to step 3 of the history before: step 2 in between belongs to neither."""
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    first, third = (scene.job.state.data.state_for_manifest(step, scene.round) for step in (1, 3))
    scene.new_round("a", "b")
    scene.restored("a", 1, data_state=first, is_explicit=True)
    [shard] = [shard for shard in scene.take("a", 2) if shard.start == 20]
    scene.consume("a", shard, step=2)
    between = scene.round
    shard_written(scene, 2, between, "under-way")
    scene.new_round("a", "b")
    scene.restored("a", 3, data_state=third)
    assert scene.job.state.checkpoints.attempts == {}
    with pytest.raises(Rejected) as caught:
        shard_written(scene, 2, between, "under-way", shard=1)
    assert caught.value.code == "attempt-over"


def test_two_histories_that_count_the_same_are_told_apart(scene: Reading) -> None:
    _, second = scene.take("a", 2)
    scene.consume("a", second, step=1)
    text = scene.job.state.data.state_for_manifest(1, scene.round)
    scene.new_round("a", "b")
    scene.restored("a", -1)
    [first] = [shard for shard in scene.take("a", 2) if shard.start == 0]
    scene.consume("a", first, step=1)
    scene.new_round("a", "b")
    scene.restored("a", 1, data_state=text)
    assert places(scene.take("a", 2)) == [(0, 10), (20, 30)]


def test_a_world_is_told_which_models_others_have_given_up(scene: Reading) -> None:
    """Step 3 of the first round may still lie in the memory of a node that was cut off."""
    old = scene.round
    assert scene.world("a").turns == ()
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    scene.new_round("a", "b")
    before = scene.world("a").turns
    scene.restored("a", 1)
    between = scene.round
    assert scene.world("a").turns == before == (), "workers that run already are told nothing new"
    scene.new_round("a", "b")
    turns = scene.world("a").turns
    assert turns == ((between, 1),)
    assert scene.world("b").turns == turns
    assert [last_shared(step, old, turns) for step in (1, 2, 3)] == [1, 1, 1]
    assert last_shared(3, between, turns) == 3
    scene.restored("a", 0)
    assert scene.world("a").turns == turns


def test_nothing_of_before_is_of_the_history_of_a_checkpoint_that_was_named(scene: Reading) -> None:
    old = scene.round
    for step, shard in enumerate(scene.take("a", 3), 1):
        scene.consume("a", shard, step=step)
    first = scene.job.state.data.state_for_manifest(1, old)
    scene.new_round("a", "b")
    scene.restored("a", 1, data_state=first, is_explicit=True)
    between = scene.round
    scene.new_round("a", "b")
    turns = scene.world("a").turns
    assert last_shared(1, old, turns) == -1
    assert last_shared(2, between, turns) == 2


def test_a_commit_on_the_masters_word_counts_in_the_round_of_its_save(scene: Reading) -> None:
    scene.new_round("a", "b")
    scene.restored("a", 0)
    [shard] = scene.take("a")
    scene.consume("a", shard, step=1)
    agent = scene.agents["a"]
    what = {"node": agent.node, "incarnation": agent.incarnation, "directory": "/c", "attempt": "one", "step": 1}
    scene.send("a", ShardWritten(**what, target="t", shard=0, num_shards=1, round=scene.round, digest="d"))  # type: ignore[arg-type]
    scene.send("a", CheckpointCommitted(**what))  # type: ignore[arg-type]
    assert scene.state().num_committed == 10


def test_only_so_many_restored_models_are_remembered_and_the_oldest_with_caution() -> None:
    books = DataBooks()
    for number in range(1, 3 * MAX_RESTORED):
        books.note_restored(Round(number), 10 * number)
    assert len(books.restored) == MAX_RESTORED
    assert books.last_shared(10**6, Round(0)) == 10
    assert books.last_shared(10**6, Round(1)) == 10
    assert books.last_shared(10**6, Round(3 * MAX_RESTORED - 2)) == 10 * (3 * MAX_RESTORED - 1)
    books.note_restored(Round(1000), 5)
    assert books.restored == {Round(1000): 5}


def test_what_a_worker_of_the_round_holds_already_stays_with_it(scene: Reading) -> None:
    [early] = scene.take("b")  # no model has seen anything, so it need not wait
    scene.restored("a", -1)
    scene.consume("b", early, step=1)
    assert (scene.state().num_doing, scene.state().num_consumed) == (0, 10)


def test_what_the_model_claims_is_taken_from_a_worker_that_got_it_meanwhile(scene: Reading) -> None:
    [shard] = scene.take("a")  # it reads it, and the report is lost
    scene.new_round("a", "b")
    [early] = scene.take("b")
    assert early.start == shard.start
    scene.restored("a", 1, claims={"d": (Claim(0, shard.start, shard.end, 1),)})
    refused(scene, "stale-lease", consumed=(Consumption(early.id, 10, 2),))
    assert (scene.state().num_consumed, scene.take("b")[0].start) == (10, 10)


def test_who_tells_steps_waits_for_the_model_also_if_all_is_final(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard, step=1)
    commit(scene, 1, scene.round)
    scene.new_round("a", "b")
    assert not scene.take("b"), "the ranks may go back to an older checkpoint"
    scene.restored("a", 1)
    assert scene.take("b")


def test_nobody_waits_for_ever_for_the_word_about_the_model(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard, step=1)
    scene.new_round("a", "b")
    scene.at(RESTORE_PATIENCE + 1)
    assert not scene.take("b"), "the workers may have needed so long to start"
    scene.at(2 * RESTORE_PATIENCE)
    assert not scene.take("b")
    scene.at(2 * RESTORE_PATIENCE + 2)
    assert scene.take("b")
    assert "did not say in time which model" in scene.job.state.verdict


def test_what_storage_has_is_never_read_again_once_the_wait_for_the_word_is_over(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard, step=1)
    former = scene.round
    scene.new_round("a", "b")
    commit(scene, 1, former)
    assert not scene.take("b")
    books = scene.job.state.data
    assert (books.folded, list(books.datasets["d"].provisional)) == (-1, [1])
    scene.at(RESTORE_PATIENCE + 1)
    assert scene.take("b")
    assert (books.folded, list(books.datasets["d"].provisional)) == (1, [])


def test_while_the_master_is_away_nobody_can_say_which_model_it_is(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard, step=1)
    scene.new_round("a", "b")
    assert not scene.take("b")
    scene.at(RESTORE_PATIENCE + 100)
    scene.do(MasterStarted(2, "a-job"))
    assert not scene.take("b")
    scene.restored("a", 0)
    assert scene.take("b")[0].start == shard.start


def test_the_last_words_of_workers_that_finished_while_the_master_was_away_are_heard(scene: Reading) -> None:
    shards = []
    while taken := scene.take("a", 5):
        shards += taken
    for shard in shards[:-1]:
        scene.consume("a", shard, step=1)
    scene.finish("b")
    scene.agents["a"].finished_round = scene.round
    scene.attach("a")  # it says on arrival that it has finished, and what it has to tell follows
    assert scene.job.end is None
    scene.consume("a", shards[-1], step=2)
    scene.finish("a")
    assert scene.job.end is not None
    assert scene.job.end.reason is ExitReason.COMPLETED


def test_a_finished_node_that_tells_nothing_more_is_not_waited_for_for_ever(scene: Reading) -> None:
    scene.take("a")
    scene.finish("b")
    scene.agents["a"].finished_round = scene.round
    scene.attach("a")
    assert scene.job.end is None
    scene.at(50).silent("a")
    assert scene.job.end is not None
    assert scene.job.end.reason is ExitReason.DATA_UNFINISHED


def test_scripts_without_steps_never_wait(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard)
    scene.new_round("a", "b")
    assert places(scene.take("b")) == [(10, 20)]


def test_an_evaluation_is_taken_from_who_is_not_heard_of(scene: Reading) -> None:
    spec = replace(SPEC, name="e", task_type=TaskType.EVALUATION, lease=30.0)
    scene.register("a", spec)
    [shard] = scene.exchange("a", "e", want=1).shards
    scene.at(20).exchange("a", "e")
    scene.tick(45)
    assert scene.state("e").num_doing == 10
    scene.tick(60)
    assert scene.state("e").num_doing == 0
    assert "were not heard of for 30 s" in scene.outcomes[-1].verdicts[0]
    assert scene.exchange("b", "e", want=1).shards[0].start == shard.start


def test_a_shard_for_training_stays_with_its_worker_as_long_as_that_lives(scene: Reading) -> None:
    scene.take("a")
    scene.tick(3000)
    assert scene.state().num_doing == 10


def test_data_that_cannot_be_read_are_named_in_the_end(scene: Reading) -> None:
    for _ in range(4):
        [shard] = scene.take("a")
        scene.exchange("a", failed=(ShardError(shard.id, "broken line 7"),))
    state = scene.state()
    assert state.num_set_aside == 10
    assert "broken line 7" in state.set_aside[0]
    assert "set aside after 4 tries" in scene.job.state.verdict


def test_an_idle_worker_gets_recalled_shards(scene: Reading) -> None:
    taken = scene.take("a", 5) + scene.take("a", 5) + scene.take("a", 5)
    while shards := scene.take("b"):
        scene.consume("b", shards[0])
    assert scene.exchange("b", want=1).supply is Supply.WAIT
    recalled = scene.exchange("a").recalled
    assert recalled
    assert set(recalled) < {shard.id for shard in taken}
    scene.exchange("a", unused=recalled)
    assert scene.take("b")


def test_a_stream_grows_and_ends() -> None:
    spec = DatasetSpec(name="d", size=-1, shard_size=10, storage=StorageKind.STREAM, partitions={"p": 0})
    scene = Reading(terms(1)).begin("a", spec=spec)
    [shard] = scene.take("a")
    scene.consume("a", shard)
    scene.send("a", ExtendStream(dataset="d", partitions={"q": 5}, ends={"p": 15, "q": 9}, **scene.who("a")))  # type: ignore[arg-type]
    seen = []
    while shards := scene.take("a"):
        seen += [(each.partition, each.start, each.end) for each in shards]
        for each in shards:
            scene.consume("a", each)
    assert sorted(seen) == [("p", 10, 15), ("q", 5, 9)]
    assert scene.exchange("a", want=1).supply is Supply.END
    with pytest.raises(Rejected, match="cannot end before"):
        scene.send("a", ExtendStream(dataset="d", ends={"p": 3}, **scene.who("a")))  # type: ignore[arg-type]


GROWING = DatasetSpec(name="d", size=-1, shard_size=10, storage=StorageKind.STREAM, grows=True)


def test_a_stream_may_be_told_of_all_its_partitions_again() -> None:
    scene = Reading(terms(1)).begin("a", spec=GROWING)
    names = [f"file-{number}" for number in range(MAX_PARTITIONS)]

    def extend(ends: dict[str, int]) -> None:
        partitions = dict.fromkeys(ends, 0)
        scene.send("a", ExtendStream(dataset="d", partitions=partitions, ends=ends, **scene.who("a")))  # type: ignore[arg-type]

    extend(dict.fromkeys(names, 1))
    extend(dict.fromkeys(names, 2))  # a watch that was started again names them all
    with pytest.raises(Rejected, match="at most 4096 partitions"):
        extend({"one more": 1})


def test_a_growing_stream_gives_what_was_told_of_and_ends_only_when_it_is_said() -> None:
    scene = Reading(terms(1)).begin("a", spec=GROWING)

    def extend(**fields: object) -> None:
        scene.send("a", ExtendStream(dataset="d", **fields, **scene.who("a")))  # type: ignore[arg-type]

    assert scene.exchange("a", want=1).supply is Supply.WAIT, "nothing is there yet, and that is no end"
    extend(partitions={"p": 0}, ends={"p": 4})
    [shard] = scene.take("a")
    assert (shard.partition, shard.start, shard.end) == ("p", 0, 4)
    scene.consume("a", shard)
    assert scene.exchange("a", want=1).supply is Supply.WAIT
    extend(partitions={"p": 0, "q": 0}, ends={"p": 17, "q": 1})
    extend(partitions={"p": 0}, ends={"p": 5})  # another watcher, late
    seen = []
    while shards := scene.take("a"):
        seen += [(each.partition, each.start, each.end) for each in shards]
        for each in shards:
            scene.consume("a", each)
    assert sorted(seen) == [("p", 4, 14), ("p", 14, 17), ("q", 0, 1)]
    text = scene.job.ask(AskDataCheckpoint(dataset="d"))
    extend(ends={"q": 1}, is_over=True)
    assert scene.exchange("a", want=1).supply is Supply.END
    assert scene.job.state.data.datasets["d"].is_complete
    extend(ends={"p": 12}, is_over=True)  # nothing new
    with pytest.raises(Rejected, match="is over"):
        extend(partitions={"r": 0}, ends={"r": 1})
    assert isinstance(text, DataCheckpoint)
    scene.send("a", RestoreDataset(dataset="d", content=text.content, **scene.who("a")))  # type: ignore[arg-type]
    assert scene.exchange("a", want=1).supply is Supply.WAIT, "it was not over then"


def test_what_is_no_growing_stream_cannot_be_over(scene: Reading) -> None:
    with pytest.raises(Rejected, match="no stream and cannot grow"):
        scene.register("a", replace(SPEC, name="e", grows=True))
    scene.register("a", replace(GROWING, name="e", grows=False, partitions={"p": 0}))
    with pytest.raises(Rejected, match="does not grow"):
        scene.send("a", ExtendStream(dataset="e", is_over=True, **scene.who("a")))  # type: ignore[arg-type]


def test_other_data_under_the_same_name_are_refused(scene: Reading) -> None:
    scene.register("a", replace(SPEC, name="e", fingerprint="one"))
    scene.register("a", replace(SPEC, name="e", fingerprint="one"))
    with pytest.raises(Rejected, match=r"not those that it was registered with .*files were changed"):
        scene.register("a", replace(SPEC, name="e", fingerprint="two"))


# Checkpoints.


def test_a_checkpoint_brings_back_what_its_model_had_not_seen(scene: Reading) -> None:
    one, two, three = scene.take("a", 3)
    scene.consume("a", one, step=1)
    scene.consume("a", two, step=2)
    content = scene.checkpoint(step=1)
    scene.consume("a", three, step=3)
    state = scene.go_back("a", content)
    assert (state.num_todo, state.num_consumed) == (90, 10)
    refused(scene, "stale-lease", consumed=(Consumption(three.id, 1),))
    assert places(scene.take("a", 2)) == places([two, three])


def test_a_checkpoint_keeps_what_was_set_aside(scene: Reading) -> None:
    for _ in range(4):
        [shard] = scene.take("a")
        scene.exchange("a", failed=(ShardError(shard.id, "broken line 7"),))
    state = scene.go_back("a", scene.checkpoint())
    assert (state.num_todo, state.num_set_aside) == (90, 10)


@pytest.mark.parametrize("field", ["start", "end", "epoch"])
def test_a_checkpoint_that_set_aside_what_the_dataset_does_not_have_is_refused(scene: Reading, field: str) -> None:
    for _ in range(4):
        [shard] = scene.take("a")
        scene.exchange("a", failed=(ShardError(shard.id, "broken line 7"),))
    content = scene.checkpoint()
    good = '[0,0,10,"",0]'
    assert good in content
    bad = {"start": '[0,-1,10,"",0]', "end": '[0,95,101,"",0]', "epoch": '[7,0,10,"",0]'}[field]
    with pytest.raises(Rejected) as caught:
        scene.go_back("a", content.replace(good, bad))
    assert caught.value.code == "malformed"


def test_a_worker_of_an_older_round_gets_no_checkpoint(scene: Reading) -> None:
    old = scene.round
    scene.new_round("a", "b")
    with pytest.raises(Rejected) as caught:
        scene.job.ask(AskDataCheckpoint(dataset="d", step=1, round=old))
    assert caught.value.code == "stale-round"


def test_the_text_is_what_the_original_reads(scene: Reading) -> None:
    shards = scene.take("a", 2)
    content = json.loads(scene.checkpoint())
    assert content["dataset_name"] == "d"
    assert content["doing"] == [list(each) for each in places(shards)]
    assert content["todo"] == [[start, start + 10] for start in range(20, 100, 10)]
    assert (content["epoch"], content["splitter"]) == (1, None)


def test_the_originals_text_is_understood(scene: Reading) -> None:
    text = json.dumps(
        {"dataset_name": "d", "todo": [[60, 70]], "doing": [[0, 10], [30, 32]], "epoch": 1, "splitter": None}
    )
    state = scene.go_back("a", text)
    assert (state.num_todo, state.num_consumed) == (22, 78)
    assert places(scene.take("a", 1) + scene.take("a", 1) + scene.take("a", 1)) == [(0, 10), (30, 32), (60, 70)]
    assert scene.exchange("b", want=1).supply is Supply.WAIT


def test_the_originals_list_of_records_is_kept(scene: Reading) -> None:
    text = json.dumps({"dataset_name": "d", "todo": [[0, 3, [7, 99, 4]]], "doing": [], "epoch": 1, "splitter": None})
    scene.go_back("a", text)
    [shard] = scene.take("a")
    assert shard.indices == (7, 99, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"dataset_name": "d"}', "cannot be read"),
        ('{"dataset_name": "other", "todo": [], "doing": [], "epoch": 1}', "not of 'd'"),
        ('{"dataset_name": "d", "todo": [[0, 101]], "doing": [], "epoch": 1}', "names records 0 to 101"),
        ('{"dataset_name": "d", "todo": [[5, 5]], "doing": [], "epoch": 1}', "names records 5 to 5"),
        ('{"dataset_name": "d", "todo": [], "doing": [], "epoch": 1, "version": 3}', "Update dlrover"),
    ],
)
def test_a_text_that_cannot_be_is_refused(scene: Reading, text: str, words: str) -> None:
    with pytest.raises(Rejected, match=words):
        scene.go_back("a", text)


def test_a_checkpoint_of_another_cut_is_refused(scene: Reading) -> None:
    other = json.loads(scene.checkpoint()) | {"shard_size": 20}
    with pytest.raises(Rejected) as caught:
        scene.go_back("a", json.dumps(other))
    assert caught.value.code == "dataset-differs"


# Bad input.


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"size": 0},
        {"size": -1},
        {"shard_size": 0},
        {"batch_size": 0},
        {"batch_size": 101},
        {"max_errors": -1},
        {"storage": StorageKind.STREAM},
        {"storage": StorageKind.STREAM, "partitions": {"p": 0}, "shuffle": True},
        {"storage": StorageKind.STREAM, "partitions": {"": 0}},
    ],
)
def test_a_dataset_that_cannot_be_is_refused(scene: Reading, wrong: dict[str, object]) -> None:
    with pytest.raises(Rejected):
        scene.register("a", replace(SPEC, **({"name": "x"} | wrong)))  # type: ignore[arg-type]


def test_a_dataset_registered_otherwise_is_refused_and_the_same_is_not(scene: Reading) -> None:
    assert scene.register("b") == scene.state()
    with pytest.raises(Rejected) as caught:
        scene.register("b", replace(SPEC, size=101))
    assert caught.value.code == "dataset-differs"
    assert "size 100 and 101" in str(caught.value)


def test_an_exchange_is_applied_whole_or_not_at_all(scene: Reading) -> None:
    one, two = scene.take("a", 2)
    refused(scene, "unknown-dataset", dataset="nope", want=1)
    refused(scene, "malformed", consumed=(Consumption(one.id, 4), Consumption(one.id, 7)))
    refused(scene, "malformed", consumed=(Consumption(one.id, 0),))
    refused(scene, "malformed", consumed=(Consumption(one.id, 1, -2),))
    refused(scene, "malformed", consumed=(Consumption(one.id, 10),), unused=(one.id,))
    refused(scene, "malformed", unused=(one.id, one.id))
    refused(scene, "stale-lease", consumed=(Consumption(one.id, 5),), failed=(ShardError(999, "x"),))
    refused(scene, "malformed", want=MAX_SHARDS_AT_ONCE + 1)
    refused(scene, "malformed", want=-1)
    assert scene.state().num_consumed == 0
    assert scene.state().num_doing == 20
    assert two


def test_a_replay_gives_the_same_books(scene: Reading) -> None:
    for step, shard in enumerate(scene.take("a", 4), 1):
        scene.consume("a", shard, step=step)
    scene.new_round("a", "b")
    scene.restored("a", 2)
    scene.take("b", 3)
    assert replay(None, scene.journal).job.digest() == scene.job.digest()


def test_records_that_were_consumed_are_progress_of_the_job(scene: Reading) -> None:
    """However the script counts its steps: what was read is not read again."""
    for _ in range(8):
        (shard,) = scene.take("a")
        scene.consume("a", shard)
        die_at_step_ten(scene)
    assert scene.world("a").restart_count == 8


def test_records_that_are_read_again_after_each_restart_are_none(scene: Reading) -> None:
    """A crash loop: the restored model has not seen them."""
    for _ in range(4):
        scene.restored("a", step=9)
        (shard,) = scene.take("a")
        scene.consume("a", shard, step=10)
        die_at_step_ten(scene)
    assert scene.end.reason is ExitReason.RESTART_OVER_LIMIT


def die_at_step_ten(scene: Reading) -> None:
    scene.fail("a", failure(FailureKind.SIGNAL, signal=9), step=10)
    for node in ("a", "b"):
        if scene.job.end is None:
            scene.join(node)
