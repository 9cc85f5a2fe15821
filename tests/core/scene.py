"""
A stage for the core: named nodes, seconds instead of microseconds, and a check of the invariants after each command.

Nodes are called by a letter and remember what a real agent would: its node id, its incarnation, the number of its last
command. So a test says `scene.join("a")`, and a test about a stale message says so explicitly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from dlrover.core.commit_order import CommitSequence, replay
from dlrover.core.desired import wish_of
from dlrover.core.goodput.accountant import LOST
from dlrover.core.goodput.booking import class_of
from dlrover.core.job import Job, Origin, Outcome
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.fleet import ScaleJob
from dlrover.protocol.messages.job import (
    TRAINING_RENDEZVOUS,
    Attach,
    Attached,
    BlockRendezvous,
    Command,
    FailureKind,
    Incarnation,
    JobEnd,
    JobTerms,
    Join,
    JoinRendezvous,
    Leave,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeRank,
    NodeSilent,
    NodesOrdered,
    ReportFailure,
    ReportFinished,
    RestartPolicy,
    Round,
    Run,
    StopJob,
    UnblockRendezvous,
    Wish,
    WorkerFailure,
    WorldSpec,
)

START = Micros(0)


def micros(seconds: float) -> Micros:
    return Micros(round(seconds * 1_000_000))


def terms(
    min_nodes: int = 1,
    max_nodes: int | None = None,
    restarts: RestartPolicy | None = None,
    *,
    standby: int = 0,
    **limits: float,
) -> JobTerms:
    return JobTerms(
        limits=msgspec.convert(
            {"min_nodes": min_nodes, "max_nodes": min_nodes if max_nodes is None else max_nodes, **limits}, Limits
        ),
        restarts=RestartPolicy() if restarts is None else restarts,
        standby=standby,
    )


def failure(
    kind: FailureKind = FailureKind.EXCEPTION, *, at: float = 0.0, global_rank: int = 0, **details: Any
) -> WorkerFailure:
    values: dict[str, Any] = {"message": "RuntimeError: boom", "local_rank": 0, "pid": 100 + global_rank} | details
    return msgspec.convert({"global_rank": global_rank, "kind": kind, "exited_at": micros(at), **values}, WorkerFailure)


@dataclass
class Agent:
    """What an agent knows of itself."""

    name: str
    node: NodeId
    node_rank: NodeRank
    incarnation: Incarnation
    life: str = ""
    sequence: int = 0
    finished_round: int = 0
    """Its workers ended well in that round, and nobody knows yet."""


@dataclass
class Scene:
    """A job under way, driven through its commit sequence."""

    terms: JobTerms = field(default_factory=JobTerms)
    now: Micros = START
    agents: dict[str, Agent] = field(default_factory=dict)
    num_offers: dict[str, int] = field(default_factory=dict)
    """Ports bound on each host so far: none is offered twice."""
    num_processes: int = 0
    """Agent processes so far: each has a life of its own."""
    journal: list[bytes] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    """Commands that changed nothing, with the code of the refusal."""
    is_checked: bool = True
    """After each command. Of jobs with a thousand nodes that is most of the work."""

    def __post_init__(self) -> None:
        self.job = Job()
        self.sequence = CommitSequence(self.job, master_epoch=1, next_number=1)
        self.do(MasterStarted(1, "a-job"))

    def at(self, seconds: float) -> Scene:
        """The clock shows so many seconds; deadlines are only looked at by `tick`."""
        self.now = micros(seconds)
        return self

    def do(self, command: Command, origin: Origin | None = None) -> Outcome:
        before = self.job.encode()
        try:
            ticket = self.sequence.stage(command, self.now, origin)
        except Rejected as error:
            assert self.job.encode() == before, f"a rejected {type(command).__name__} changed the job"
            check_kind(error)
            self.rejections.append(f"{type(command).__name__} {error.code}")
            raise
        batch = self.sequence.take()
        assert batch is not None
        self.journal.extend(batch.records)
        (released,) = self.sequence.committed(batch)
        assert released.ticket == ticket
        self.outcomes.append(released.outcome)
        if self.is_checked:
            check_invariants(self.job)
        return released.outcome

    def tick(self, seconds: float | None = None) -> list[Outcome]:
        """Let the deadlines that have passed at this time have their effect, as the master's timer would."""
        if seconds is not None:
            self.at(seconds)
        return [self.do(deadline) for deadline in self.job.due(self.now)]

    def attach(
        self, name: str, *, rank: int | None = None, procs: int = 1, is_answer_lost: bool = False, **details: Any
    ) -> Attached:
        """A fresh agent, or the newest life of a known one on a new stream (`incarnation=0` for a restarted agent)."""
        known = self.agents.get(name)
        if known is None or details.get("incarnation") == 0:
            self.num_processes += 1
            life = f"life-{self.num_processes}"
        else:
            life = known.life
        fields: dict[str, Any] = {
            "launch": f"launch-{name}",
            "host": f"host-{name}",
            "terms": self.terms,
            "local_world_size": procs,
            "node_rank": rank,
            "incarnation": 0 if known is None else known.incarnation,
            "running_round": 0 if known is None else known.finished_round,
            "is_finished": known is not None and known.finished_round > 0,
            "life": life,
        } | details
        reply = self.do(Attach(**fields)).reply
        assert isinstance(reply, Attached)
        if is_answer_lost:
            return reply
        if known is None or known.incarnation != reply.incarnation or known.node != reply.node:
            self.agents[name] = Agent(name, reply.node, reply.node_rank, reply.incarnation, life)
        return reply

    def restart_agent(self, name: str, **details: Any) -> Attached:
        self.agents[name].finished_round = 0
        return self.attach(name, incarnation=0, **details)

    def join(
        self,
        name: str,
        *,
        round_: int | None = None,
        procs: int | None = None,
        offer: str | None = None,
        rendezvous: str = TRAINING_RENDEZVOUS,
    ) -> Outcome:
        agent = self.agents[name]
        if offer is None:
            self.num_offers[name] = self.num_offers.get(name, 0) + 1
            offer = f"host-{name}:{self.num_offers[name]}"
        state = self.job.state
        known = state.nodes.live.get(agent.node)
        size = procs if procs is not None else known.local_world_size if known is not None else 1
        return self.send(
            name,
            JoinRendezvous(
                node=agent.node,
                incarnation=agent.incarnation,
                round=Round(state.rendezvous.next_round if round_ is None else round_),
                local_world_size=size,
                offer=offer,
                name=rendezvous,
            ),
        )

    def fail(self, name: str, *failures: WorkerFailure, round_: int | None = None, **details: Any) -> Outcome:
        agent = self.agents[name]
        if not failures:
            failures = (failure(at=self.now / 1e6),)
        return self.send(
            name,
            ReportFailure(
                node=agent.node,
                incarnation=agent.incarnation,
                round=self.newest_round(name) if round_ is None else Round(round_),
                failures=failures,
                **details,
            ),
        )

    def finish(self, name: str, *, round_: int | None = None) -> Outcome:
        agent = self.agents[name]
        newest = self.newest_round(name) if round_ is None else Round(round_)
        return self.send(name, ReportFinished(node=agent.node, incarnation=agent.incarnation, round=newest))

    def newest_round(self, name: str) -> Round:
        """In which the workers of this agent run; with parameter servers the start of its process."""
        state = self.job.state
        return state.rendezvous.round if state.cluster is None else state.cluster.round_of(self.agents[name].node)

    def leave(self, name: str, reason: LeaveReason = LeaveReason.JOB_ENDED) -> Outcome:
        agent = self.agents[name]
        return self.send(name, LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=reason))

    def break_stream(self, name: str, step: int | None = None) -> Outcome:
        agent = self.agents[name]
        return self.do(NodeDisconnected(node=agent.node, incarnation=agent.incarnation, step=step))

    def scale(self, min_nodes: int, max_nodes: int | None = None) -> Outcome:
        return self.do(ScaleJob(min_nodes=min_nodes, max_nodes=min_nodes if max_nodes is None else max_nodes))

    def block(self, name: str, reason: str = "it converts a checkpoint", lease: float = 600.0) -> Outcome:
        agent = self.agents[name]
        command = BlockRendezvous(node=agent.node, incarnation=agent.incarnation, reason=reason, lease=lease)
        return self.send(name, command)

    def unblock(self, name: str) -> Outcome:
        agent = self.agents[name]
        return self.send(name, UnblockRendezvous(node=agent.node, incarnation=agent.incarnation))

    def order(self, *ranks: int) -> Outcome:
        return self.do(NodesOrdered(ranks=tuple(NodeRank(rank) for rank in ranks)))

    def silent(self, name: str, last_seen: float = 0.0) -> Outcome:
        agent = self.agents[name]
        return self.do(NodeSilent(node=agent.node, incarnation=agent.incarnation, last_seen_at=micros(last_seen)))

    def stop(self) -> Outcome:
        return self.do(StopJob())

    def restart_master(self) -> Scene:
        """The master dies and another one replays its journal."""
        replayed = replay(None, self.journal)
        assert replayed.job.encode() == self.job.encode()
        self.job = replayed.job
        epoch = self.job.master_epoch + 1
        self.sequence = CommitSequence(self.job, master_epoch=epoch, next_number=replayed.next_number)
        self.do(MasterStarted(epoch, "a-job"))
        return self

    def send(self, name: str, command: Command) -> Outcome:
        """As the agent would: numbered."""
        agent = self.agents[name]
        agent.sequence += 1
        return self.do(command, Origin(agent.node, agent.incarnation, agent.sequence))

    def gather(self, *names: str, procs: int = 1) -> Scene:
        """All of these attach and join."""
        for name in names:
            self.attach(name, procs=procs)
        for name in names:
            self.join(name)
        return self

    def rejoin(self, *names: str) -> Scene:
        for name in names:
            self.join(name)
        return self

    def wish(self, name: str) -> Wish:
        return self.job.desired(self.agents[name].node).wish

    def world(self, name: str) -> WorldSpec:
        wish = self.wish(name)
        assert isinstance(wish, Run), f"{name} shall not run but {wish}"
        return wish.world

    def obey(self, *names: str) -> Scene:
        """Each of these joins if it shall, and leaves if it shall."""
        for name in names:
            match self.wish(name):
                case Join():
                    self.join(name)
                case Leave():
                    self.leave(name, LeaveReason.DISMISSED)
        return self

    def members(self) -> list[int]:
        """Node ranks of the newest world, in the order of their group ranks."""
        world = self.job.state.rendezvous.world
        return [] if world is None else [member.node_rank for member in world.members]

    @property
    def end(self) -> JobEnd:
        assert self.job.end is not None, "the job has not ended"
        return self.job.end

    @property
    def verdicts(self) -> tuple[str, ...]:
        """Of the last command."""
        return self.outcomes[-1].verdicts


