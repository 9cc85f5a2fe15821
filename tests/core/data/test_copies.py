"""Slow workers: what they have not begun is split among the idle, and evaluations are read twice rather than waited for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.data.audit import Audit
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import Consumption, ExchangeShards, LeasedShard, ShardError, Supply, TaskType
from tests.core.data.test_books import SPEC, Reading, places
from tests.core.scene import terms

EVALUATION = replace(SPEC, task_type=TaskType.EVALUATION, size=40, batch_size=2)


def slow_end(task_type: TaskType = TaskType.EVALUATION) -> tuple[Reading, LeasedShard]:
    """Worker b has read three shards in a second each, and a still has its first one after twenty."""
    scene = Reading(terms(2)).begin("a", "b", spec=replace(EVALUATION, task_type=task_type))
    [slow] = scene.take("a")
    scene.exchange("a", consumed=(Consumption(slow.id, 2),))
    for second in range(1, 4):
        [shard] = scene.take("b")
        scene.at(second).consume("b", shard)
    return scene.at(20), slow  # type: ignore[return-value]


def copy_of(scene: Reading) -> LeasedShard:
    [copy] = scene.take("b")
    return copy


def test_an_idle_worker_reads_what_a_slow_one_holds_and_the_quicker_counts() -> None:
    scene, slow = slow_end()
    copy = copy_of(scene)
    assert places([copy]) == [(slow.start + 2, slow.end)], "what was reported is not read again"
    assert scene.state().num_doing == 8
    scene.consume("b", copy)
    assert scene.state().is_complete
    assert scene.state().num_consumed == 40
    assert scene.exchange("b", want=1).supply is Supply.END
    # The slow one may say what it likes of it, and is told.
    given = scene.exchange("a", consumed=(Consumption(slow.id, 6),))
    assert given.recalled == (slow.id,)
    scene.exchange("a", unused=(slow.id,))
    assert scene.state().num_consumed == 40
    with pytest.raises(Rejected):
        scene.exchange("a", consumed=(Consumption(slow.id, 1),))


def test_the_slow_one_may_win() -> None:
    scene, slow = slow_end()
    copy = copy_of(scene)
    scene.exchange("b", consumed=(Consumption(copy.id, 4),))
    scene.exchange("a", consumed=(Consumption(slow.id, 8),))
    assert scene.state().is_complete
    assert scene.state().num_consumed == 40
    scene.exchange("b", consumed=(Consumption(copy.id, 4),))
    assert scene.state().num_consumed == 40
    assert not scene.job.state.data.datasets["d"].outdone


def test_a_shard_is_copied_once_and_only_when_it_is_late() -> None:
    scene, _ = slow_end()
    copy_of(scene)
    assert scene.exchange("b", want=1).supply is Supply.WAIT
    hasty = Reading(terms(2)).begin("a", "b", spec=EVALUATION)
    hasty.take("a")
    for second in range(1, 4):
        [shard] = hasty.take("b")
        hasty.at(second).consume("b", shard)
    assert hasty.exchange("b", want=1).supply is Supply.GIVEN, "three seconds are more than twice one second"
    soon = Reading(terms(2)).begin("a", "b", spec=EVALUATION)
    for second in (10, 20, 30):
        [shard] = soon.take("b")
        soon.at(second).consume("b", shard)
    soon.take("a")
    assert soon.exchange("b", want=1).supply is Supply.WAIT


def test_nothing_for_training_is_read_twice() -> None:
    scene, _ = slow_end(TaskType.TRAINING)
    assert scene.exchange("b", want=1).supply is Supply.WAIT


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_copy_whose_reader_is_gone_leaves_the_other(first: str) -> None:
    scene, slow = slow_end()
    copy = copy_of(scene)
    scene.exchange("b", consumed=(Consumption(copy.id, 4),))
    scene.restart_agent(first)
    assert scene.state().num_todo == 0
    assert scene.state().num_doing == 4
    other = "b" if first == "a" else "a"
    scene.restart_agent(other)
    assert (scene.state().num_todo, scene.state().num_doing) == (4, 0), "what both told is not read again"
    assert slow


def test_a_copy_that_cannot_be_read_is_no_failure_while_another_reads() -> None:
    scene, slow = slow_end()
    copy = copy_of(scene)
    scene.exchange("b", failed=(ShardError(copy.id, "broken"),))
    assert scene.state().num_todo == 0
    scene.exchange("a", failed=(ShardError(slow.id, "broken"),))
    assert scene.state().num_todo == 8


def test_the_audit_counts_copies_once() -> None:
    scene = Reading(terms(2)).begin("a", "b", spec=replace(EVALUATION, size=20))
    audit, datasets = Audit(scene.job.state.data.datasets), scene.job.state.data.datasets
    followed: list[LeasedShard] = []

    def exchange(worker: str, **fields: object) -> None:
        command = ExchangeShards(dataset="d", **(scene.who(worker) | fields))  # type: ignore[arg-type]
        reply = scene.send(worker, command).reply
        audit.follow(command, reply, datasets)
        followed.extend(reply.shards)  # type: ignore[union-attr]

    exchange("a", want=1)
    exchange("b", want=1)
    scene.at(1)
    exchange("b", consumed=(Consumption(followed[1].id, 10),))
    scene.at(20)
    exchange("b", want=1)
    exchange("a", consumed=(Consumption(followed[0].id, 6),))
    exchange("b", consumed=(Consumption(followed[2].id, 10),))
    exchange("a", consumed=(Consumption(followed[0].id, 4),))
    [finding] = audit.findings(datasets)
    assert finding.is_clean
    assert (finding.num_seen, finding.is_complete) == (20, True)


def test_what_is_asked_back_comes_in_halves() -> None:
    scene = Reading(terms(2)).begin("a", "b", spec=replace(SPEC, size=60, batch_size=4))
    for _ in range(3):
        scene.take("a", 5)
    while shards := scene.take("b"):
        scene.consume("b", shards[0])
    [recalled, *_] = scene.exchange("a").recalled
    whole = scene.job.state.data.datasets["d"].held[recalled].range
    scene.exchange("a", unused=(recalled,))
    halves = [*scene.take("b"), *scene.take("b1")]
    assert places(halves) == [(whole.start, whole.start + 8), (whole.start + 8, whole.end)]


def test_what_is_given_back_without_being_asked_stays_whole() -> None:
    scene = Reading(terms(2)).begin("a", "b")
    [shard] = scene.take("a")
    scene.exchange("a", unused=(shard.id,))
    assert places(scene.take("b")) == places([shard])
