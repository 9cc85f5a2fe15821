"""
The job: everything the control plane knows about one training, and every decision it takes.

A command comes in with the time, a reply and effects come out; there is no clock, thread, disk, network or chance in
here, so the master, the simulator and the replay of a journal run the same code to the same result. Each command is
checked first and applied whole, or `Rejected` and nothing has changed.

What a node shall do (its wish) is a function of the state. Commands only mark the nodes whose wish may be another one
now; after each command those are looked at again, and who got a new wish is told.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from dlrover.core import restarts as blame
from dlrover.core.nodes import Node, NodeLife, Nodes
from dlrover.core.rendezvous import Joined, Opening, Rendezvous, choose_world, explain_timeout, num_usable
from dlrover.core.restarts import Incident, Restarts
from dlrover.core.senders import Senders
from dlrover.core.turn import Origin, Outcome, Turn, micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages import (
    Attach,
    Attached,
    Command,
    DeadlineKind,
    DeadlinePassed,
    Desired,
    Done,
    End,
    ExitReason,
    FailureKind,
    FinishJob,
    FirstFailure,
    Idle,
    JobEnd,
    JobStatus,
    JobTerms,
    Join,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    Limits,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    NodeStatus,
    Reply,
    ReportFailure,
    ReportFinished,
    Run,
    Stage,
    StopCause,
    StopJob,
    TellNode,
    Wait,
    Wish,
    WorkerFailure,
)

__all__ = ["DECISION_VERSION", "HANDLERS", "Job", "JobState", "Origin", "Outcome"]

DECISION_VERSION = 1
"""Grows when the same commands would lead to another state: then only the snapshots of a journal can be used."""

DRAIN = 30.0
"""Seconds that nodes have for leaving after the end: the stop grace of workers at the end of a job [DECISIONS 19]."""
EXIT_TRAINING = 1
EXIT_RENDEZVOUS_TIMEOUT = 22
_SIGKILL = 9
_LARGEST = 2**53
"""No counter of an agent comes near; beyond it is rubbish, and adding to it must not overflow the encoding."""


class JobState(Struct, kw_only=True):
    """All that is durable. Plain data: its encoding is the snapshot, its digest is compared after a replay."""

    decision_version: int = DECISION_VERSION
    number: int = 0
    """Commands applied so far = number of the last record in the journal."""
    now: Micros = Micros(0)
    """When the last command was applied. Never goes back."""
    master_epoch: int = 0
    job_name: str = ""
    terms: JobTerms | None = None
    """Set by the first node that attaches."""
    stage: Stage = Stage.INIT
    end: JobEnd | None = None
    """Set from stage STOPPING on."""
    end_sentence: str = ""
    """The part of the end's message that stays when a better first failure is found."""
    drains_at: Micros | None = None
    """When nodes that have not left after the end are given up."""
    verdict: str = ""
    """The newest one."""
    nodes: Nodes = msgspec.field(default_factory=Nodes)
    rendezvous: Rendezvous = msgspec.field(default_factory=Rendezvous)
    restarts: Restarts = msgspec.field(default_factory=Restarts)
    senders: Senders = msgspec.field(default_factory=Senders)


