"""Which snapshots in memory make a checkpoint, and the largest numbers and names that are taken."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.core.checkpoints import break_points
from dlrover.core.checkpoints.peer_directory import LARGEST_GROUP, MOST_COPIES, PeerDirectory
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import (
    MAX_NAME_CHARS,
    MAX_PATH_CHARS,
    MAX_SHARDS,
    HeldSnapshot,
    SnapshotsHeld,
)
from dlrover.protocol.messages.job import NodeId, Round
from dlrover.protocol.messages.peers import AskPeers
from tests.core.scene import Scene, terms

HELD = HeldSnapshot(directory="/d", attempt="a", step=5, shard=0, num_shards=1, round=Round(1))


def held(**details: Any) -> HeldSnapshot:
    return replace(HELD, **details)


def newest(*snapshots: HeldSnapshot) -> tuple[int, str]:
    ((sample, _),) = break_points.choose({NodeId(1): snapshots}).values()
    return sample.step, sample.attempt


def test_the_newest_round_counts_first_and_then_the_step() -> None:
    old, new = held(attempt="old", step=9, round=Round(1)), held(attempt="new", step=3, round=Round(2))
    assert newest(old, new) == newest(new, old) == (3, "new")
    low, high = held(attempt="low", step=3), held(attempt="high", step=9)
    assert newest(low, high) == newest(high, low) == (9, "high")
    assert newest(held(attempt="x"), held(attempt="y")) == (5, "x"), "of equals the first"


def a_world(num_nodes: int = 2) -> Scene:
    names = "abcdefgh"[:num_nodes]
    scene = Scene(terms(num_nodes))
    for name in names:
        scene.attach(name)
    for name in names:
        scene.join(name)
    return scene


def tell(scene: Scene, *snapshots: HeldSnapshot, round_: int = 1) -> None:
    agent = scene.agents["a"]
    scene.send("a", SnapshotsHeld(node=agent.node, incarnation=agent.incarnation, round=Round(round_), held=snapshots))


@pytest.mark.parametrize(
    "snapshot",
    [
        held(directory="d"),
        held(directory="d" * MAX_PATH_CHARS),
        held(attempt="k" * MAX_NAME_CHARS),
        held(step=0),
        held(step=2**53),
        held(round=Round(0)),
        held(round=Round(2**53)),
        held(shard=MAX_SHARDS - 1, num_shards=MAX_SHARDS),
    ],
)
def test_what_a_node_may_hold(snapshot: HeldSnapshot) -> None:
    tell(a_world(), snapshot)


@pytest.mark.parametrize(
    "snapshot",
    [
        held(directory=""),
        held(directory="d" * (MAX_PATH_CHARS + 1)),
        held(attempt=""),
        held(attempt="k" * (MAX_NAME_CHARS + 1)),
        held(step=-1),
        held(step=2**53 + 1),
        held(round=Round(-1)),
        held(round=Round(2**53 + 1)),
        held(shard=1),
        held(shard=-1),
        held(num_shards=MAX_SHARDS + 1),
        held(num_shards=0),
    ],
)
def test_what_no_node_can_hold(snapshot: HeldSnapshot) -> None:
    with pytest.raises(Rejected, match="must be at most 4096"):
        tell(a_world(), snapshot)


def test_a_node_holds_at_most_so_many() -> None:
    tell(a_world(), *[HELD] * break_points.MAX_HELD)
    with pytest.raises(Rejected, match="must be at most 4096"):
        tell(a_world(), *[HELD] * (break_points.MAX_HELD + 1))


def test_rounds_of_snapshots() -> None:
    scene = a_world()
    for round_ in (-1, 0, 2):
        with pytest.raises(Rejected, match="have ended"):
            tell(scene, HELD, round_=round_)
    tell(scene, HELD)
    scene.fail("a")
    scene.join("a")
    scene.join("b")
    tell(scene, HELD, round_=2)
    with pytest.raises(Rejected, match="come too late"):
        tell(scene, HELD, round_=1)


class TestPeers:
    def ask(self, **wish: int) -> int:
        scene = a_world()
        agent = scene.agents["a"]
        query = AskPeers(node=agent.node, round=Round(1), **wish)
        return PeerDirectory().answer(query, scene.job.state).num_members

    @pytest.mark.parametrize(
        "wish",
        [
            {"copies": 0},
            {"copies": MOST_COPIES},
            {"copies": 1, "num_data": LARGEST_GROUP - 1, "num_parity": 1},
            {"copies": 1, "num_data": 0, "num_parity": 0},
        ],
    )
    def test_what_may_be_wished(self, wish: dict[str, int]) -> None:
        assert self.ask(**wish) == 2

    @pytest.mark.parametrize(
        "wish",
        [
            {"copies": -1},
            {"copies": MOST_COPIES + 1},
            {"copies": 1, "num_data": LARGEST_GROUP, "num_parity": 1},
            {"copies": 1, "num_data": -1, "num_parity": 2},
            {"copies": 1, "num_data": 2, "num_parity": -1},
        ],
    )
    def test_what_may_not(self, wish: dict[str, int]) -> None:
        with pytest.raises(Rejected, match="at most"):
            self.ask(**wish)
