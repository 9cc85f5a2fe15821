"""
The job: everything the control plane knows about one training, and every decision it takes.

A command comes in with the time, a reply and effects come out; there is no clock, thread, disk, network or chance in
here, so the master, the simulator and the replay of a journal run the same code to the same result. Each command is
checked first and applied whole, or `Rejected` and nothing has changed.
"""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from dlrover.core.checkpoints.peer_directory import PeerDirectory
from dlrover.core.decision import Decision
from dlrover.core.goodput.report import fault_of, goodput_status
from dlrover.core.membership.waiting import suspects
from dlrover.core.outcome import NotYet, Origin, Outcome
from dlrover.core.reactions import ANSWERS, HANDLERS, TABLES, decide, next_deadline, passed_deadlines
from dlrover.core.replay_guard import check_sender
from dlrover.core.state import DECISION_VERSION, JobState
from dlrover.core.status import job_status
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.goodput import AskFault, AskGoodput, GoodputStatus
from dlrover.protocol.messages.job import (
    AskStatus,
    Attached,
    Command,
    DeadlinePassed,
    Desired,
    JobEnd,
    JobStatus,
    Micros,
    NodeId,
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
        state.replay_guard.check_room(command, origin)
        decision = Decision.begin(state, now, TABLES)
        reply = decide(command, decision)
        state.number += 1
        state.now = now
        if isinstance(reply, Attached):
            reply = replace(reply, desired=state.nodes.live[reply.node].desired)
        state.replay_guard.store(origin, reply)
        if decision.verdicts:
            state.verdict = decision.verdicts[-1]
        return Outcome(reply, tuple(decision.effects), tuple(decision.verdicts))

    def answered(self, origin: Origin | None) -> Reply | None:
        """The reply of a command that was applied before; None for a new one. May raise `Rejected` (`ReplayGuard`)."""
        return self._state.replay_guard.answered(origin)

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
                return ANSWERS[type(query)](query, self._state)

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
            raise Rejected(f"Node {node} is not part of the job any more.", code=ErrorCode.STALE_INCARNATION)
        return found.desired

    def suspects(self) -> list[NodeId]:
        """Whose neighbours say that they lost a peer: for these the observations may be sure sooner."""
        return suspects(self._state)

    def status(self) -> JobStatus:
        return job_status(self._state, self.digest().hex())

    def goodput(self, now: Micros) -> GoodputStatus:
        """Where the time went up to now, which is not before the last command."""
        return goodput_status(self._state, now)

    def digest(self) -> bytes:
        """16 bytes that differ when anything in the state differs. Stored values and answers count by their history."""
        outline = replace(self._state, kv=self._state.kv.outline(), replay_guard=self._state.replay_guard.outline())
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
        """Read only."""
        return self._state


# msgspec's order="deterministic" takes dicts with str keys only, and ours are keyed by ids. It would also hide the
# order in which a dict grew, which is state as well: the same commands give the same order, and decoding keeps it.
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(JobState)
