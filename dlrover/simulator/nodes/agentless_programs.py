"""
What runs beside the agents of a job with a fleet: the programs of chiefs, evaluators and parameter servers, which have none.

Chiefs and evaluators work until the training is done, and somewhat longer. The servers serve, and their users switch to
another cluster of them in two phases, as the library in a worker does: they ask with whom to go on, get ready, which takes
a while, and say so. From then on they use the new cluster; until then the old one, so none of it may be taken from them.
"""

from __future__ import annotations

import random

from dlrover.core.job import Job
from dlrover.protocol.messages.fleet import AskPsNodes, NodePhase, NodeType, PsNode, PsNodes, PsReady
from dlrover.protocol.messages.job import Command, Query, Reply
from dlrover.simulator.parts import CloudNode, CloudPart, SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import span

LOOK = (5.0, 40.0)
"""Seconds between two looks of who runs beside: at the servers, and at whether the training is done."""
SWITCH = (0.5, 40.0)
"""Seconds that it takes to save, rebuild and restore for another cluster."""


class AgentlessPrograms:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._chance = random.Random(f"{simulation.plan.seed}/beside")
        self._used: tuple[PsNode, ...] = ()
        """The servers with which the workers work, as they were told."""
        self._version = 0
        """Of the cluster, when they were told."""
        self._cloud: CloudPart | None = None
        self._question: AskPsNodes | None = None
        self._is_switching = False

    def begin(self, cloud: CloudPart) -> None:
        self._cloud = cloud
        if len(cloud.spec.replicas) > 1:
            self._look(cloud)

    def _look(self, cloud: CloudPart) -> None:
        sim = self._sim
        if sim.is_over:
            return
        if self._is_training_done():
            for node in self._at_work():
                cloud.succeed(node)
        master = sim.masters.listening()
        if master is not None and not self._is_switching and sim.ended_at is None and sim.shape.has_servers:
            self._question = AskPsNodes()
            master.hear(self._question)
        sim.events.after(span(self._chance, *LOOK), self._look, cloud)

    def _is_training_done(self) -> bool:
        return self._sim.training.best_step >= self._sim.shape.num_steps

    def answered(self, question: Command | Query, reply: Reply) -> None:
        if question is not self._question or not isinstance(reply, PsNodes):
            return
        self._question = None
        self._check_told(reply)
        if not reply.is_ready and reply.nodes:
            self._is_switching = True
            self._sim.events.after(span(self._chance, *SWITCH), self._switch, reply.nodes, self._version_now())

    def _switch(self, cluster: tuple[PsNode, ...], version: int) -> None:
        """If no program hears it, they are asked to switch once more."""
        self._is_switching = False
        self._used, self._version = cluster, version
        master = self._sim.masters.listening()
        if master is not None and self._sim.ended_at is None:
            master.hear(PsReady(addresses=tuple(node.service_address for node in cluster)))

    def _check_told(self, told: PsNodes) -> None:
        """Each rank once, in order; none that was never there; and another server at an old address has not its variables."""
        cloud, ranks = self._sim.platform, [node.rank for node in told.nodes]
        if ranks != sorted(dict.fromkeys(ranks)):
            raise Violation("servers", f"the ranks of the next parameter servers are {ranks}")
        known = {node.service_address: node.id for node in self._used}
        for node in told.nodes if self._used and not self._sim.masters.num_journals_lost else ():
            former = known.get(node.service_address)
            if former is None and node.id not in cloud.started:
                raise Violation("servers", f"the workers shall use parameter server {node.id}, which never ran")
            is_other = former != node.id and former in cloud.started
            if is_other and self._version_now() <= self._version:
                raise Violation("servers", f"no notice says that the variables of parameter server {former} are lost")

    def _version_now(self) -> int:
        master = self._sim.masters.newest
        fleet = None if master is None else master.job.state.fleet
        return 0 if fleet is None else fleet.servers.global_version

    def check_removal(self, node: CloudNode | None) -> None:
        """Two phases: who is used stays until the workers have switched."""
        sim = self._sim
        if node is None or not node.is_alone or sim.masters.num_journals_lost:
            return  # ended, or the next master does not know what it had told
        is_over = sim.masters.newest is None or sim.masters.newest.job.end is not None or self._is_training_done()
        if not is_over and any(used.id == node.launch.id for used in self._used):
            raise Violation("servers", f"{node.launch.name} is removed while the workers use it")

    def explain_completion(self) -> str | None:
        """Chiefs and evaluators work to their own end."""
        sim, cloud = self._sim, self._cloud
        removed = {} if cloud is None else cloud.asked_to_remove
        for node in () if sim.masters.num_journals_lost else self._at_work():
            if node.launch.node_type not in sim.people.scaled_types and node.launch.id not in removed:
                return f"the job completed while {node.launch.name} works"
        return None

    def _at_work(self) -> list[CloudNode]:
        nodes = () if self._cloud is None else self._cloud.nodes.values()
        return [node for node in nodes if node.is_alone and node.launch.node_type is not NodeType.PS]

    def check_calm(self, job: Job) -> str | None:
        """When nothing has happened for long, the change is done."""
        fleet = job.state.fleet
        replicas = None if fleet is None else fleet.replicas.get(NodeType.PS)
        if fleet is None or replicas is None or self._is_training_done():
            return None
        servers = fleet.servers
        running = [node.id for node in fleet.live_nodes(NodeType.PS) if node.phase is NodePhase.RUNNING]
        if not running:
            return None if self._sim.shape.is_one_world else "the job goes on without any parameter server"
        if servers.is_changed or servers.dropped:
            return "the workers were never told of the next parameter servers, or not heard when they had switched"
        used = [node.id for node in self._used]
        if used != servers.current and not self._sim.masters.num_journals_lost:
            return f"the workers use the parameter servers {used}, and the job says {servers.current}"
        if sorted(servers.current) != sorted(running):
            return f"the parameter servers {running} run, and {servers.current} are used"
        return None
