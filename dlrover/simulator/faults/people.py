"""
People who want something of a job: other numbers of nodes, another machine, a pause.

Nodes are asked for once, heard or not. Who suspends a job with a fleet, and lets it go on later, asks until there is an
answer: a master that dies takes the question along, a full disk refuses it, and a journal that is lost forgets the answer.
From the answer to a suspension until they want the job to go on, nothing may be launched.
"""

from __future__ import annotations

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.messages.fleet import (
    LaunchNode,
    MigrateNode,
    NodeType,
    Resource,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SuspendJob,
)
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Command, Query
from dlrover.simulator.nodes.cloud import VirtualCloud
from dlrover.simulator.parts import SimulationPart
from dlrover.simulator.truth.invariants import Violation
from dlrover.simulator.virtual_time import SECOND

ASK_AGAIN = 2 * SECOND
NEW_PATIENCE = 300 * SECOND
"""A job that goes on waits anew: for ten minutes at least, of which a clock that jumps with a new master may take some."""


class People:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self._question: SuspendJob | ResumeJob | None = None
        """What is not answered."""
        self.scaled_types: dict[NodeType, None] = {}
        """Of which a person wanted another number."""
        self.want_pause = False
        self.is_paused = False
        """They want a pause, and were told that there is one."""
        self._was_paused = False
        """There was a pause, as far as they know, when they last wanted the job to go on."""
        self._resumed_at: int | None = None

    # What they ask for once.

    def scale(self, min_nodes: int, max_nodes: int) -> bool:
        master = self._sim.masters.listening()
        if master is None or master.job.end is not None:
            return False
        self._sim.note(f"a person asks for {min_nodes} to {max_nodes} nodes")
        master.hear(ScaleJob(min_nodes=min_nodes, max_nodes=max_nodes))
        return True

    def scale_replicas(self, node_type: NodeType, pick: int) -> bool:
        """A person wants another number of the nodes of some type."""
        sim = self._sim
        master, fleet = sim.masters.listening(), sim.shape.fleet
        if master is None or master.job.end is not None or fleet is None:
            return False
        least = {NodeType.WORKER: sim.shape.min_nodes, NodeType.PS: 1}.get(node_type, 0)
        count = least + pick % (fleet.replicas[node_type].count - least + 2)
        sim.note(f"a person asks for {count} nodes of type {node_type}")
        self.scaled_types[node_type] = None
        master.hear(ScaleReplicas(node_type=node_type, count=count))
        return True

    def exchange(self, pick: int) -> bool:
        """A person wants another machine in place of one that runs."""
        master, cloud = self._sim.masters.listening(), self._sim.platform
        if master is None or master.job.end is not None or not isinstance(cloud, VirtualCloud):
            return False
        running = cloud.running_ids()
        if not running:
            return False
        master.hear(MigrateNode(node=running[pick % len(running)], resource=Resource(cpu=2.0)))
        return True

    # What they ask until they are answered.

    def suspend(self, duration: int, *, is_releasing: bool) -> bool:
        sim = self._sim
        if self.want_pause or sim.ended_at is not None or sim.masters.listening() is None:
            return False
        self.want_pause = True
        self._ask(SuspendJob(reason="another job needs the machines", is_releasing=is_releasing))
        # Nodes that are not released keep running: then a suspension does not excuse a job that stands still.
        sim.troubles.pass_by(duration, self._let_go_on, is_trouble=is_releasing)
        return True

    def _let_go_on(self) -> None:
        self._was_paused = self.is_paused
        self.want_pause = self.is_paused = False
        self._ask(ResumeJob())

    def _ask(self, question: SuspendJob | ResumeJob) -> None:
        self._question = question
        self._try(question)

    def _try(self, question: SuspendJob | ResumeJob) -> None:
        sim = self._sim
        if self._question is not question or sim.is_over or sim.ended_at is not None:
            return
        master = sim.masters.listening()
        if master is not None:
            master.hear(question)
        sim.events.after(ASK_AGAIN, self._try, question)

    def answered(self, command: Command | Query, code: str | None = None) -> None:
        """By a master whose answer is durable. Refused as it is so already, or because the fleet is not defined yet.

        A job that cannot release its nodes is asked to launch no more, which none refuses.

        A refused wish to go on says that the job goes on already. If they were told of the pause, a former master let it go on and took
        the answer along. If not, the wish for a pause may have died with its master: there was none, and no patience begins anew.
        """
        if command is not self._question or code == ErrorCode.NO_PLATFORM:
            return
        self._question = None
        if isinstance(command, SuspendJob) and command.is_releasing and code is not None:
            self._ask(SuspendJob(reason=command.reason))
            return
        if isinstance(command, SuspendJob):
            self.is_paused = True
            return
        if code is None or self._was_paused:
            self._resumed_at = self._sim.events.now
        self._sim.troubles.add()

    def journal_lost(self) -> None:
        """They see that the job goes on, and ask once more."""
        self.is_paused = False
        if self.want_pause:
            self._ask(SuspendJob(reason="another job still needs the machines"))

    def has_just_resumed(self) -> bool:
        """Too short ago for any patience, which began anew: the job's own for a round, a moment before we heard of it."""
        patience = min(NEW_PATIENCE, micros(self._sim.shape.join_timeout) - SECOND)
        return self._resumed_at is not None and self._sim.events.now - self._resumed_at < patience

    def check_launch(self, launch: LaunchNode) -> None:
        if self.is_paused:
            raise Violation("fleet", f"{launch.name} is launched while the job is suspended")