class Job:
    """One training job. `apply` changes it, everything else only looks."""

    def __init__(self, state: JobState | None = None) -> None:
        self._state = JobState() if state is None else state

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
        """Apply the command whole, or raise `Rejected` with nothing changed."""
        state = self._state
        assert now >= state.now, f"the clock went back from {state.now} to {now}"
        answered = self.answered(origin)
        if answered is not None:
            return Outcome(answered)
        _check_sender(command, origin)
        turn = Turn(now)
        reply = HANDLERS[type(command)](self, command, turn)
        state.number += 1
        state.now = now
        self._tell(turn)
        if isinstance(reply, Attached):
            reply = replace(reply, desired=state.nodes.live[reply.node].desired)
        state.senders.store(origin, reply)
        if turn.verdicts:
            state.verdict = turn.verdicts[-1]
        return Outcome(reply, tuple(turn.effects), tuple(turn.verdicts))

    def answered(self, origin: Origin | None) -> Reply | None:
        """The reply of a command that was applied before; None for a new one. May raise `Rejected` (`Senders`)."""
        return self._state.senders.answered(origin)

    def due(self, now: Micros) -> list[DeadlinePassed]:
        """The deadlines that have passed, as commands to apply. Asking changes nothing."""
        return [DeadlinePassed(kind=kind, id=id_) for at, kind, id_ in sorted(self._deadlines()) if at <= now]

    def next_deadline(self) -> Micros | None:
        return min((at for at, _, _ in self._deadlines()), default=None)

    def desired(self, node: NodeId) -> Desired:
        """What a node shall be doing; of a former node the last that was decided."""
        nodes = self._state.nodes
        found = nodes.live.get(node) or next((former for former in nodes.former.values() if former.id == node), None)
        if found is None:
            raise Rejected(f"Node {node} is not part of the job any more.", code="stale-incarnation")
        return found.desired

    def is_connected(self, node: NodeId) -> bool:
        return self._state.nodes.is_connected(node)

    def status(self) -> JobStatus:
        state = self._state
        world = state.rendezvous.world
        return JobStatus(
            job_name=state.job_name,
            stage=state.stage,
            master_epoch=state.master_epoch,
            round=state.rendezvous.round,
            world_size=0 if world is None else world.world_size,
            num_restarts=state.restarts.num_restarts,
            verdict=state.verdict,
            nodes=tuple(self._node_status(node) for node in state.nodes.in_rank_order()),
            end=state.end,
            digest=self.digest().hex(),
        )

    def digest(self) -> bytes:
        """16 bytes that differ when anything in the state differs."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()

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

    # Commands. Each checks first and raises `Rejected`; below that it only changes.

    def _master_started(self, command: MasterStarted, turn: Turn) -> Reply:
        state = self._state
        if command.master_epoch <= state.master_epoch:
            raise Rejected(
                f"Master epoch {command.master_epoch} is not beyond {state.master_epoch}: another master took over.",
                code="old-epoch",
            )
        if command.job_name and state.job_name and command.job_name != state.job_name:
            raise Rejected(
                f"The journal belongs to job {state.job_name!r}, not to {command.job_name!r}.", code="job-differs"
            )
        outage = turn.now - state.now if state.master_epoch else 0
        state.master_epoch = command.master_epoch
        state.job_name = state.job_name or command.job_name
        state.nodes.master_restarted(turn.now)
        state.rendezvous.shift(outage)
        if state.drains_at is not None:
            state.drains_at = Micros(state.drains_at + outage)
        turn.touch_all()
        if state.end is not None and state.stage is Stage.STOPPED:
            # The former master may have died between its commit and its exit.
            turn.effects.append(FinishJob(state.end))
        return Done()

    def _attach(self, command: Attach, turn: Turn) -> Reply:
        state, nodes = self._state, self._state.nodes
        _check_attach(command)
        if state.terms is not None and command.terms != state.terms:
            raise Rejected(_differing_terms(state.terms, command.terms, command.host), code="terms-differ")
        node = nodes.of_launch(command.launch)
        if node is not None and 0 < command.incarnation < node.incarnation:
            raise Rejected(
                f"Incarnation {command.incarnation} of {node.label} is over; {node.incarnation} is the newest.",
                code="stale-incarnation",
            )
        holder = None
        if node is None and command.node_rank is not None:
            holder = nodes.holder(command.node_rank)
            if holder is not None and nodes.is_connected(holder.id):
                raise Rejected(
                    f"Node rank {command.node_rank} is asked for by {command.host} and held by {holder.host}, which is "
                    "alive. Give each node its own --node-rank, or none.",
                    code="rank-held",
                )

        if state.terms is None:
            state.terms = command.terms
        if holder is not None:
            self._lose(holder, NodeLife.GONE, f"{holder.label} is replaced by {command.host}", turn)
        if node is None:
            node = self._admit(command, turn)
        elif node.life is NodeLife.ALIVE and command.incarnation == node.incarnation:
            self._reattach(node, command, turn)
        else:
            self._renew(node, command, turn)
        turn.touch(node.id)
        self._advance(turn)
        return Attached(
            node=node.id,
            node_rank=node.rank,
            incarnation=node.incarnation,
            master_epoch=state.master_epoch,
            job_name=state.job_name,
            now=turn.now,
            desired=node.desired,  # `apply` puts in the newest when all wishes are known
        )

    def _join(self, command: JoinRendezvous, turn: Turn) -> Reply:
        rdzv = self._state.rendezvous
        node = self._state.nodes.current(command.node, command.incarnation)
        self._check_running()
        if command.round != rdzv.next_round or (rdzv.opening is None and rdzv.is_member(node.id)):
            state = "open" if rdzv.opening is not None else "not open"
            raise Rejected(
                f"{node.label} wants to join round {command.round}; round {rdzv.next_round} is next and {state}.",
                code="stale-round",
            )
        if node.finished_round:
            raise Rejected(f"{node.label} has finished in round {node.finished_round}.", code="finished")
        if command.local_world_size < 1 or not command.offer:
            raise Rejected("A join needs at least one worker and an offer of host:port.", code="malformed")
        if rdzv.is_offer_used(node.id, command.offer):
            raise Rejected(
                f"{command.offer} served an earlier round; a port is never used for two. Bind another.",
                code="offer-used",
            )

        node.local_world_size = command.local_world_size
        rdzv.join(node.id, Joined(node.rank, command.local_world_size, command.offer), turn.now)
        turn.touch(node.id)
        self._advance(turn)
        return Done()

    def _report_failure(self, command: ReportFailure, turn: Turn) -> Reply:
        rdzv, restarts = self._state.rendezvous, self._state.restarts
        node = self._state.nodes.current(command.node, command.incarnation)
        if not command.failures:
            raise Rejected("A failure report names at least one failure.", code="malformed")
        if command.round > rdzv.round or command.round < 1:
            raise Rejected(f"There was no round {command.round} yet; the newest is {rdzv.round}.", code="unknown-round")

        if command.step is not None:
            node.step = command.step if node.step is None else max(node.step, command.step)
        lived = command.lived if math.isfinite(command.lived) else 0.0
        first = FirstFailure(
            failure=blame.first_of(command.failures),
            node_rank=node.rank,
            host=node.host,
            round=command.round,
            step=command.step,
        )
        incident = restarts.incident
        if incident is not None and incident.round == command.round:
            self._hear_more(incident, first, lived, turn)
        elif self._is_running(node) and command.round == rdzv.round:
            self._begin_incident(first, lived, turn)
        self._advance(turn)
        return Done()

    def _report_finished(self, command: ReportFinished, turn: Turn) -> Reply:
        rdzv = self._state.rendezvous
        node = self._state.nodes.current(command.node, command.incarnation)
        if command.round > rdzv.round or command.round < 1:
            raise Rejected(f"There was no round {command.round} yet; the newest is {rdzv.round}.", code="unknown-round")

        if command.step is not None:
            node.step = command.step if node.step is None else max(node.step, command.step)
        if command.round == rdzv.round:
            self._finish_node(node, turn)
        self._advance(turn)
        return Done()

    def _leave(self, command: LeaveJob, turn: Turn) -> Reply:
        state = self._state
        node = state.nodes.current(command.node, command.incarnation)

        why = f"{node.label} left ({command.reason.value})" + (f": {command.message}" if command.message else "")
        self._lose(node, NodeLife.LEFT, why, turn)
        is_final = command.reason in (LeaveReason.STOPPED_BY_USER, LeaveReason.FAILED, LeaveReason.JOB_ENDED)
        if state.end is None and not state.nodes.live and is_final:
            by_user = command.reason is LeaveReason.STOPPED_BY_USER
            self._end(
                ExitReason.STOPPED_BY_USER if by_user else ExitReason.WORKER_ERROR,
                f"{why[0].upper()}{why[1:]}, and no other node is there.",
                turn,
            )
        self._advance(turn)
        return Done()

    def _node_disconnected(self, command: NodeDisconnected, turn: Turn) -> Reply:
        nodes = self._state.nodes
        node = nodes.current(command.node, command.incarnation)
        if nodes.is_connected(node.id):
            nodes.stream_broke(node, turn.now)
        return Done()

    def _node_silent(self, command: NodeSilent, turn: Turn) -> Reply:
        node = self._state.nodes.current(command.node, command.incarnation)
        silence = (turn.now - command.last_seen_at) / micros(1.0)
        self._lose(node, NodeLife.GONE, f"{node.label} was silent for {silence:.0f} s", turn)
        self._advance(turn)
        return Done()

    def _deadline_passed(self, command: DeadlinePassed, turn: Turn) -> Reply:
        """A deadline that is no longer due (somebody joined, came back) is a harmless no-op."""
        state = self._state
        match command.kind:
            case DeadlineKind.NODE_GONE:
                node = state.nodes.live.get(NodeId(command.id))
                if node is not None and node.id in state.nodes.broken and self._gone_at(node.id) <= turn.now:
                    self._lose(node, NodeLife.GONE, f"{node.label} lost its connection and did not come back", turn)
            case DeadlineKind.DRAIN:
                if state.drains_at is not None and state.drains_at <= turn.now:
                    for _, node in sorted(state.nodes.live.items()):
                        self._lose(node, NodeLife.GONE, f"{node.label} did not leave in time", turn)
            case DeadlineKind.LAST_CALL | DeadlineKind.JOIN_TIMEOUT:
                pass  # the rendezvous looks at the clock itself, just below
        self._advance(turn)
        return Done()

    def _stop_job(self, command: StopJob, turn: Turn) -> Reply:
        if self._state.end is None:
            why = f": {command.message}" if command.message else "."
            self._end(ExitReason.STOPPED_BY_USER, f"The job was stopped on request{why}", turn)
            self._advance(turn)
        return Done()

    # Decisions.

    def _admit(self, command: Attach, turn: Turn) -> Node:
        state, nodes, rdzv = self._state, self._state.nodes, self._state.rendezvous
        rank = nodes.lowest_free_rank() if command.node_rank is None else command.node_rank
        former = nodes.former.get(rank)
        if former is not None:
            state.senders.forget(former.id)
        node = nodes.admit(command, rank)
        state.senders.begin(node.id, node.incarnation)
        if state.end is None:
            if rdzv.world is None and command.running_round > rdzv.round:
                # Rounds of a life whose journal was lost must not be numbered again: their stores may still answer.
                rdzv.round = command.running_round
                turn.touch_all()
            rdzv.expect(node.id, node.rank)
            if rdzv.world is None and rdzv.opening is None:
                self._open(StopCause.MEMBERSHIP, "the job begins", turn)
        return node

    def _reattach(self, node: Node, command: Attach, turn: Turn) -> None:
        """The same life on a new stream: nothing restarts."""
        rdzv = self._state.rendezvous
        self._state.nodes.broken.pop(node.id, None)
        node.host = command.host
        if command.is_finished and command.running_round == rdzv.round:
            self._finish_node(node, turn)  # its report may have been lost with the stream

    def _renew(self, node: Node, command: Attach, turn: Turn) -> None:
        """A new life of the agent: the workers of the old one are dead [DECISIONS 17]."""
        state, rdzv = self._state, self._state.rendezvous
        was_running = self._is_running(node)
        state.nodes.renew(node, command)
        state.senders.begin(node.id, node.incarnation)
        if state.end is not None or node.finished_round:
            return
        if was_running:
            failure = WorkerFailure(
                global_rank=rdzv.spec(node.id).first_global_rank,
                local_rank=0,
                pid=0,
                kind=FailureKind.SIGNAL,
                signal=_SIGKILL,
                exited_at=turn.now,
                message="the agent of the node was restarted and its workers died with the old one",
            )
            first = FirstFailure(failure=failure, node_rank=node.rank, host=node.host, round=rdzv.round)
            self._begin_incident(first, 0.0, turn)
        else:
            rdzv.expect(node.id, node.rank)

    def _begin_incident(self, first: FirstFailure, lived: float, turn: Turn) -> None:
        """The first report of a round's failures: decide, and open the next round without waiting for the others."""
        state = self._state
        incident = Incident(round=first.round, first=first, began_at=turn.now, step=first.step, lived=lived)
        state.restarts.incident = incident
        if blame.is_secondary(first.failure):
            self._say(f"{blame.describe(first)} The next round opens; the first failure may still be reported.", turn)
        elif not self._judge(incident, turn):
            return
        self._open(StopCause.FAILURE, blame.describe(first), turn)

    def _hear_more(self, incident: Incident, first: FirstFailure, lived: float, turn: Turn) -> None:
        """A further report of a round that has failed already. It never costs a second restart."""
        state = self._state
        is_late = turn.now - incident.began_at > micros(blame.LATE_FAILURE)
        if is_late and (incident.is_settled or state.end is not None):
            return
        is_better = blame.improve(incident, first)
        if incident.is_settled:
            if is_better:
                self._say(f"{blame.describe(incident.first)} It was the first failure of the round.", turn)
            return
        blame.note(incident, first.step, lived)
        if state.end is not None:
            if state.end.first_failure is not None and is_better:
                message = f"{blame.describe(incident.first)} {state.end_sentence}"
                state.end = replace(state.end, first_failure=incident.first, message=message)
                turn.touch_all()
        elif is_better and not blame.is_secondary(incident.first.failure):
            self._judge(incident, turn)

    def _judge(self, incident: Incident, turn: Turn) -> bool:
        """Restart or end the job after this incident. Returns whether it goes on."""
        state = self._state
        assert state.terms is not None, "workers ran before any node attached"
        decision = blame.decide(state.terms.restarts, state.restarts, incident)
        self._say(f"{blame.describe(incident.first)} {decision.sentence}", turn)
        if decision.reason is not None:
            self._end(decision.reason, decision.sentence, turn, first=incident.first)
        return decision.reason is None

    def _finish_node(self, node: Node, turn: Turn) -> None:
        """All workers of the node ended well in the newest round: it waits at the exit barrier."""
        rdzv = self._state.rendezvous
        if self._state.end is not None or node.finished_round or not rdzv.is_member(node.id):
            return
        node.finished_round = rdzv.round
        rdzv.finish(node.id, node.rank)
        turn.touch(node.id)
        if rdzv.is_all_finished():
            self._end(ExitReason.COMPLETED, f"All {len(rdzv.finished)} nodes finished.", turn)

    def _lose(self, node: Node, life: NodeLife, why: str, turn: Turn) -> None:
        """A live node is there no more; if its world needs it, the others meet again, at no cost of the budget."""
        state, rdzv = self._state, self._state.rendezvous
        was_running = self._is_running(node)
        state.nodes.retire(node, life)
        rdzv.forget(node.id, node.rank)
        if state.end is not None:
            return
        self._say(f"{why[0].upper()}{why[1:]}.", turn)
        if was_running:
            self._open(StopCause.MEMBERSHIP, why, turn)

    def _open(self, cause: StopCause, reason: str, turn: Turn) -> None:
        state, rdzv = self._state, self._state.rendezvous
        members = [
            member.node
            for member in (rdzv.world.members if rdzv.world is not None else ())
            if member.node in state.nodes.live and member.node not in rdzv.finished
        ]
        rdzv.open(Opening(cause, reason), members, turn.now)
        for node in members:
            turn.touch(node)

    def _advance(self, turn: Turn) -> None:
        """After each command: let the rendezvous go as far as it can, and the ended job end."""
        state, rdzv = self._state, self._state.rendezvous
        if state.end is not None:
            self._finish_job(state.end, turn)
            return
        if state.terms is None:
            return
        limits = state.terms.limits
        if rdzv.opening is None:
            reason = rdzv.reason_to_grow(limits)
            if reason is None:
                return
            self._say(f"{reason[0].upper()}{reason[1:]}.", turn)
            self._open(StopCause.MEMBERSHIP, reason, turn)
        if rdzv.finished and num_usable(len(rdzv.waiting) + len(rdzv.expected), limits) < limits.min_nodes:
            self._end_unfinished(limits, turn)
            self._advance(turn)
            return
        rdzv.note_shortage(limits, turn.now)
        gives_up_at = rdzv.gives_up_at(limits)
        if gives_up_at is not None and gives_up_at <= turn.now:
            is_anybody_there = bool(state.nodes.live)
            reason_ = ExitReason.RENDEZVOUS_TIMEOUT if is_anybody_there else ExitReason.NOT_ENOUGH_NODES
            self._end(reason_, explain_timeout(rdzv, limits), turn, exit_code=EXIT_RENDEZVOUS_TIMEOUT)
            self._advance(turn)
            return
        self._try_world(state.terms, turn)

    def _try_world(self, terms: JobTerms, turn: Turn) -> None:
        """Complete the open round if its time has come, and charge what led to it."""
        state, rdzv, restarts = self._state, self._state.rendezvous, self._state.restarts
        world, sentence = choose_world(rdzv, terms.limits, turn.now)
        if world is None:
            if sentence != rdzv.verdict:
                rdzv.verdict = sentence
                self._say(sentence, turn)
            return
        incident = restarts.open_incident(rdzv.round)
        if incident is not None and blame.is_secondary(incident.first.failure):
            # No better failure was reported. If a member is missing, that is the cause and nobody's budget pays.
            incident.is_member_lost = any(not self.is_connected(node) for node in rdzv.group_ranks)
            if not self._judge(incident, turn):
                self._advance(turn)
                return
        restarts.settle(terms.restarts)
        rdzv.complete(world)
        rdzv.verdict = sentence
        self._say(sentence, turn)
        state.stage = Stage.RUNNING
        for member in world.members:
            turn.touch(member.node)
        for node in rdzv.expected:
            turn.touch(node)  # they missed it and are asked for the next

    def _end_unfinished(self, limits: Limits, turn: Turn) -> None:
        """Some nodes finished, another failed or was lost, and too few are left for a world."""
        rdzv = self._state.rendezvous
        incident = self._state.restarts.open_incident(rdzv.round)
        num_left = len(rdzv.waiting) + len(rdzv.expected)
        num_finished = len(rdzv.finished)
        assert rdzv.opening is not None, "nothing failed"
        sentence = (
            f"{num_finished} node{'' if num_finished == 1 else 's'} had finished already, and the {num_left} left "
            f"cannot form a world of at least {limits.min_nodes}."
        )
        if incident is not None:
            self._end(ExitReason.WORKER_ERROR, sentence, turn, first=incident.first)
        else:
            why = rdzv.opening.reason
            self._end(ExitReason.NOT_ENOUGH_NODES, f"{why[0].upper()}{why[1:]}. {sentence}", turn)

    def _end(
        self,
        reason: ExitReason,
        sentence: str,
        turn: Turn,
        *,
        first: FirstFailure | None = None,
        exit_code: int | None = None,
    ) -> None:
        state = self._state
        assert state.end is None, f"the job ended twice: {state.end} and {sentence}"
        if exit_code is None:
            exit_code = 0 if reason is ExitReason.COMPLETED else EXIT_TRAINING
        state.end_sentence = sentence
        state.end = JobEnd(
            reason=reason,
            exit_code=exit_code,
            message=sentence if first is None else f"{blame.describe(first)} {sentence}",
            first_failure=first,
            num_restarts=state.restarts.num_restarts,
            num_rounds=state.rendezvous.round,
        )
        state.stage = Stage.STOPPING
        state.drains_at = Micros(turn.now + micros(DRAIN))
        state.rendezvous.close()
        self._say(f"The job ends ({reason.value}): {sentence}", turn)
        turn.touch_all()

    def _finish_job(self, end: JobEnd, turn: Turn) -> None:
        """The last node has left: the master may go, too."""
        state = self._state
        if state.stage is Stage.STOPPING and not state.nodes.live:
            state.stage = Stage.STOPPED
            state.drains_at = None
            turn.effects.append(FinishJob(end))

    # What each node shall do.

    def _wish(self, node: Node) -> Wish:
        state, rdzv = self._state, self._state.rendezvous
        if state.end is not None:
            return End(state.end)
        if node.finished_round:
            return Idle(f"your workers finished in round {node.finished_round}; others still work")
        if node.id in rdzv.waiting:
            return Wait("you have joined; a round will start with you when there is room")
        if rdzv.is_active and rdzv.is_member(node.id):
            return Run(rdzv.spec(node.id))
        if rdzv.opening is not None and rdzv.is_member(node.id):
            return Join(rdzv.next_round, rdzv.opening.cause, rdzv.opening.reason)
        return Join(rdzv.next_round, StopCause.MEMBERSHIP, f"round {rdzv.next_round} is the next to form")

    def _tell(self, turn: Turn) -> None:
        """Give new wishes to the touched nodes, and have those told whose wish is another one than before."""
        state, live = self._state, self._state.nodes.live
        for id_ in sorted(live if turn.is_all_touched else turn.touched):
            node = live.get(id_)
            if node is None:
                continue
            wish = self._wish(node)
            if wish != node.desired.wish or node.desired.master_epoch != state.master_epoch or not node.desired.number:
                node.desired = Desired(node.desired.number + 1, state.master_epoch, wish)
                turn.effects.append(TellNode(node.id))

    def _say(self, verdict: str, turn: Turn) -> None:
        turn.verdicts.append(verdict)

    # Looking.

    def _deadlines(self) -> list[tuple[Micros, DeadlineKind, int]]:
        state, rdzv = self._state, self._state.rendezvous
        has_spare = rdzv.has_spare() if state.nodes.broken else False
        deadlines: list[tuple[Micros, DeadlineKind, int]] = [
            (state.nodes.gone_at(node, has_spare=has_spare), DeadlineKind.NODE_GONE, node)
            for node in state.nodes.broken
        ]
        if state.drains_at is not None:
            deadlines.append((state.drains_at, DeadlineKind.DRAIN, state.master_epoch))
        if state.terms is not None and state.end is None:
            limits = state.terms.limits
            for at, kind in (
                (rdzv.call_ends_at(limits), DeadlineKind.LAST_CALL),
                (rdzv.gives_up_at(limits), DeadlineKind.JOIN_TIMEOUT),
            ):
                if at is not None:
                    deadlines.append((at, kind, rdzv.next_round))
        return deadlines

    def _is_running(self, node: Node) -> bool:
        """Whether the node shall run workers of the active world right now."""
        rdzv = self._state.rendezvous
        return self._state.end is None and rdzv.is_active and rdzv.is_member(node.id) and not node.finished_round

    def _gone_at(self, node: NodeId) -> Micros:
        return self._state.nodes.gone_at(node, has_spare=self._state.rendezvous.has_spare())

    def _node_status(self, node: Node) -> NodeStatus:
        status: str = node.life.value
        if node.life is NodeLife.ALIVE and not self.is_connected(node.id):
            status = "disconnected"
        elif node.life is NodeLife.ALIVE and node.finished_round:
            status = "finished"
        return NodeStatus(
            node=node.id,
            node_rank=node.rank,
            incarnation=node.incarnation,
            host=node.host,
            status=status,
            wish=type(node.desired.wish).__name__.lower(),
            step=node.step,
        )

    def _check_running(self) -> None:
        if self._state.end is not None:
            raise Rejected(f"The job has ended: {self._state.end.message}", code="job-ended")


