"""The audit counts by itself: it agrees with books that are right, and finds what is wrong in books that are not."""

from __future__ import annotations

import json
import random

import pytest
from msgspec.structs import replace

from dlrover.core.commit_order import walk
from dlrover.core.data.audit import Audit, AuditFinding
from dlrover.core.job import Job
from dlrover.protocol.messages.data import Claim, Consumption, DatasetSpec, ExchangeShards, LeasedShard, StorageKind
from dlrover.protocol.messages.job import RestartPolicy
from tests.core.data.test_books import SPEC, Reading
from tests.core.scene import terms


def audited(scene: Reading, *, skip: int = 0) -> AuditFinding:
    """Of the journal, or of its rest after so many records."""
    job = Job()
    records = list(scene.journal)
    for _ in walk(job, records[:skip]):
        pass
    audit = Audit(job.state.data.datasets)
    for step in walk(job, records[skip:]):
        audit.follow(step.record.command, step.outcome.reply, job.state.data.datasets)
    [finding] = audit.findings(job.state.data.datasets)
    return finding


def train(scene: Reading, seed: int, num_steps: int = 40) -> None:
    """Workers read, step by step, and now and then everything crashes and goes back."""
    chance = random.Random(seed)
    step, queues = 0, dict.fromkeys(("a0", "a1", "b0", "b1"), ())
    done: dict[int, int] = {}
    for _ in range(num_steps):
        if chance.random() < 0.15:
            scene.new_round("a", "b")
            step = chance.randint(max(0, step - 3), step)
            scene.restored("a", step)
            queues = dict.fromkeys(queues, ())
            continue
        step += 1
        for worker, queue in queues.items():
            shards = list(queue)
            if not shards:
                shards = scene.take(worker, chance.randint(1, 3))
            if shards:
                shard = shards[0]
                count = min(chance.randint(1, 8), shard.end - shard.start - done.get(shard.id, 0))
                scene.consume(worker, shard, step=step, count=count)
                done[shard.id] = done.get(shard.id, 0) + count
                if done[shard.id] == shard.end - shard.start:
                    shards.pop(0)
            queues[worker] = tuple(shards)


def finish(scene: Reading) -> None:
    scene.new_round("a", "b")
    scene.restored("a", 10**6)
    while shards := scene.take("a", 4):
        for shard in shards:
            scene.consume("a", shard, step=10**6)


@pytest.mark.parametrize("seed", range(12))
def test_a_job_that_crashed_and_went_back_is_clean(seed: int) -> None:
    spec = DatasetSpec(name="d", size=97, shard_size=10, num_epochs=2, shuffle=seed % 2 == 0)
    scene = Reading(terms(2, restarts=RestartPolicy(max_restarts=1000))).begin("a", "b", spec=spec)
    train(scene, seed)
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert finding.is_complete
    assert (finding.num_seen, finding.num_owed) == (194, 194)


def test_what_was_read_before_the_journal_is_taken_on_trust() -> None:
    scene = Reading(terms(2)).begin("a", "b")
    [one] = scene.take("a")
    scene.consume("a", one)
    middle = len(scene.journal)
    finish(scene)
    finding = audited(scene, skip=middle)
    assert finding.is_clean, finding
    assert (finding.num_trusted, finding.num_seen) == (10, 90)


def test_a_job_in_the_middle_is_clean_as_well() -> None:
    scene = Reading(terms(2)).begin("a", "b")
    one, two = scene.take("a", 2)
    scene.consume("a", one, step=1)
    scene.consume("a", two, step=2, count=3)
    finding = audited(scene)
    assert finding.is_clean
    assert not finding.is_complete
    assert finding.num_seen == 13


def test_claims_count(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.new_round("a", "b")
    scene.restored("a", 7, claims={"d": (Claim(0, shard.start, shard.start + 4, 7),)})
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean
    assert finding.num_seen == 100


def test_of_a_claim_that_was_told_in_part_the_rest_counts(scene: Reading) -> None:
    [shard] = scene.take("a")
    scene.consume("a", shard, step=5, count=2)
    scene.new_round("a", "b")
    scene.restored("a", 7, claims={"d": (Claim(0, shard.start, shard.start + 4, 7),)})
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert finding.num_seen == 100


def test_a_return_to_a_checkpoint_counts_from_there(scene: Reading) -> None:
    for shard in scene.take("a", 3):
        scene.consume("a", shard)
    text = scene.checkpoint()
    for shard in scene.take("a", 2):
        scene.consume("a", shard)
    scene.go_back("a", text)
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert (finding.num_trusted, finding.num_seen) == (30, 70)


def test_a_stream_that_went_back_counts_from_there() -> None:
    spec = DatasetSpec(name="d", size=60, shard_size=10, storage=StorageKind.STREAM, partitions={"p": 5})
    scene = Reading(terms(2)).begin("a", "b", spec=spec)
    [shard] = scene.take("a")
    scene.consume("a", shard)
    text = scene.checkpoint()
    [shard] = scene.take("a")
    scene.consume("a", shard)
    scene.go_back("a", text)
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert (finding.num_trusted, finding.num_seen) == (10, 50)


def test_a_stream_is_owed_from_where_it_begins() -> None:
    spec = DatasetSpec(name="d", size=60, shard_size=10, storage=StorageKind.STREAM, partitions={"p": 5})
    scene = Reading(terms(2)).begin("a", "b", spec=spec)
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert (finding.num_seen, finding.num_owed) == (60, 60)


def test_lists_of_the_original_are_counted(scene: Reading) -> None:
    text = json.dumps(
        {"dataset_name": "d", "todo": [[0, 3, [7, 99, 4]]], "doing": [[8, 10]], "epoch": 1, "splitter": None}
    )
    scene.go_back("a", text)
    finish(scene)
    finding = audited(scene)
    assert finding.is_clean, finding
    assert finding.num_seen == 5


@pytest.fixture
def scene() -> Reading:
    return Reading(terms(2)).begin("a", "b")


def test_books_that_gave_a_record_twice_are_found_out(scene: Reading) -> None:
    shards = scene.take("a", 3)
    for shard in shards:
        scene.consume("a", shard)
    job = scene.job
    audit = Audit({})
    for step in walk(Job(), scene.journal):
        audit.follow(step.record.command, step.outcome.reply, job.state.data.datasets)
    again = LeasedShard(99, 0, 5, 15)
    given = replace(scene.exchange("b"), shards=(again,))
    audit.follow(ExchangeShards(dataset="d", want=1), given, job.state.data.datasets)
    audit.follow(ExchangeShards(dataset="d", consumed=(Consumption(99, 10),)), replace(given, shards=()), {})
    [finding] = audit.findings(job.state.data.datasets)
    assert not finding.is_clean
    assert finding.repeated == ("5 to 9 in epoch 0", "10 to 14 in epoch 0")
    assert finding.num_seen == 30


def test_books_that_forgot_a_record_are_found_out(scene: Reading) -> None:
    finish(scene)
    books = scene.job.state.data.datasets["d"]
    audit = Audit({})
    for step in walk(Job(), scene.journal):
        command = step.record.command
        if isinstance(command, ExchangeShards) and command.consumed:
            command = replace(command, consumed=command.consumed[:-1])
        audit.follow(command, step.outcome.reply, scene.job.state.data.datasets)
    [finding] = audit.findings({"d": books})
    assert len(finding.missing) == 1
    assert finding.missing[0].endswith("in epoch 0")
    assert not books.returned
    assert SPEC.size > finding.num_seen
