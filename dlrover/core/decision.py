"""
One decision: what one command leads to, as plain data, and the list of what can happen on the way.

Rooms write into a decision what shall leave the core: effects, verdicts, and the nodes whose wish may be another one now. What concerns other
rooms they announce; who reacts, and in which order, comes with the decision from `reactions`. A decision lives for one command, so
nothing of it can leak into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec

from msgspec import Struct

from dlrover.core.happenings import (
    AgentComes,
    AllFinished,
    AnotherNode,
    ClusterLooks,
    CutTaking,
    FleetDefined,
    JobEnds,
    ModelReturns,
    NodeLost,
    PlanMade,
    RankContested,
    RoundOpened,
    TargetMoved,
    WorkersFailed,
)
from dlrover.core.membership.nodes import Node
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.state import JobState
from dlrover.protocol.messages.checkpoint import HeldSnapshot
from dlrover.protocol.messages.job import (
    Attach,
    Command,
    Effect,
    ExitReason,
    FirstFailure,
    JoinRendezvous,
    Leave,
    Micros,
    NodeId,
    PlatformId,
    Query,
    Reply,
    Round,
)

MOST_PASSES = 4
"""A claimed world goes on, and the job ends: each happens once. One pass more finds nothing to do."""
P = ParamSpec("P")
Rows = Sequence[Callable[Concatenate["Decision", P], None]]
"""Who reacts to something, in this order."""
Handlers = Mapping[type[Command], Callable[[Any, "Decision"], Reply]]
"""What each command does. A handler checks first and raises `Rejected`; below its first empty line it only changes, and cannot refuse any more."""
Answers = Mapping[type[Query], Callable[[Any, JobState], Reply | NotYet]]


class Reactions(NamedTuple):
    """What can happen inside a job, and what a room may want of the others."""

    master_restarted: Rows[[]]
    """Another master has taken over; the last command of the former one was at `state.now`."""
    agent_comes: Rows[[AgentComes]]
    """A room may refuse it."""
    rank_contested: Rows[[RankContested]]
    """A new agent asks for the rank of a live node."""
    agent_attached: Rows[[Node, Attach]]
    agent_gone: Rows[[Node]]
    """With its workers, which have ended; or a new life of it begins."""
    joins_check: Rows[[Node, JoinRendezvous]]
    """What all joins have in common was looked at. A room may refuse it."""
    node_expected: Rows[[Node]]
    """It shall join the next round."""
    node_unexpected: Rows[[Node]]
    """It shall not, or begins anew."""
    node_finished: Rows[[Node]]
    """All its workers ended well: it is never started again."""
    workers_ended: Rows[[Node]]
    """They have nothing more to tell."""
    all_finished: Rows[[AllFinished]]
    """All members of the world have."""
    node_leaves: Rows[[Node, tuple[HeldSnapshot, ...]]]
    """It says goodbye, writes by itself what it holds, and is lost next."""
    node_lost: Rows[[NodeLost]]
    """A live node is there no more."""
    node_released: Rows[[Node, str]]
    """Its platform lets the node go, so its agent has to go, too."""
    node_succeeded: Rows[[Node, str]]
    """Its platform says that its processes ended well."""
    node_dismissed: Rows[[Node, Leave]]
    """The job goes on without it. If it is a member of the world, the next round is open already."""
    node_excluded: Rows[[Node, str]]
    """It was found bad; it is dismissed next."""
    nodes_overdue: Rows[[list[NodeId], str]]
    """Others waited for these too long."""
    node_exchanged: Rows[[str]]
    """A platform is about to exchange a node of this label."""
    another_node: Rows[[AnotherNode]]
    """Workers of a rank cannot go on where they are."""
    pre_check_over: Rows[[]]
    """Its time is over before its operators have said their word, or the workers run already."""
    round_opened: Rows[[RoundOpened]]
    round_chosen: Rows[[]]
    """A world is about to begin. A room may end the job instead."""
    round_completed: Rows[[]]
    """A world has begun."""
    workers_failed: Rows[[WorkersFailed]]
    """Workers of the newest round failed, or stand still."""
    world_unclaimed: Rows[[str]]
    """A world from before the journal was lost cannot go on, for this reason."""
    fleet_defined: Rows[[FleetDefined]]
    job_grows: Rows[[int]]
    """It is asked for so many nodes at most, and nothing has changed yet. A room that cannot bear it raises `Rejected`."""
    job_scaled: Rows[[int]]
    """To so many nodes at most."""
    target_moved: Rows[[TargetMoved]]
    """By the job itself, by its room or by a person."""
    plan_made: Rows[[PlanMade]]
    """About servers, sizes, or nodes beside the world."""
    exchange_called_off: Rows[[PlatformId]]
    """Of this old node, whose successor did not come."""
    memory_ran_out: Rows[[]]
    """The memory of a worker's node in a world."""
    workers_grown: Rows[[int]]
    """All workers shall have so many MiB, on new nodes."""
    bounds_moved: Rows[[]]
    """The job has another minimum or maximum; a world of the new maximum is wanted."""
    person_decided: Rows[[]]
    """Other numbers or sizes of nodes are wanted."""
    world_taken_up: Rows[[int]]
    """A world of so many nodes from before the journal was lost goes on."""
    launch_refused: Rows[[PlatformId, str]]
    """The platform does not launch this node now, for this reason."""
    job_starts_over: Rows[[str]]
    """Every worker was replaced, for this reason. The rounds go on counting, and nothing else of the past counts."""
    job_pauses: Rows[[str]]
    """Every node shall save and leave, for this reason. The job goes on later, with others."""
    checkpoint_counts: Rows[[int, Round]]
    model_restored: Rows[[]]
    """The ranks of the round have said which model they go on with."""
    terms_set: Rows[[]]
    """The first node has come, and with it the terms of the job."""
    task_finished: Rows[[Node, Round]]
    """The process of a node in a cluster ended well; its report was lost with the stream."""
    cluster_looks: Rows[[ClusterLooks]]
    cluster_settled: Rows[[list[PlatformId]]]
    """The newest version trains on these servers, and nothing of the one before it can still run."""
    cut_taken: Rows[[CutTaking]]
    """A checkpoint is about to be written."""
    cut_counts: Rows[[int]]
    """Its checkpoint is complete."""
    model_returns: Rows[[ModelReturns]]
    job_ends: Rows[[JobEnds]]
    """Rooms make the message better before it does."""
    job_finished: Rows[[]]
    """The last node has left."""
    advance: Sequence[Callable[[Decision], bool]]
    """What may go on by itself after a command. A room that changes what those before it have looked at gives True: then all look again."""
    deadlines: Sequence[Callable[[JobState], list[Deadline]]]
    """Those that are running while the job has not ended."""


