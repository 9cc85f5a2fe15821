"""What `dlrover status` shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dlrover.cli.node_names import find_node
from dlrover.cli.show.status import show
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.checkpoint import CheckpointStatus, CheckpointTrouble, CommittedCheckpoint
from dlrover.protocol.messages.cluster import ClusterPhase, VersionView
from dlrover.protocol.messages.data import DatasetSpec, DatasetState
from dlrover.protocol.messages.fleet import FleetNodeStatus, NodeExit, NodePhase, NodeType
from dlrover.protocol.messages.job import (
    Incarnation,
    JobStatus,
    LeftOut,
    Micros,
    NodeId,
    NodeRank,
    NodeStatus,
    PlatformId,
    Round,
    Stage,
)

FLEET = (
    FleetNodeStatus(
        id=PlatformId(4),
        node_type=NodeType.PS,
        rank=1,
        name="gpt-ps-4",
        phase=NodePhase.FAILED,
        host="cloud",
        exit_reason=NodeExit.OOM,
        message="took [64] MB",
        num_relaunches=2,
        num_evictions=5,
        max_relaunches=3,
        is_released=True,
    ),
    FleetNodeStatus(id=PlatformId(7), node_type=NodeType.WORKER, rank=0, name="gpt-worker-7", phase=NodePhase.PENDING),
)


def a_status(**details: object) -> JobStatus:
    fields: dict[str, object] = {
        "job_name": "gpt",
        "stage": Stage.RUNNING,
        "master_epoch": 1,
        "round": Round(3),
        "world_size": 4,
        "num_restarts": 2,
        "verdict": "2 of [2] nodes start",
        "nodes": (
            NodeStatus(
                node=NodeId(1),
                node_rank=NodeRank(0),
                incarnation=Incarnation(1),
                host="here",
                status="alive",
                wish="run",
            ),
        ),
    }
    return JobStatus(**(fields | details))  # type: ignore[arg-type]


def shown(*, width: int = 160, **details: object) -> str:
    output = io.StringIO()
    show(a_status(**details), Console(file=output, width=width))
    return output.getvalue()


def test_a_master_that_cannot_write_its_journal_is_the_reason_and_not_what_was_decided_before() -> None:
    text = shown(blocked="The master cannot write its journal.")
    assert "job gpt: blocked (running), round 3" in text
    assert "because: The master cannot write its journal.\n" in text
    assert "nodes start" not in text


def test_a_job_by_hand_shows_no_platform() -> None:
    text = shown()
    assert "job gpt: running, round 3, 4 workers, 2 restarts" in text
    assert "because: 2 of [2] nodes start" in text
    assert "platform" not in text


@pytest.mark.parametrize(("status", "name"), [("alive", "worker-3"), ("standby", "standby-3"), ("gone", "worker-3")])
def test_a_node_is_shown_by_the_name_that_commands_take(status: str, name: str) -> None:
    node = NodeStatus(
        node=NodeId(7), node_rank=NodeRank(3), incarnation=Incarnation(2), host="here", status=status, wish="wait"
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(nodes=(node,)).splitlines()]
    assert [name, "7", "2"] in [row[:3] for row in rows]
    assert find_node(a_status(nodes=(node,)), name) is node


def test_nothing_is_wished_of_a_node_that_is_gone() -> None:
    nodes = tuple(
        NodeStatus(
            node=NodeId(number),
            node_rank=NodeRank(number),
            incarnation=Incarnation(1),
            host="h",
            status=word,
            wish="run",
        )
        for number, word in enumerate(("alive", "gone", "left"))
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(nodes=nodes).splitlines()]
    assert [row[4:6] for row in rows if row] == [["alive", "run"], ["gone", ""], ["left", ""]]


def test_the_nodes_of_the_platform_are_shown_with_what_became_of_them() -> None:
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown(fleet=FLEET).splitlines()]
    assert ["ps-1", "4", "Failed, let go", "2 of 3, 5 free", "OOMKilled", "cloud", "took [64] MB"] in rows
    assert ["worker-0", "7", "Pending", "0 of 0", "", "", ""] in rows


def test_nodes_that_had_no_room_in_the_message_are_counted() -> None:
    text = shown(fleet=FLEET, left_out=LeftOut(nodes={"alive": 8000, "standby": 12}, fleet={"Running": 9000}))
    assert "and 8012 more nodes: 8000 alive, 12 standby" in text
    assert "and 9000 more platform nodes: 9000 Running" in text
    assert " more " not in shown(fleet=FLEET)


def test_a_narrow_terminal_hides_nothing() -> None:
    text = shown(width=60, fleet=FLEET, verdict="because of " + "this and " * 20 + "that")
    assert "…" not in text
    assert "this and that" in text, "a sentence is left to the terminal to break"


def test_how_often_a_job_was_scaled_is_said_in_words() -> None:
    assert "(scaled once)" in shown(limits_version=1)
    assert "(scaled 2 times)" in shown(limits_version=2)


def test_why_the_job_waits_for_its_platform_is_said() -> None:
    assert "waits for the platform: 1 worker is missing" in shown(fleet=FLEET, shortage="1 worker is missing")


def test_a_job_that_does_not_save_says_nothing_of_checkpoints() -> None:
    assert "checkpoint" not in shown()


def test_checkpoints_are_shown_with_their_age_and_the_last_trouble() -> None:
    checkpoints = CheckpointStatus(
        snapshot_step=120,
        copied_step=118,
        committed=(CommittedCheckpoint(directory="/shared/run", step=100, at=Micros(40_000_000)),),
        num_under_way=1,
        trouble=CheckpointTrouble(
            reason="[Errno 28] No space left", step=110, directory="/shared/run", host="here", at=Micros(0), count=3
        ),
    )
    text = shown(checkpoints=checkpoints, now=Micros(100_000_000))
    assert "snapshot in memory: step 120" in text
    assert "copied to other nodes: step 118, 2 steps behind" in text
    assert "checkpoint: step 100 in /shared/run, 60 s ago" in text
    assert "checkpoints being written: 1" in text
    assert "step 110 in /shared/run on here, 100 s ago, 3 times in a row: [Errno 28] No space left" in text
    assert "2 h 1 min ago" in shown(checkpoints=checkpoints, now=Micros((7260 + 40) * 1_000_000))


def test_the_reading_of_data_is_shown() -> None:
    data = DatasetState(
        spec=DatasetSpec(name="clicks", size=500, shard_size=10, num_epochs=2),
        epoch=1,
        num_shards=50,
        num_todo=360,
        num_doing=20,
        num_consumed=620,
        num_committed=600,
        num_total=1000,
        num_readers=2,
        speed=2.0,
        remaining=190.0,
        consumed_at=Micros(70_000_000),
        set_aside=("records 0 to 10 of epoch 0: broken",),
    )
    text = " ".join(shown(datasets=(data,), now=Micros(75_000_000)).split())
    assert "data clicks (training): epoch 2 of 2, 620 of 1000 (62 %) records read, 2 records/s, 5 s ago" in text
    assert "about 3 min left, 20 being read by 2 workers" in text
    assert "UNREADABLE, skipped: records 0 to 10 of epoch 0: broken" in text


def test_nodes_of_a_parameter_server_job_are_called_by_type_and_rank() -> None:
    nodes = tuple(
        NodeStatus(
            node=NodeId(number),
            node_rank=NodeRank(number),
            incarnation=Incarnation(1),
            host="here",
            status="alive",
            wish="run",
            slot=slot,
        )
        for number, slot in enumerate(("chief-0", "ps-1", "worker-0"))
    )
    view = VersionView(version=3, phase=ClusterPhase.TRAINING, servers=("a:1", "b:2"), restored_step=40, saved_step=60)
    status = a_status(nodes=nodes, cluster=view, fleet=())
    output = io.StringIO()
    show(status, Console(file=output, width=200))
    for slot in ("chief-0", "ps-1", "worker-0"):
        assert slot in output.getvalue()
    assert "worker-1" not in output.getvalue(), "the place of an agent is no rank"
    assert (
        "cluster: version 3, training, 2 parameter servers, started from step 40, step 60 is saved" in output.getvalue()
    )
    assert find_node(status, "ps-1").node == 1
    assert find_node(status, "worker-0").node == 2
    with pytest.raises(ConfigError, match="no such node"):
        find_node(status, "worker-1")