def check_kind(refusal: Rejected) -> None:
    assert refusal.code != ErrorCode.REJECTED, f"a refusal says of which kind it is: {refusal}"


def check_goodput(job: Job) -> None:
    """Each second of each place is in exactly one class, now and at any later time."""
    state, goodput = job.state, job.state.goodput
    for now in (state.now, Micros(state.now + 12_345_678)):
        for rank, place in goodput.places.items():
            totals = goodput.totals(place, now)
            assert sum(totals.values()) == goodput.lived(place, now), f"the classes of node rank {rank} do not sum up"
            assert all(micros >= 0 for micros in totals.values())
    for node in state.nodes.live.values():
        place = goodput.places[node.rank]
        assert (place.node, place.doing) == (node.id, class_of(state, node)), f"{node.label} does something else"
        assert place.opened_at is not None
    owed = [sum(books.values()) for books in (goodput.beginning, *(fault.micros for fault in goodput.faults))]
    lost = sum(sum(place.micros.get(class_, 0) for class_ in LOST) for place in goodput.places.values())
    assert sum(owed) <= lost, "faults cost more than was lost"


def check_cluster(state: JobState) -> None:
    """A job with parameter servers has no world, and each of its processes has a start of its own."""
    cluster = state.cluster
    assert cluster is not None
    assert state.rendezvous.world is None
    assert not state.rendezvous.expected
    assert all(process.round <= cluster.starts for process in cluster.processes.values())
    assert len({process.round for process in cluster.processes.values()}) == len(cluster.processes)
    for dataset in state.data.datasets.values():
        for reader in dataset.all_readers():
            assert reader.round in (0, cluster.round_of(reader.node)), "a lease of an ended process"
        assert all(cut <= cluster.cut for cut in dataset.provisional)


