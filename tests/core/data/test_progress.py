"""How far the reading is, and what a job is that leaves data unread."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.protocol.messages.data import DatasetSpec, ShardError, StorageKind, TaskType
from dlrover.protocol.messages.job import ExitReason
from tests.core.data.test_books import SPEC, Reading
from tests.core.scene import terms


def read_all(scene: Reading) -> None:
    while shards := scene.take("a"):
        scene.consume("a", shards[0])


def test_the_status_of_a_job_tells_speed_and_rest() -> None:
    scene = Reading(terms(1)).begin("a", spec=replace(SPEC, num_epochs=3))
    for second in range(1, 9):
        [shard] = scene.at(second * 2).take("a")
        scene.consume("a", shard)
    [data] = scene.job.status().datasets
    assert (data.num_consumed, data.num_total, data.num_todo, data.epoch) == (80, 300, 20, 0)
    assert data.speed == pytest.approx(80 / 14)
    assert data.remaining == pytest.approx(220 / data.speed)
    assert data.consumed_at == scene.now


def test_who_tells_steps_and_restores_nothing_does_not_wait() -> None:
    scene = Reading(terms(1)).begin("a")
    for step in range(1, 4):
        [shard] = scene.take("a")
        scene.consume("a", shard, step)


def test_a_model_that_goes_back_is_no_negative_speed() -> None:
    scene = Reading(terms(1)).begin("a")
    for step in range(1, 4):
        [shard] = scene.at(step).take("a")
        scene.consume("a", shard, step)
    scene.new_round("a")
    scene.at(10).restored("a", 1)
    assert (scene.state().speed, scene.state().remaining) == (0.0, None)
    [shard] = scene.at(11).take("a")
    scene.at(12).consume("a", shard, 2)
    assert scene.state().speed == pytest.approx(10.0)


def test_an_endless_dataset_has_no_rest() -> None:
    scene = Reading(terms(1)).begin("a", spec=replace(SPEC, num_epochs=0))
    for second in range(1, 4):
        [shard] = scene.at(second).take("a")
        scene.consume("a", shard)
    assert (scene.state().num_total, scene.state().remaining) == (-1, None)
    scene.finish("a")
    assert scene.end.reason is ExitReason.COMPLETED


def test_a_job_that_read_everything_completes() -> None:
    scene = Reading(terms(1)).begin("a")
    read_all(scene)
    scene.finish("a")
    assert scene.end.reason is ExitReason.COMPLETED
    assert scene.end.message == "The workers of all nodes ended well."


def test_a_job_whose_workers_leave_data_unread_has_failed() -> None:
    scene = Reading(terms(1)).begin("a", spec=replace(SPEC, num_epochs=2))
    [first, second] = scene.take("a", 2)
    scene.consume("a", first)
    assert second
    scene.finish("a")
    assert scene.end.reason is ExitReason.DATA_UNFINISHED
    assert scene.end.exit_code == 1
    assert "190 of 200 records were never reported as done" in scene.end.message


def test_who_stops_early_on_purpose_says_so() -> None:
    scene = Reading(terms(1)).begin("a")
    scene.take("a")
    scene.exchange("a", waived="the loss is low enough")
    scene.finish("a")
    assert scene.end.reason is ExitReason.COMPLETED
    assert "100 records of dataset 'd' were left unread: the loss is low enough." in scene.end.message


def test_a_model_that_goes_back_has_to_read_on_whoever_wanted_to_stop() -> None:
    scene = Reading(terms(1)).begin("a")
    scene.take("a")
    scene.exchange("a", waived="enough")
    scene.new_round("a")
    scene.restored("a", -1)
    scene.finish("a")
    assert scene.end.reason is ExitReason.DATA_UNFINISHED


@pytest.mark.parametrize("is_skipped", [False, True])
def test_data_that_cannot_be_read_are_no_success_unless_they_may_be_skipped(is_skipped: bool) -> None:
    scene = Reading(terms(1)).begin("a", spec=replace(SPEC, is_bad_data_skipped=is_skipped))
    for _ in range(SPEC.max_errors + 1):
        [shard] = scene.take("a")
        scene.exchange("a", failed=(ShardError(shard.id, "broken line 7"),))
    read_all(scene)
    scene.finish("a")
    assert scene.end.reason is (ExitReason.COMPLETED if is_skipped else ExitReason.DATA_UNFINISHED)
    assert "10 records of dataset 'd' could not be read" in scene.end.message
    assert is_skipped or "0 to 9 of epoch 0: broken line 7" in scene.end.message


@pytest.mark.parametrize("is_required", [None, True])
def test_an_evaluation_need_not_be_read_unless_it_is_required(is_required: bool | None) -> None:
    scene = Reading(terms(1)).begin("a")
    scene.register("a", replace(SPEC, name="e", task_type=TaskType.EVALUATION, is_required=is_required))
    read_all(scene)
    scene.finish("a")
    assert scene.end.reason is (ExitReason.DATA_UNFINISHED if is_required else ExitReason.COMPLETED)


def test_a_stream_is_unfinished_only_when_it_has_an_end() -> None:
    spec = DatasetSpec(name="d", size=-1, shard_size=10, storage=StorageKind.STREAM, partitions={"p": 0})
    scene = Reading(terms(1)).begin("a", spec=spec)
    scene.take("a")
    scene.finish("a")
    assert scene.end.reason is ExitReason.COMPLETED
    scene = Reading(terms(1)).begin("a", spec=replace(spec, size=25))
    scene.take("a")
    scene.finish("a")
    assert "25 of 25 records" in scene.end.message
