"""
I10, I11 and I13: what a job that scales itself may do, looked at before and after each of its commands.

The truth keeps its own list of what was decided, so a core that forgets its brakes cannot hide it.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from dlrover.core.fleet.fleet import Fleet
from dlrover.core.job import Job
from dlrover.core.scaling.facts import cost_of_change
from dlrover.protocol.messages.cluster import ClusterPhase
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import RoomSeen, RunMeasured, ScaleDecision, ScaleOutcome
from dlrover.simulator.parts import SimulationPart
from dlrover.simulator.virtual_time import SECOND

WINDOW = 1800 * SECOND
HOUR = 3600 * SECOND
MOST_EXCHANGES = 2
MOST_PAUSE = 0.01
FREE_CHANGES = 3


class Move(NamedTuple):
    number: int
    at: int
    direction: int


class ScalingTruth:
    """Owned by the simulation."""

    def __init__(self, simulation: SimulationPart) -> None:
        self._sim = simulation
        self.journal_lost()

    def journal_lost(self) -> None:
        """The job forgets, and so does its judge."""
        self._known: dict[int, tuple[int, ScaleOutcome]] = {}
        """What was decided, by number."""
        self._moves: list[Move] = []
        self._busy, self._spent = "", 0
        self._banned: dict[int, tuple[int, int]] = {}
        """Nodes to the number of the decision and until when."""

    def before(self, job: Job) -> None:
        """What a decision of the coming command would have to wait for, and what ranks have used up."""
        fleet, rdzv = job.state.fleet, job.state.rendezvous
        self._spent = 0 if fleet is None else _spent(fleet)
        self._busy = ""
        if fleet is None:
            return
        if any(replicas.pending for replicas in fleet.replicas.values()):
            self._busy = "nodes are pending"
        elif fleet.migrations:
            self._busy = "nodes are being exchanged"
        elif job.state.cluster is not None:
            self._busy = "" if job.state.cluster.phase is ClusterPhase.TRAINING else "the cluster changes"
        elif rdzv.world is None or rdzv.opening is not None:
            self._busy = "a round is open"

    def check(self, job: Job, command: object) -> tuple[str, str] | None:
        """The invariant that does not hold, and how; None: all do."""
        state = job.state
        if state.terms is None:
            return None
        if (
            isinstance(command, RunMeasured | RoomSeen)
            and state.fleet is not None
            and _spent(state.fleet) != self._spent
        ):
            return "I10", "a change of the job's own size has cost a relaunch"
        if (exchanged := self._exchanges(job)) is not None:
            return "I10", exchanged
        if (wrong := self._target(job)) is not None:
            return "I10", wrong
        self._forget_from(state.scaling.num_decisions + 1)
        for made in state.scaling.decisions:
            if self._known.get(made.number) != (made.at, made.outcome):
                self._forget_from(made.number)  # a master died with the others
                self._known[made.number] = (made.at, made.outcome)
                if (found := self._decided(job, made, command)) is not None:
                    return found
        turns = [later.at for one, later in itertools.pairwise(self._moves) if one.direction != later.direction]
        if len(turns) > 2 and turns[-1] - turns[-3] <= WINDOW:
            return "I11", f"three reversals within 30 min: {self._moves}"
        return None

    def _forget_from(self, number: int) -> None:
        if self._known and max(self._known) >= number:
            self._known = {each: made for each, made in self._known.items() if each < number}
            self._moves = [move for move in self._moves if move.number < number]
            self._banned = {nodes: ban for nodes, ban in self._banned.items() if ban[0] < number}

    def _target(self, job: Job) -> str | None:
        state = job.state
        assert state.terms is not None, "asked before"
        limits, target = state.terms.limits, state.limits.max_nodes
        if not limits.min_nodes <= target <= limits.max_nodes or target % limits.node_unit:
            return f"a target of {target} for {limits.min_nodes}:{limits.max_nodes} in multiples of {limits.node_unit}"
        return None

    def _decided(self, job: Job, made: ScaleDecision, command: object) -> tuple[str, str] | None:
        if job.state.cluster is not None:
            return self._of_servers(job, made)
        group = made.plan.group(NodeType.WORKER)
        if group is None or group.count is None or made.outcome not in (ScaleOutcome.PLANNED, ScaleOutcome.TAKEN_BACK):
            return None
        nodes, room = group.count, job.state.scaling.room.get(NodeType.WORKER)
        if made.outcome is ScaleOutcome.TAKEN_BACK:
            former = self._banned.get(nodes)
            self._banned[nodes] = (made.number, max(made.at + WINDOW, 0 if former is None else former[1]))
            return self._taken_back(job, made, nodes)
        if isinstance(command, RoomSeen) and made.sentence.startswith("The platform has room for"):
            return None  # an order
        if self._busy:
            return "I10", f"a change is planned while {self._busy}: {made.sentence}"
        if made.at < self._banned.get(nodes, (0, 0))[1]:
            return "I11", f"{nodes} nodes were taken back and are entered again too soon: {made.sentence}"
        fewest = job.state.terms.limits.min_nodes if job.state.terms is not None else 0
        if room is not None and room.most is not None and nodes > max(fewest, room.most - self._sim.shape.spares):
            return "I10", f"{nodes} nodes are planned and there is room for {room.most}"
        least = job.state.scaling.terms.worker_pause * SECOND
        if self._moves and made.at - self._moves[-1].at < least:
            return "I10", f"changes at {self._moves[-1].at} and {made.at}: there was no cool-down"
        self._moves.append(Move(made.number, made.at, 1 if made.nodes_after > made.nodes_before else -1))
        return self._pauses(job, made)

    def _taken_back(self, job: Job, made: ScaleDecision, nodes: int) -> tuple[str, str] | None:
        """
        A change of the size, which others have to wait for; unless there is no room for the former size any more.

        Then the job stays as it is: it has not changed and has not paused, so no cool-down begins, and a growth may follow as soon as there is room.
        """
        target = job.state.limits.max_nodes
        if target == made.nodes_after:
            self._moves.append(Move(made.number, made.at, 1 if nodes < made.nodes_before else -1))
            return None
        scaling = job.state.scaling
        room = scaling.room.get(NodeType.WORKER)
        is_short = room is not None and room.most is not None and room.most < made.nodes_after + self._sim.shape.spares
        is_refused = scaling.no_room_until is not None and made.at < scaling.no_room_until
        is_short |= is_refused and scaling.no_room_beyond < made.nodes_after
        if is_short and target == nodes < made.nodes_after:
            return None
        return "I10", f"{nodes} nodes are taken back, and the target is {target} instead of {made.nodes_after}"

    def _of_servers(self, job: Job, made: ScaleDecision) -> tuple[str, str] | None:
        """Of a job with parameter servers."""
        fleet, terms = job.state.fleet, job.state.scaling.terms
        if fleet is None or made.outcome is not ScaleOutcome.PLANNED:
            return None
        if self._busy:
            return "I10", f"a change is planned while {self._busy}: {made.sentence}"
        servers, workers = fleet.replicas[NodeType.PS], fleet.replicas[NodeType.WORKER]
        planned = {group.node_type: group.count for group in made.plan.groups}
        if (planned.get(NodeType.PS) or 0) > terms.most_servers or servers.target < 1:
            return "I10", f"{servers.target} servers: {made.sentence}"
        if (planned.get(NodeType.WORKER) or 0) > workers.spec.count:
            return "I10", f"{workers.target} workers, and the user gave {workers.spec.count}: {made.sentence}"
        if self._moves and made.at - self._moves[-1].at < terms.server_pause * SECOND:
            return "I10", f"changes at {self._moves[-1].at} and {made.at}: there was no cool-down"
        self._moves.append(Move(made.number, made.at, 1))
        return None

    def _exchanges(self, job: Job) -> str | None:
        recent = [at for at in job.state.scaling.exchanged.values() if at > job.state.now - HOUR]
        return f"{len(recent)} slow nodes are exchanged within an hour" if len(recent) > MOST_EXCHANGES else None

    def _pauses(self, job: Job, made: ScaleDecision) -> tuple[str, str] | None:
        recent = [move for move in self._moves if move.at > made.at - HOUR]
        cost = cost_of_change(job.state) * SECOND
        if len(recent) > FREE_CHANGES and len(recent) * cost > MOST_PAUSE * HOUR:
            return "I13", f"{len(recent)} changes of {cost / SECOND:.1f} s within an hour"
        return None


def _spent(fleet: Fleet) -> int:
    return sum(sum(replicas.spent.values()) + sum(replicas.evictions.values()) for replicas in fleet.replicas.values())
