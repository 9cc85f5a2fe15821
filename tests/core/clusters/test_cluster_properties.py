"""
Whole jobs with parameter servers, drawn at random: servers, chiefs, workers and masters are lost, servers are scaled, the chief saves or not.

The model is played beside the core: a list of the records that were trained into it. Whatever happens, the model that trains in the end has each
record of the dataset once, as long as every update is reported before the next cut is taken.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.cluster import (
    AskCluster,
    ClusterPhase,
    CutTaken,
    ModelRestored,
    ModelSaved,
    ProcessParked,
    ServerBound,
    TakeCut,
    VersionView,
)
from dlrover.protocol.messages.data import Consumption, DatasetSpec, ExchangeShards, RegisterDataset, ShardsGiven
from dlrover.protocol.messages.fleet import NodeType, ScaleReplicas, Strategy
from dlrover.protocol.messages.job import FailureKind, ReportFailure, Run
from tests.core.fleet.fleet_scene import FleetScene, ps_job
from tests.core.scene import failure, terms

SIZE = 200
P = ClusterPhase


class PlayedJob:
    """A job whose processes do what they are asked for, one thing at a time."""

    def __init__(self, has_coordinator: bool = False) -> None:
        """`has_coordinator`: the chief hands out all work, so that nothing goes on without it."""
        self.has_coordinator = has_coordinator
        self.scene = FleetScene(replace(terms(1), strategy=Strategy.PS))
        self.scene.begin(ps_job(num_workers=3, num_ps=2)).run()
        self.model: list[int] = []
        self.checkpoint: tuple[list[int], CutTaken, int] | None = None
        self.leases: dict[str, list[Any]] = {}
        self.rounds: dict[str, int] = {}
        self.come()

    def come(self) -> None:
        """Nodes that the platform has brought run, and their agents attach."""
        scene = self.scene
        for node in sorted(scene.cloud):
            if scene.phase(node).value == "Pending":
                scene.run(node)
            if f"n{node}" not in scene.agents and scene.node(node).is_live:
                scene.attach(f"n{node}")
        for name in [name for name in scene.agents if int(name[1:]) not in scene.cloud]:
            del scene.agents[name]

    @property
    def view(self) -> VersionView:
        answer = self.scene.job.ask(AskCluster())
        assert isinstance(answer, VersionView)
        return answer

    def names(self, *kinds: NodeType) -> list[str]:
        nodes = {name: self.scene.node(int(name[1:])) for name in self.scene.agents}
        running = [name for name in nodes if isinstance(self.scene.wish(name), Run)]
        return [name for name in running if nodes[name].node_type in kinds]

    def tell(self, name: str, command: Any) -> Any:
        agent, task = self.scene.agents[name], self.scene.world(name)
        named = replace(command, node=agent.node, incarnation=agent.incarnation, round=task.round)
        return self.scene.send(name, named).reply

    def fail(self, name: str) -> None:
        agent, task = self.scene.agents[name], self.scene.world(name)
        report = ReportFailure(
            node=agent.node,
            incarnation=agent.incarnation,
            round=task.round,
            failures=(failure(FailureKind.SIGNAL),),
            lived=99.0,
        )
        self.scene.send(name, report)

    def save(self, chief: str) -> None:
        taken = self.tell(chief, TakeCut())
        assert isinstance(taken, CutTaken)
        self.checkpoint = list(self.model), taken, len(self.model)
        self.tell(chief, ModelSaved(step=len(self.model), cut=taken.cut))

    def step(self) -> None:
        """Let the cluster go on by one thing."""
        self.come()
        unbound = [
            name
            for name in self.names(*NodeType)
            if not self.scene.job.state.cluster.processes[self.scene.agents[name].node].is_bound  # type: ignore[union-attr]
        ]
        chiefs = self.names(NodeType.CHIEF)
        if unbound:
            coordinates = self.has_coordinator and unbound[0] in chiefs
            address = f"{unbound[0]}:{self.scene.world(unbound[0]).round}"
            self.tell(unbound[0], ServerBound(address=address, is_coordinator=coordinates))
        elif self.view.phase is P.RESTORING and chiefs:
            self.restore(chiefs[0])
        elif self.view.phase is P.PARKING:
            for name in self.names(NodeType.CHIEF, NodeType.WORKER):
                self.tell(name, ProcessParked(step=len(self.model)))
        elif self.view.phase is P.SAVING and chiefs:
            self.save(chiefs[0])

    def restore(self, chief: str) -> None:
        if self.checkpoint is None:
            self.model = []
            self.tell(chief, ModelRestored(step=-1))
        else:
            model, taken, step = self.checkpoint
            self.model = list(model)
            self.tell(chief, ModelRestored(step=step, cut=taken.cut, data_state=taken.data_state))

    def read(self, name: str) -> None:
        """Take a shard, train on it, report it: or end in between, if the process is lost."""
        spec = DatasetSpec(name="clicks", size=SIZE, shard_size=10, batch_size=5)
        self.tell(name, RegisterDataset(dataset="clicks", spec=spec))
        given_ = self.tell(name, ExchangeShards(dataset="clicks", want=1))
        assert isinstance(given_, ShardsGiven)
        for shard in given_.shards:
            self.model += range(shard.start, shard.end)
            self.tell(
                name, ExchangeShards(dataset="clicks", consumed=(Consumption(shard.id, shard.end - shard.start, 1),))
            )

    @property
    def is_read(self) -> bool:
        dataset = self.scene.job.state.data.datasets.get("clicks")
        return dataset is not None and dataset.is_complete


_FAULTS = ("ps", "chief", "worker", "node", "master", "scale")
_KINDS = ("read", "read", "read", "step", "step", "save", "time", *_FAULTS)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 1000)), max_size=80), st.booleans())
def test_the_final_model_has_each_record_once_whatever_is_lost(
    events: list[tuple[str, int]], has_coordinator: bool
) -> None:
    play(events, has_coordinator)


def play(events: list[tuple[str, int]], has_coordinator: bool) -> None:
    job = PlayedJob(has_coordinator)
    for event, pick in events:
        if job.scene.job.end is not None:
            return  # more failures than a rank may have
        disturb(job, event, pick)
    for _ in range(600):
        if job.scene.job.end is not None:
            return
        job.step()
        if job.view.phase is P.TRAINING and job.is_read:
            break
        if job.view.phase is P.TRAINING:
            for name in job.names(NodeType.WORKER, NodeType.CHIEF)[:1]:
                job.read(name)
    assert job.view.phase is P.TRAINING, f"stuck in {job.view.phase}"
    assert job.is_read
    assert Counter(job.model) == Counter(range(SIZE))


def disturb(job: PlayedJob, event: str, pick: int) -> None:
    kinds = {"ps": NodeType.PS, "chief": NodeType.CHIEF, "worker": NodeType.WORKER}
    scene = job.scene
    try:
        if event == "read" and job.view.phase is P.TRAINING:
            readers = job.names(NodeType.WORKER, NodeType.CHIEF)
            if readers:
                job.read(readers[pick % len(readers)])
        elif event == "save" and job.view.phase is P.TRAINING and job.names(NodeType.CHIEF):
            job.save(job.names(NodeType.CHIEF)[0])
        elif event == "step":
            job.step()
        elif event in kinds:
            found = job.names(kinds[event])
            if found:
                job.fail(found[pick % len(found)])
        elif event == "node":
            nodes = [node for node in sorted(scene.cloud) if scene.node(node).is_live]
            if nodes:
                scene.vanish(nodes[pick % len(nodes)])
        elif event == "master":
            scene.restart_master()
            scene.list()
            for name in list(scene.agents):
                if int(name[1:]) in scene.cloud:
                    scene.attach(name)
        elif event == "scale":
            scene.do(ScaleReplicas(node_type=NodeType.PS, count=1 + pick % 3))
        elif event == "time":
            scene.tick(scene.now / 1e6 + pick % 40)
    except Rejected:
        pass  # a process or node that is not there any more


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_faults() -> None:
    """Design 15.11, with the played jobs of this file: every phase has a way out, and no record is lost or read twice."""
    num_faults, seed = 0, 0
    while num_faults < 100_000:
        seed += 1
        draw = random.Random(seed)
        events = [(draw.choice(_KINDS), draw.randrange(1000)) for _ in range(draw.randrange(10, 120))]
        num_faults += sum(event in _FAULTS for event, _ in events)
        play(events, has_coordinator=seed % 2 == 0)
