"""
The job: everything the control plane knows about one training, and every decision it takes.

A command comes in with the time, a reply and effects come out; there is no clock, thread, disk, network or chance in
here, so the master, the simulator and the replay of a journal run the same code to the same result. Each command is
checked first and applied whole, or `Rejected` and nothing has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

import msgspec
from msgspec.structs import replace

from dlrover.core.check import commands as check_commands
from dlrover.core.checkpoints import commits
from dlrover.core.checkpoints.peer_directory import PeerDirectory
from dlrover.core.commands import HANDLERS, check_sender
from dlrover.core.data import commands as data_commands
from dlrover.core.data import progress as data_progress
from dlrover.core.deadlines import next_deadline, passed_deadlines
from dlrover.core.decision import Course
from dlrover.core.exchange import kv_store, sync_points
from dlrover.core.fleet import commands as fleet_commands
from dlrover.core.goodput.report import fault_of, goodput_status
from dlrover.core.membership.nodes import Node, NodeLife
from dlrover.core.membership.waiting import pending, standby, suspects
from dlrover.core.outcome import NotYet, Origin, Outcome
from dlrover.core.state import DECISION_VERSION, JobState
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.check import CheckResult
from dlrover.protocol.messages.goodput import AskFault, AskGoodput, GoodputStatus
from dlrover.protocol.messages.job import (
    STANDBY,
    AskStatus,
    Attached,
    Command,
    DeadlinePassed,
    Desired,
    Detection,
    JobEnd,
    JobStatus,
    Limits,
    Micros,
    NodeId,
    NodeStatus,
    Ping,
    Pong,
    Query,
    Reply,
    Stage,
)
from dlrover.protocol.messages.peers import AskPeers
from dlrover.protocol.messages.watch import AskDiagnosis, Diagnosis

__all__ = ["DECISION_VERSION", "HANDLERS", "Job", "JobState", "Origin", "Outcome"]


class Job:
    """One training job. `apply` changes it, everything else only looks."""

    def __init__(self, state: JobState | None = None) -> None:
        self._state = JobState() if state is None else state
        self._peers = PeerDirectory()

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
        """Apply the command whole, or raise `Rejected` with nothing changed."""
        state = self._state
        assert now >= state.now, f"the clock went back from {state.now} to {now}"
        answered = self.answered(origin)
        if answered is not None:
            return Outcome(answered)
        check_sender(command, origin)
        state.senders.check_room(command, origin)
        course = Course(state, now)
        reply = HANDLERS[type(command)](command, course)
        state.number += 1
        state.now = now
        course.tell_nodes()
        if isinstance(reply, Attached):
            reply = replace(reply, desired=state.nodes.live[reply.node].desired)
        state.senders.store(origin, reply)
        if course.verdicts:
            state.verdict = course.verdicts[-1]
        return Outcome(reply, tuple(course.effects), tuple(course.verdicts))

    def answered(self, origin: Origin | None) -> Reply | None:
        """The reply of a command that was applied before; None for a new one. May raise `Rejected` (`Senders`)."""
        return self._state.senders.answered(origin)

    def ask(self, query: Query) -> Reply | NotYet:
        """Answer a question. May raise `Rejected`."""
        match query:
            case AskStatus():
                return self.status()
            case Ping():
                return Pong(job_name=self.job_name, master_epoch=self.master_epoch)
            case AskGoodput():
                return self.goodput(self._state.now)
            case AskFault():
                return fault_of(self._state, query.round)
            case AskPeers():
                return self._peers.answer(query, self._state)
            case AskDiagnosis():
                return Diagnosis()  # what is watched is no part of the job; the shell knows
            case _:
                return _ANSWERS[type(query)](query, self._state)

    def due(self, now: Micros) -> list[DeadlinePassed]:
        """The deadlines that have passed, as commands to apply. Asking changes nothing."""
        return [DeadlinePassed(kind=kind, id=id_) for _, kind, id_ in passed_deadlines(self._state, now)]

    def next_deadline(self) -> Micros | None:
        return next_deadline(self._state)

    def desired(self, node: NodeId) -> Desired:
        """What a node shall be doing; of a former node the last that was decided."""
        nodes = self._state.nodes
        found = nodes.live.get(node) or next((former for former in nodes.former.values() if former.id == node), None)
        if found is None:
            raise Rejected(f"Node {node} is not part of the job any more.", code="stale-incarnation")
        return found.desired

    def is_connected(self, node: NodeId) -> bool:
        return self._state.nodes.is_connected(node)

    def num_nodes(self) -> int:
        """That are not gone, whether they are connected or not."""
        return len(self._state.nodes.live)

    def suspects(self) -> list[NodeId]:
        """Whose neighbours say that they lost somebody: for these the observations may be sure sooner."""
        return suspects(self._state)

    @property
    def detection(self) -> Detection:
        return self._state.detection

    def status(self) -> JobStatus:
        state = self._state
        world = state.rendezvous.world
        limits = Limits() if state.terms is None else state.terms.limits
        incident = state.restarts.incident
        warm, too_many = self._bystanders()
        return JobStatus(
            job_name=state.job_name,
            user=state.user,
            stage=state.stage,
            master_epoch=state.master_epoch,
            round=state.rendezvous.round,
            world_size=0 if world is None else world.world_size,
            num_restarts=state.restarts.num_restarts,
            verdict=self._why(),
            nodes=tuple(self._node_status(node, warm, too_many) for node in state.nodes.in_rank_order()),
            end=state.end,
            min_nodes=limits.min_nodes,
            max_nodes=limits.max_nodes,
            limits_version=state.limits_version,
            num_standby=len(warm),
            num_pending=len(too_many),
            distinct_failures=() if incident is None else tuple(incident.distinct),
            fleet=() if state.fleet is None else state.fleet.status(),
            shortage="" if state.fleet is None else state.fleet.verdict,
            digest=self.digest().hex(),
            checkpoints=state.checkpoints.status(),
            pre_check=state.pre_check.status(),
            datasets=data_progress.progress(state.data),
        )

    def goodput(self, now: Micros) -> GoodputStatus:
        """Where the time went up to now, which is not before the last command."""
        return goodput_status(self._state, now)

    def _why(self) -> str:
        """The last that was said, and behind it what an open round waits for, unless that was the last."""
        state = self._state
        if state.rendezvous.opening is None or state.end is not None:
            return state.verdict or "No node has attached yet."
        awaited = check_commands.describe(state) or state.rendezvous.verdict
        return state.verdict if awaited in state.verdict else f"{state.verdict} {awaited}".lstrip()

    def digest(self) -> bytes:
        """16 bytes that differ when anything in the state differs. Stored values and answers count by their history."""
        outline = replace(self._state, kv=self._state.kv.outline(), senders=self._state.senders.outline())
        return hashlib.blake2b(_ENCODER.encode(outline), digest_size=16).digest()

    def encode(self) -> bytes:
        """The snapshot. Dicts are encoded in the order they grew, so that decoding gives the very same state."""
        return _ENCODER.encode(self._state)

    @classmethod
    def decode(cls, data: bytes) -> Job:
        return cls(_DECODER.decode(data))

    @property
    def number(self) -> int:
        """Of the last applied command."""
        return self._state.number

    @property
    def now(self) -> Micros:
        """When the last command was applied."""
        return self._state.now

    @property
    def master_epoch(self) -> int:
        return self._state.master_epoch

    @property
    def job_name(self) -> str:
        return self._state.job_name

    @property
    def stage(self) -> Stage:
        return self._state.stage

    @property
    def end(self) -> JobEnd | None:
        return self._state.end

    @property
    def state(self) -> JobState:
        """For tests, invariants and the simulator: read only."""
        return self._state

    def _bystanders(self) -> tuple[dict[NodeId, None], dict[NodeId, None]]:
        """Who waits beside an active world on purpose, and who is too many."""
        state = self._state
        if not state.rendezvous.is_active:
            return {}, {}
        return dict.fromkeys(standby(state)), dict.fromkeys(pending(state))

    def _node_status(self, node: Node, warm: Container[NodeId], too_many: Container[NodeId]) -> NodeStatus:
        status: str = node.life.value
        if node.life is NodeLife.ALIVE and not self.is_connected(node.id):
            status = "disconnected"
        elif node.life is NodeLife.ALIVE and node.dismissed is not None:
            status = "leaving"
        elif node.life is NodeLife.ALIVE and node.finished_round:
            status = "finished"
        elif node.id in warm:
            status = STANDBY
        elif node.id in too_many:
            status = "pending"
        group_rank, num_workers = self._state.rendezvous.place_of(node.id)
        return NodeStatus(
            node=node.id,
            node_rank=node.rank,
            incarnation=node.incarnation,
            name=node.name,
            host=node.host,
            status=status,
            wish=type(node.desired.wish).__name__.lower(),
            step=node.step,
            check=self._check_result(node),
            group_rank=group_rank,
            local_world_size=num_workers,
        )

    def _check_result(self, node: Node) -> CheckResult | None:
        result = self._state.check.results.get(node.rank)
        return result if result is not None and result.node == node.id else None


_ANSWERS = {
    **fleet_commands.ANSWERS,
    **kv_store.ANSWERS,
    **sync_points.ANSWERS,
    **commits.ANSWERS,
    **data_commands.ANSWERS,
}

# msgspec's order="deterministic" takes dicts with str keys only, and ours are keyed by ids. It would also hide the
# order in which a dict grew, which is state as well: the same commands give the same order, and decoding keeps it.
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(JobState)
