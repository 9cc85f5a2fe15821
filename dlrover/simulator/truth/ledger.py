"""
The ledger: what really happened, kept apart from what the core believes.

An invariant that only compared the core's state with itself would agree with every mistake. So agents, workers and the
disk enter here what they did, and the checks hold the core to it.
"""

from __future__ import annotations

from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.job import Incarnation, NodeId, NodeRank, Round
from dlrover.simulator.parts import AgentPart


class Ledger:
    """Of one simulation."""

    def __init__(self) -> None:
        self.chargeable: dict[NodeRank, int] = {}
        """Failures of each node rank that may cost a restart."""
        self._of_processes: dict[str, int] = {}
        """The same of each agent process."""
        self.node_failures: dict[tuple[NodeType, int], int] = {}
        """What happened to nodes of each type and rank of a fleet that may cost a relaunch."""
        self.num_lost_nodes = 0
        self.passed: dict[tuple[str, Incarnation], int] = {}
        """Agent process and incarnation to when it last passed a run of the node check."""
        self.num_ports_taken = 0
        self.worlds: dict[tuple[Round, str], dict[NodeId, int]] = {}
        """Durable ones, by round and coordinator: member to group rank. Outlives a journal, as what was sent does."""
        self.has_lost_journal = False
        self.coordinators: dict[str, Round] = {}
        """Of the last durable rounds of this journal."""
        self.lives: dict[tuple[NodeRank, Incarnation], str] = {}
        """Which agent process each incarnation was given to."""
        self.applied: dict[tuple[NodeId, Incarnation], int] = {}
        """Highest sequence applied of each life."""
        self.answered: dict[tuple[NodeId, Incarnation], int] = {}
        """Highest sequence whose answer its sender has heard."""
        self.num_aborted = 0
        """How often an extension of the user wanted the job to end."""
        self._notices: dict[str, None] = {}
        """What agents that gave up their master had to say."""
        self.num_commands = 0
        self.num_alarms = 0
        """Nodes that were given up, and workers that were killed for having slept too long."""

    def heard_answer(self, agent: AgentPart, sequence: int) -> None:
        life = (agent.id, agent.incarnation)
        self.answered[life] = max(sequence, self.answered.get(life, 0))

    def gave_up(self, notice: str) -> None:
        """An agent had no master for longer than it may stay."""
        self._notices[notice.rstrip(".")] = None

    def names_who_gave_up(self, message: str) -> bool:
        """Whether these are the words of an agent that really gave up."""
        return any(notice in message for notice in self._notices)

    def journal_lost(self) -> None:
        """What only the journal could know is not held against the master."""
        self.has_lost_journal = True
        self.coordinators.clear()
        self.lives.clear()
        self.applied.clear()
        self.answered.clear()

    def charge(self, agent: AgentPart) -> None:
        self.chargeable[agent.rank] = self.chargeable.get(agent.rank, 0) + 1
        self._of_processes[agent.life] = self._of_processes.get(agent.life, 0) + 1
        self.fail_node(agent.node.fleet_rank, agent.node.node_type)

    def rename(self, agent: AgentPart) -> None:
        """A master without its journal knows the process by another rank, and may hear of its failures only now."""
        failed = self._of_processes.get(agent.life, 0)
        self.chargeable[agent.rank] = self.chargeable.get(agent.rank, 0) + failed

    def fail_node(self, rank: int, node_type: NodeType = NodeType.WORKER) -> None:
        self.node_failures[node_type, rank] = self.node_failures.get((node_type, rank), 0) + 1
