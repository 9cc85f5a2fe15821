"""Who keeps whose copy, for any number of nodes on any hosts and racks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.core.checkpoints.placement import Spot, place_copies, place_groups
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import NodeId, Round
from dlrover.protocol.messages.peers import AskPeers, Peers
from tests.core.scene import Scene, terms


@st.composite
def spots(draw):
    """1 to 64 nodes on hosts in racks below switches; a host is in one place."""
    hosts = [
        Spot(
            f"host-{number}",
            draw(st.sampled_from([(), ("core", "a"), ("core", "b"), ("other", "c")])),
            draw(st.integers(-1, 2)),
        )
        for number in range(draw(st.integers(1, 64)))
    ]
    return draw(st.lists(st.sampled_from(hosts), min_size=1, max_size=64))


@given(spots(), st.integers(0, 8))
def test_copies_are_elsewhere_and_as_many_as_there_can_be(nodes, copies):
    keepers = place_copies(nodes, copies)
    assert len(keepers) == len(nodes)
    for position, chosen in enumerate(keepers):
        assert len(chosen) == len(set(chosen)) == min(copies, len(nodes) - 1)
        assert position not in chosen


@given(spots(), st.integers(1, 3))
def test_never_the_same_host_while_there_is_another(nodes, copies):
    for position, chosen in enumerate(place_copies(nodes, copies)):
        is_other_there = any(node.host != nodes[position].host for node in nodes)
        assert not is_other_there or nodes[chosen[0]].host != nodes[position].host


@given(spots(), st.integers(1, 3))
def test_nobody_keeps_more_than_it_gives_unless_one_host_has_most_nodes(nodes, copies):
    keepers = place_copies(nodes, copies)
    kept = Counter(keeper for chosen in keepers for keeper in chosen)
    largest = max(Counter(node.host for node in nodes).values())
    if 2 * largest <= len(nodes):
        assert set(kept.values()) == {min(copies, len(nodes) - 1)}


@given(st.integers(2, 8), st.integers(1, 8))
def test_racks_keep_each_others_copies(num_racks, per_rack):
    nodes = [Spot(f"host-{rack}-{each}", group=rack) for each in range(per_rack) for rack in range(num_racks)]
    for position, chosen in enumerate(place_copies(nodes, 1)):
        assert nodes[chosen[0]].group != nodes[position].group


def test_a_second_copy_is_in_a_third_rack():
    nodes = [Spot(f"host-{number}", group=number // 2) for number in range(6)]
    for position, chosen in enumerate(place_copies(nodes, 2)):
        assert len({nodes[each].group for each in (position, *chosen)}) == 3


@given(spots(), st.integers(1, 8), st.integers(1, 3))
def test_everybody_is_in_one_parity_group_of_at_least_the_size(nodes, num_data, num_parity):
    groups = place_groups(nodes, num_data, num_parity)
    members = sorted(position for group in groups for position in group)
    size = num_data + num_parity
    assert members == (list(range(len(nodes))) if len(nodes) >= size else [])
    assert all(len(group) >= size for group in groups)


@given(st.integers(1, 4), st.integers(2, 8))
def test_nodes_of_one_host_are_in_different_groups_where_there_are_enough(per_host, num_hosts):
    nodes = [Spot(f"host-{number % num_hosts}") for number in range(per_host * num_hosts)]
    for group in place_groups(nodes, num_hosts - 1, 1):
        hosts = [nodes[position].host for position in group]
        assert len(set(hosts)) == len(hosts)


def world_of(count: int) -> Scene:
    scene = Scene()
    the_terms = terms(count)
    for number in range(count):
        scene.attach(f"n{number}", terms=the_terms, peer=f"10.0.0.{number}:1")
    for number in range(count):
        scene.join(f"n{number}")
    return scene


def test_the_master_names_keepers_and_neighbours_of_a_member():
    scene = world_of(3)
    nodes = sorted(scene.job.state.nodes.live)
    answer = scene.job.ask(AskPeers(node=nodes[0], round=Round(1), copies=1, num_data=2, num_parity=1))
    assert isinstance(answer, Peers)
    assert [peer.node for peer in answer.neighbours] == nodes[1:]
    assert [peer.node for peer in answer.keepers] == [nodes[1]]
    assert [peer.node for peer in answer.group] == nodes
    assert answer.neighbours[0].address == "10.0.0.1:1"


@pytest.mark.parametrize(
    ("question", "code"),
    [
        (AskPeers(node=NodeId(1), round=Round(9)), "stale-round"),
        (AskPeers(node=NodeId(99), round=Round(1)), "no-member"),
        (AskPeers(node=NodeId(1), round=Round(1), copies=1000), "malformed"),
        (AskPeers(node=NodeId(1), round=Round(1), num_data=40, num_parity=1), "malformed"),
    ],
)
def test_the_master_refuses_questions_of_strangers_and_of_other_rounds(question, code):
    scene = world_of(2)
    with pytest.raises(Rejected) as refused:
        scene.job.ask(question)
    assert refused.value.code == code


def test_the_answer_does_not_grow_with_the_world():
    scene = world_of(100)
    node = min(scene.job.state.nodes.live)
    answer = scene.job.ask(AskPeers(node=node, round=Round(1), copies=2))
    assert isinstance(answer, Peers)
    assert len(answer.neighbours) == 64
    assert len(answer.keepers) == 2
    assert answer.num_members == 100