def _check_sender(command: Command, origin: Origin | None) -> None:
    """What a command says of its node must be what the stream says of its sender."""
    if origin is None or not isinstance(command, JoinRendezvous | ReportFailure | ReportFinished | LeaveJob):
        return
    if (command.node, command.incarnation) != (origin.node, origin.incarnation):
        raise Rejected(
            f"Node {origin.node} in incarnation {origin.incarnation} may not speak for node {command.node} in "
            f"incarnation {command.incarnation}.",
            code="wrong-sender",
        )


def _check_attach(command: Attach) -> None:
    counters = (command.incarnation, command.running_round, command.node_rank or 0)
    if not command.launch or command.local_world_size < 1 or min(counters) < 0 or max(counters) > _LARGEST:
        raise Rejected(
            "An attach needs a launch, at least one worker, and no negative or absurd number in node_rank, "
            "incarnation and running_round.",
            code="malformed",
        )


def _differing_terms(ours: JobTerms, theirs: JobTerms, host: str) -> str:
    differences = [
        f"{field} is {getattr(part, field)!r} in the job and {getattr(other, field)!r} there"
        for part, other in ((ours.limits, theirs.limits), (ours.restarts, theirs.restarts))
        for field in part.__struct_fields__
        if getattr(part, field) != getattr(other, field)
    ]
    return f"{host} was started with other options than the job: {'; '.join(differences)}. Start all nodes alike."


HANDLERS: dict[type[Command], Callable[[Job, Any, Turn], Reply]] = {
    MasterStarted: Job._master_started,
    Attach: Job._attach,
    JoinRendezvous: Job._join,
    ReportFailure: Job._report_failure,
    ReportFinished: Job._report_finished,
    LeaveJob: Job._leave,
    NodeDisconnected: Job._node_disconnected,
    NodeSilent: Job._node_silent,
    DeadlinePassed: Job._deadline_passed,
    StopJob: Job._stop_job,
}
"""Which command does what. A test holds it against the union."""

# msgspec's order="deterministic" takes dicts with str keys only, and ours are keyed by ids. It would also hide the
# order in which a dict grew, which is state as well: the same commands give the same order, and decoding keeps it.
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(JobState)
