"""Names of node types as people write them, the former one of the chief included."""

from __future__ import annotations

import msgspec
import pytest

from dlrover.cli.node_types import node_type_of, read_fleet
from dlrover.cli.options.environment import read_environment
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType, ReplicaSpec, Strategy


def test_a_fleet_may_call_its_chief_as_tensorflow_once_did() -> None:
    given = b"""{"replicas": {"master": {"count": 1, "max_relaunches": 2}, "worker": {"count": 2}, "ps": {"count": 1}},
                 "strategy": "ParameterServerStrategy", "group_affinity": {"0": 2}, "pending_timeout": 60}"""
    assert read_fleet(given) == FleetSpec(
        replicas={
            NodeType.CHIEF: ReplicaSpec(count=1, max_relaunches=2),
            NodeType.WORKER: ReplicaSpec(count=2),
            NodeType.PS: ReplicaSpec(count=1),
        },
        strategy=Strategy.PS,
        group_affinity={0: 2},
        pending_timeout=60,
    )


def test_one_chief_under_two_names_is_an_error() -> None:
    with pytest.raises(ConfigError, match="two names of one type"):
        read_fleet(b'{"replicas": {"master": {"count": 1}, "chief": {"count": 1}}}')


@pytest.mark.parametrize("given", [b"[1]", b"{", b"{}", b'{"replicas": [1]}', b'{"replicas": {"moon": {"count": 1}}}'])
def test_what_is_no_fleet_is_refused_as_ever(given: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_fleet(given)


def test_the_environment_may_say_it_too() -> None:
    assert read_environment({"DLROVER_NODE_ID": "2", "NODE_TYPE": "master"}).node_type is NodeType.CHIEF
    with pytest.raises(ConfigError, match="NODE_TYPE=moon"):
        read_environment({"DLROVER_NODE_ID": "2", "NODE_TYPE": "moon"})


def test_every_type_has_its_own_name() -> None:
    assert [node_type_of(node_type.value) for node_type in NodeType] == list(NodeType)
