"""On which machine of a Ray cluster a node goes, and the sentence for one that fits nowhere. Needs no Ray."""

from __future__ import annotations

import pytest

from dlrover.platforms.ray.placement import (
    AutoscalerState,
    ClusterMachine,
    Placement,
    choose,
    demand_of,
    outlook_of,
    room_for,
)
from dlrover.protocol.messages.fleet import Resource


def machine(
    name: str, *, cpu: float = 4.0, free: float | None = None, gpu: float = 0.0, drained_at: float | None = None
):
    total = {"CPU": cpu, "GPU": gpu}
    return ClusterMachine(
        id=f"id-{name}",
        host=name,
        total=total,
        free={"CPU": cpu if free is None else free, "GPU": gpu},
        drained_at=drained_at,
    )


def chosen(machines, demand, *, on=None, avoid=(), placement=Placement.SPREAD):
    return choose(machines, demand, num_nodes_on=on or {}, avoid=avoid, placement=placement)


def test_nodes_are_spread_while_machines_are_free():
    machines = [machine("a"), machine("b")]
    assert chosen(machines, {"CPU": 1.0}, on={"id-a": 1}).machine == "id-b"
    assert chosen(machines, {"CPU": 1.0}, on={"id-a": 1, "id-b": 1}).machine == "id-a"


def test_packed_nodes_share_a_machine():
    assert (
        chosen([machine("a"), machine("b")], {"CPU": 1.0}, on={"id-b": 1}, placement=Placement.PACK).machine == "id-b"
    )


def test_a_strict_spread_never_puts_two_nodes_on_one_machine_nor_leaves_that_to_ray():
    choice = chosen([machine("a")], {"CPU": 1.0}, on={"id-a": 1}, placement=Placement.STRICT_SPREAD)
    assert (choice.machine, choice.may_queue) == ("", False)
    assert "already runs a node of this job" in choice.sentence


def test_avoided_and_drained_machines_get_no_node():
    machines = [machine("a"), machine("b", drained_at=1.0), machine("c")]
    assert chosen(machines, {"CPU": 1.0}, avoid=("a",)).machine == "id-c"
    assert chosen(machines[:2], {"CPU": 1.0}, avoid=("a",)).machine == ""


def test_the_sentence_names_what_is_missing():
    choice = chosen([machine("a", free=1.0), machine("b", free=2.5)], {"CPU": 3.0})
    assert choice.sentence == "It asks for 3 CPU. The most that a machine has free is 2.5 CPU (b)."
    assert choice.may_queue


def test_the_sentence_says_when_no_machine_is_large_enough():
    assert "No machine is large enough even when idle: at most 4 CPU" in chosen([machine("a")], {"CPU": 8.0}).sentence
    assert "The cluster has no machine" in chosen([], {"CPU": 1.0}).sentence


@pytest.mark.parametrize(
    ("resource", "extra", "demand"),
    [
        (Resource(), {}, {"CPU": 1.0}),
        (Resource(gpus=2), {}, {"GPU": 2.0}),
        (Resource(cpu=0.5, memory_mb=2), {"slot": 1.0}, {"CPU": 0.5, "memory": 2.0 * 2**20, "slot": 1.0}),
        (Resource(gpus=1, gpu_type="A100"), {}, {"GPU": 1.0, "accelerator_type:A100": 0.001}),
    ],
)
def test_a_size_becomes_what_ray_is_asked_for(resource, extra, demand):
    assert demand_of(resource, extra) == demand


def test_room_is_counted_by_machine_and_bounded_by_the_capacity():
    machines = [machine("a", free=3.0), machine("b", free=1.9), machine("c", drained_at=0.0)]
    assert room_for(machines, {"CPU": 1.0}, num_living=0, capacity=0).free == 4
    bounded = room_for(machines, {"CPU": 1.0}, num_living=2, capacity=3)
    assert (bounded.free, bounded.reason) == (1, "2 of at most 3 nodes run")
    assert room_for(machines, {"CPU": 9.0}, num_living=0, capacity=0).free == 0


@pytest.mark.parametrize(
    ("autoscaler", "sentence"),
    [
        (None, "The cluster has no autoscaler: the node waits until another job ends or a machine joins."),
        (AutoscalerState(num_pending=0, num_failed=0), "The autoscaler is adding no machine now."),
        (AutoscalerState(num_pending=1, num_failed=0), "The autoscaler is adding 1 machine now."),
        (
            AutoscalerState(num_pending=3, num_failed=2),
            "The autoscaler is adding 3 machines now. 2 of its recent launches failed.",
        ),
        (
            AutoscalerState(num_pending=0, num_failed=1),
            "The autoscaler is adding no machine now. 1 of its recent launches failed.",
        ),
    ],
)
def test_the_autoscaler_in_a_sentence(autoscaler: AutoscalerState | None, sentence: str):
    assert outlook_of(autoscaler) == sentence
