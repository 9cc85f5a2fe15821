"""The last number and the longest name that a dataset may have, and the first that it may not."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.core.data.rules import LARGEST, check_partitions, check_spec
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import (
    MAX_NAME_BYTES,
    MAX_PARTITIONS,
    MAX_STATE_BYTES,
    DatasetSpec,
    RestoreAgreed,
    StorageKind,
)
from dlrover.protocol.messages.job import Round
from tests.core.scene import Scene, terms

STREAM: dict[str, Any] = {"storage": StorageKind.STREAM, "size": -1, "partitions": {"p": 0}}


def spec(**details: Any) -> DatasetSpec:
    return DatasetSpec(**{"name": "d", "size": 10, "shard_size": 1, "batch_size": 1} | details)


@pytest.mark.parametrize(
    "details",
    [
        {"name": "é" * (MAX_NAME_BYTES // 2)},
        {"fingerprint": "f" * MAX_NAME_BYTES},
        {"size": LARGEST - 1, "num_epochs": 1},
        {"size": 1},
        {"shard_size": LARGEST - 1},
        {"max_errors": LARGEST - 1},
        {"seed": 2**63 - 1},
        {"lease": 999_999_999.0},
        {"num_epochs": 1 - LARGEST},
        {"size": 2**52, "num_epochs": 2047},
        STREAM | {"size": LARGEST - 1},
        STREAM | {"partitions": {str(part): 0 for part in range(MAX_PARTITIONS)}},
        STREAM | {"partitions": {"p" * MAX_NAME_BYTES: LARGEST - 1}},
    ],
)
def test_what_a_dataset_may_be(details: dict[str, Any]) -> None:
    check_spec(spec(**details))


@pytest.mark.parametrize(
    "details",
    [
        {"name": ""},
        {"name": "é" * (MAX_NAME_BYTES // 2) + "x"},
        {"fingerprint": "f" * (MAX_NAME_BYTES + 1)},
        {"size": LARGEST},
        {"size": 0},
        {"shard_size": LARGEST},
        {"batch_size": 0},
        {"max_errors": LARGEST},
        {"max_errors": -1},
        {"seed": 2**63},
        {"lease": 1e9},
        {"lease": -0.1},
        {"num_epochs": LARGEST},
        {"size": 2**52, "num_epochs": 2048},
        STREAM | {"size": LARGEST},
        STREAM | {"size": -2},
        STREAM | {"partitions": {str(part): 0 for part in range(MAX_PARTITIONS + 1)}},
        STREAM | {"partitions": {"p" * (MAX_NAME_BYTES + 1): 0}},
        STREAM | {"partitions": {"p": LARGEST}},
        STREAM | {"partitions": {"p": -1}},
        STREAM | {"partitions": {"": 0}},
    ],
)
def test_what_no_dataset_can_be(details: dict[str, Any]) -> None:
    with pytest.raises(Rejected):
        check_spec(spec(**details))


def test_partitions_that_are_added_have_the_same_limits() -> None:
    check_partitions({"p" * MAX_NAME_BYTES: 0})
    with pytest.raises(Rejected):
        check_partitions({"p": LARGEST})


@pytest.mark.parametrize(
    ("details", "is_taken"),
    [
        ({"step": -1}, True),
        ({"step": -2}, False),
        ({"step": LARGEST - 1}, True),
        ({"step": LARGEST}, False),
        ({"step": 0, "data_state": "x" * (MAX_STATE_BYTES + 1)}, False),
        ({"step": 0, "data_state": "x" * MAX_STATE_BYTES}, True),
    ],
)
def test_steps_and_states_that_a_model_can_return_to(details: dict[str, Any], is_taken: bool) -> None:
    scene = Scene(terms(1))
    scene.attach("a")
    scene.join("a")
    agent = scene.agents["a"]
    command = RestoreAgreed(node=agent.node, incarnation=agent.incarnation, round=Round(1), **details)
    if is_taken:
        scene.send("a", command)
    else:
        with pytest.raises(Rejected):
            scene.send("a", command)
