"""The last value that is taken, and the first that is not; and how many are still at work."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.commit_order import MAX_MESSAGE_BYTES_JOURNALLED, decode_record
from dlrover.core.membership.claims import is_sane
from dlrover.core.membership.nodes import REATTACH_WINDOW, reattach_window
from dlrover.protocol.errors import ErrorCode, Rejected
from dlrover.protocol.messages.job import (
    MAX_JOURNALLED_FAILURE_BYTES,
    Detection,
    NodeRank,
    NodesOrdered,
    ReportFailure,
    Round,
    WorldSpec,
)
from tests.core.scene import Scene, failure, terms

MOST = 65_536
WORLD = WorldSpec(
    round=Round(1),
    group_rank=0,
    group_world_size=2,
    first_global_rank=0,
    local_world_size=1,
    world_size=2,
    coordinator="h:1",
    restart_count=0,
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"group_rank": 1}, True),
        ({"group_rank": 2}, False),
        ({"group_rank": -1}, False),
        ({"group_world_size": MOST}, True),
        ({"group_world_size": MOST + 1}, False),
        ({"local_world_size": 0}, False),
        ({"local_world_size": MOST, "world_size": MOST * 2}, True),
        ({"local_world_size": MOST + 1, "world_size": MOST * 2}, False),
        ({"first_global_rank": 1}, True),
        ({"first_global_rank": 2}, False),
        ({"first_global_rank": -1}, False),
        ({"world_size": MOST * MOST}, True),
        ({"world_size": MOST * MOST + 1}, False),
        ({"coordinator": ""}, False),
        ({"job_age": -0.1}, False),
        ({"job_age": 1e9}, True),
        ({"job_age": 1.1e9}, False),
        ({"turns": ((0, 1),) * 1024}, True),
        ({"turns": ((0, 1),) * 1025}, False),
    ],
)
def test_a_claim_that_can_be(changes: dict[str, Any], expected: bool) -> None:
    assert is_sane(replace(WORLD, **changes), Round(1)) == expected


def test_a_claim_is_of_the_round_that_runs() -> None:
    assert not is_sane(WORLD, Round(2))
    assert not is_sane(replace(WORLD, round=Round(0)), Round(0))


def test_who_may_be_silent_for_longer_may_come_back_later() -> None:
    assert reattach_window(Detection()) == REATTACH_WINDOW
    assert reattach_window(Detection(silence=REATTACH_WINDOW - 5)) == REATTACH_WINDOW
    assert reattach_window(Detection(silence=REATTACH_WINDOW + 5)) == REATTACH_WINDOW + 5


def test_ranks_that_can_be_ordered() -> None:
    scene = Scene(terms(1))
    scene.do(NodesOrdered(ranks=(NodeRank(0), NodeRank(2**53))))
    for rank in (-1, 2**53 + 1):
        with pytest.raises(Rejected):
            scene.do(NodesOrdered(ranks=(NodeRank(rank),)))


def test_names_of_places() -> None:
    Scene(terms(1)).attach("a", place=("p" * 256,) * 8)
    for place in (("p" * 257,), ("p",) * 9):
        with pytest.raises(Rejected):
            Scene(terms(1)).attach("a", place=place)


@pytest.mark.parametrize("more", [0, 1])
def test_what_is_written_down_is_cut_between_letters(more: int) -> None:
    scene = Scene(terms(1))
    scene.attach("a")
    scene.join("a")
    long = "é" * (MAX_MESSAGE_BYTES_JOURNALLED // 2)
    scene.fail("a", failure(message="x" * more + long, traceback="é" * 4000 + "x", log_tail="ü" * 4000 + "x"))
    written = decode_record(scene.journal[-1]).command
    assert isinstance(written, ReportFailure)
    kept = written.failures[0]
    assert kept.message == ("x" + long[:-1] if more else long)
    assert kept.traceback.strip("é") == "x"
    assert kept.log_tail.strip("ü") == "x"
    sizes = [len(text.encode()) for text in (kept.message, kept.traceback, kept.log_tail)]
    assert MAX_JOURNALLED_FAILURE_BYTES - 3 <= sum(sizes) <= MAX_JOURNALLED_FAILURE_BYTES


@pytest.mark.parametrize("field", ["master_epoch", "running_round", "former_rank", "group", "foreign_node"])
def test_an_attach_has_numbers_up_to_a_limit(field: str) -> None:
    Scene(terms(2)).attach("a", **{field: 2**53})
    with pytest.raises(Rejected) as error:
        Scene(terms(2)).attach("a", **{field: 2**53 + 1})
    assert error.value.code is ErrorCode.MALFORMED