def check_invariants(job: Job) -> None:
    """What holds after each command: I1, I2, I5, I7 of the design, and what the rooms promise about themselves."""
    state = job.state
    nodes, rdzv, restarts = state.nodes, state.rendezvous, state.restarts
    assert Job.decode(job.encode()).encode() == job.encode(), "I5: a snapshot is the very state"

    assert {node.rank: node.id for node in nodes.live.values()} == nodes.holders, "one live node per rank"
    assert not set(nodes.holders) & set(nodes.former), "a held rank has no former holder"
    assert set(nodes.broken) <= set(nodes.live), "only live nodes have a stream to break"
    assert nodes.first_free == min(set(range(len(nodes.live) + 1)) - set(nodes.holders)), "the lowest free rank"
    for node in nodes.live.values():
        assert node.desired.wish == wish_of(state, node), f"nobody told {node.label} about its new wish"
        assert node.desired.master_epoch == state.master_epoch
    if state.cluster is not None:
        check_cluster(state)
        return

    running = [node.desired.wish.world for node in nodes.live.values() if isinstance(node.desired.wish, Run)]
    assert len({world.round for world in running}) <= 1, f"I1: two worlds are active: {running}"
    assert len({world.coordinator for world in running}) <= 1, "I1: one world has one coordinator"
    assert len({world.group_rank for world in running}) == len(running), "I1: two nodes have one group rank"
    if rdzv.world is not None and state.terms is not None:
        limits, members = state.terms.limits, rdzv.world.members
        if rdzv.world.limits_version == state.limits_version:
            assert limits.min_nodes <= len(members) <= limits.max_nodes, "I2: size of the world"
        elif rdzv.is_active and not rdzv.finished and not rdzv.is_held and state.end is None:
            assert len(members) <= limits.max_nodes, "a world that is too large makes room as soon as it can"
        assert len(members) % limits.node_unit == 0, "I2: node unit"
        ranks = [member.node_rank for member in members]
        assert len(ranks) == len(set(ranks)), "I2: distinct ranks"
        assert rdzv.world.world_size == sum(member.local_world_size for member in members)

    if state.end is None:
        places = [
            set(rdzv.waiting),
            set(rdzv.absent),
            set(rdzv.expected),
            set(rdzv.take_up.claims) - set(rdzv.finished),
        ]
        if rdzv.is_active:
            places.append({node for node in rdzv.group_ranks if rdzv.is_member(node) and node not in rdzv.finished})
        together = [node for place in places for node in place]
        unfinished = {node.id for node in nodes.live.values() if not node.finished_round and node.dismissed is None}
        assert sorted(together) == sorted(unfinished), "each live node that has not finished is in exactly one place"
        assert not set(rdzv.waiting) & set(nodes.broken), "who waits has a stream"
        assert set(rdzv.blocks) <= set(nodes.live), "a block has an owner"
    check_goodput(job)

    if state.terms is not None and state.terms.restarts.max_restarts is not None:
        for node_rank, spent in restarts.spent.items():
            assert spent <= max(0, state.terms.restarts.max_restarts), f"I7: budget of node rank {node_rank} exceeded"
    elif state.terms is not None:
        assert restarts.num_without_progress <= state.terms.restarts.max_without_progress, "I7: restarts in a row"