Tables = Mapping[tuple[bool, bool], Reactions]
"""By `rooms_of`."""


def rooms_of(state: JobState) -> tuple[bool, bool]:
    """Whether the job has a platform, and node checks."""
    return state.fleet is not None, state.terms is not None and state.terms.check is not None


class Decision(Struct, eq=False):
    """One command being applied."""

    state: JobState
    now: Micros
    tables: Tables
    on: Reactions
    """The table for the rooms that the job has now."""
    effects: list[Effect] = []
    verdicts: list[str] = []
    touched: dict[NodeId, None] = {}
    """Nodes whose wish may be another one now. A dict because the order of a set is not reproducible."""
    is_all_touched: bool = False
    is_unsettled: bool = False
    """Something changed that may let rounds, checks or the job go on: `advance` looks at the end of the command."""
    ending: tuple[ExitReason, str] | None = None
    """Why the job shall end after this command; the first reason counts."""

    @classmethod
    def begin(cls, state: JobState, now: Micros, tables: Tables) -> Decision:
        return cls(state, now, tables, tables[rooms_of(state)])

    def rooms_changed(self) -> None:
        """The job has a platform or node checks from now on."""
        self.on = self.tables[rooms_of(self.state)]

    def say(self, verdict: str) -> None:
        self.verdicts.append(verdict)

    def touch(self, node: NodeId) -> None:
        self.touched[node] = None

    def is_running(self, node: Node) -> bool:
        """Whether the node shall run workers of the active world right now."""
        rdzv = self.state.rendezvous
        is_active = self.state.end is None and rdzv.world is not None and rdzv.opening is None
        return is_active and node.id in rdzv.group_ranks and node.id not in rdzv.lost and not node.finished_round

    def announce(self, rows: Rows[P], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let the rooms react, before this returns."""
        for react in rows:
            react(self, *args, **kwargs)

    def end_job(
        self, reason: ExitReason, sentence: str, first: FirstFailure | None = None, exit_code: int | None = None
    ) -> None:
        self.announce(self.on.job_ends, JobEnds(reason, sentence, first, exit_code))
