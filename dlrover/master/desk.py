"""
The desk: every request of the job passes here, in one order, and leaves only when it is durable.

One task does all of it, turn by turn: take what gathered, let the core decide, write it as one transaction, then
release replies, pushes and effects. While the disk works, the next turn's requests gather; so load batches itself and
no lock is needed. Timers are turns too: the task sleeps until the next deadline of the job or of the observations.

When the journal cannot be written, the undurable decisions are thrown away with the state that holds them, the state
is read again from the journal, and commands are refused for now. Questions and heartbeats go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.core.observations import SILENCE, Observations
from dlrover.core.sequence import Batch, CommitSequence, CoreFault
from dlrover.core.turn import Origin, Outcome
from dlrover.master.clock import MasterClock
from dlrover.master.keeper import Keeper
from dlrover.master.roster import Line, Roster
from dlrover.master.work import SHORTEST_RETRY, Work
from dlrover.protocol.codec import Question, Unreadable
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.frames import Ack, Beat, FromAgent, Refusal, Request
from dlrover.protocol.messages import (
    MAX_REQUESTS_IN_WORK,
    Attach,
    Attached,
    Command,
    DeadlinePassed,
    Desired,
    FinishJob,
    JobEnd,
    JobStatus,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Query,
    Reply,
    TellNode,
)
from dlrover.protocol.serving import AgentStream

log = logging.getLogger(__name__)

LONGEST_NAP = 5.0
"""Seconds. Also how closely the desk notices that it was itself stopped or starved."""
LATE = 100_000
"""Microseconds by which a turn may be late before deadlines are held back by its lateness."""
RETRY_PERIOD = 1_000_000
"""Microseconds between two attempts to write a journal that could not be written."""
NEVER = Micros(2**62)
SERVICE_TIME = 0.0005
"""Rough seconds of work per request: those refused are told to come back spread over the time their number needs."""


class Desk:
    """Implements the seam of `protocol.serving`; `run` is its one task."""

    def __init__(
        self, keeper: Keeper, job: Job, clock: MasterClock, *, job_name: str, silence: float = SILENCE
    ) -> None:
        """`silence`: seconds without a heartbeat after which a node is given up."""
        self._keeper = keeper
        self._clock = clock
        self._job_name = job_name
        self._roster = Roster()
        self._observations = Observations(clock.now(), silence=silence)
        self._queue: list[Work] = []
        self._findings: dict[NodeId, NodeDisconnected | NodeSilent] = {}  # kept until they are durable
        self._num_in_work = 0
        self._num_refused = 0  # since the desk was last empty
        self._wake = asyncio.Event()
        self._poison: set[bytes] = set()  # commands that broke the core once
        self._failed_bytes = 0  # size of what could not be written; 0 while the journal works
        self._retry_at = Micros(0)  # when the journal is tried again
        self._deadlines_from = NEVER  # no deadline passes before `MasterStarted` has moved it by the outage
        self._verdict = ""
        self._adopt(job)
        self.finished: asyncio.Future[JobEnd] = asyncio.get_running_loop().create_future()

    # The seam towards the wire.

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None:
        line = self._roster.line(stream)
        now = self._clock.now()
        for parcel in parcels:
            match parcel:
                case Request():
                    self._accept(line, parcel)
                case Beat(heartbeat=heartbeat):
                    if (heartbeat.node, heartbeat.incarnation) == (line.node, line.incarnation):
                        with contextlib.suppress(Rejected):  # found silent a moment ago: the core decides, not the beat
                            self._observations.heard(heartbeat, now)
                        self._roster.remind(line, self._desired, now)
                case Ack(number=number):
                    self._roster.acknowledge(line, number)
                case Unreadable():
                    stream.send(Refusal(id=parcel.id, code=parcel.code, message=parcel.message))

    def closed(self, stream: AgentStream) -> None:
        finding = self._roster.close(stream)
        if finding is not None:
            # How far the node had come goes with it: without it a job whose agents die now and then seems to stand still.
            self._findings[finding.node] = replace(finding, step=self._observations.step(finding.node))
            self._observations.forget(finding.node)
            self._wake.set()

    async def ask(self, question: Question) -> Reply:
        work = Work(question, answer=asyncio.get_running_loop().create_future())
        self._enqueue(work)
        assert work.answer is not None
        return await work.answer

    # The task.

    async def begin(self, master_epoch: int) -> None:
        """The first command of this life; nothing is served before it is durable. Raises what the journal raises."""
        self._poison = await self._keeper.quarantined()
        work = Work(MasterStarted(master_epoch, self._job_name), answer=asyncio.get_running_loop().create_future())
        self._queue.append(work)
        self._num_in_work += 1
        await self._turn(self._clock.now())
        assert work.answer is not None
        await work.answer
        self._deadlines_from = self._clock.now()

    async def run(self) -> None:
        """Until cancelled. Raises Fenced or JournalError: the process must end, and nothing more is released."""
        while True:
            target = self._next_turn_at()
            nap = max(0.0, (target - self._clock.now()) / 1e6)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(nap):
                    await self._wake.wait()
            self._wake.clear()
            self._note_lateness(target)
            if self._failed_bytes and self._clock.now() >= self._retry_at:
                await self._try_again()
            await self._turn(target)

    def _next_turn_at(self) -> Micros:
        now = self._clock.now()
        longest = Micros(now + int(LONGEST_NAP * 1e6))
        if self._failed_bytes:
            return self._retry_at
        deadlines = [at for at in (self._job.next_deadline(), self._observations.next_deadline()) if at is not None]
        soonest = min(deadlines, default=longest)
        return Micros(min(longest, max(soonest, self._deadlines_from)))

    def _note_lateness(self, target: Micros) -> None:
        """If we were late, so may be what others sent in time: give it the same time before anybody is given up."""
        now = self._clock.now()
        if now - target > LATE:
            self._deadlines_from = Micros(max(self._deadlines_from, now + (now - target)))
            log.warning("desk late by_seconds=%.1f: deadlines wait as long", (now - target) / 1e6)

    async def _turn(self, due_at: Micros) -> None:
        works, self._queue = self._queue, []
        if self._failed_bytes:
            works = self._refuse_commands(works)
        staged: dict[int, Work] = {}
        rejected: list[tuple[Work, Rejected]] = []
        now = self._clock.now()
        everything = [*self._due(now, due_at), *works]
        began_at = time.thread_time()
        for index, work in enumerate(everything):
            try:
                staged[self._stage(work, now)] = work
            except Rejected as error:
                rejected.append((work, error))
            except CoreFault as fault:
                others = everything[:index] + everything[index + 1 :]
                self._queue[:0] = [other for other in others if other.is_from_outside]
                await self._quarantine(work, fault)
                return
        batch = self._sequence.take()
        self._keeper.spent(time.thread_time() - began_at)
        if batch is None and not rejected:
            return
        try:
            await self._write(batch)
        except Unavailable as error:
            await self._fall_back(error, batch, [*staged.values(), *(work for work, _ in rejected)])
            return
        self._release(batch, staged, now)
        for work, rejection in rejected:
            self._reject(work, rejection)
        if not self._queue:
            self._num_refused = 0
        await self._save_snapshot()

    def _stage(self, work: Work, now: Micros) -> int:
        if isinstance(work.body, Query):
            return self._sequence.stage_query(work.body)
        if self._is_poison(work.body):
            raise Rejected(f"{type(work.body).__name__} broke the master once and is refused since.", code="internal")
        return self._sequence.stage(work.body, now, work.origin)

    def _due(self, now: Micros, due_at: Micros) -> list[Work]:
        """What nobody sent but time or silence says."""
        is_trusted = now >= self._deadlines_from  # else what was sent in time may still be on its way to us
        if is_trusted:
            for finding in self._observations.tick(now, due_at):
                self._findings[finding.node] = finding
        if self._failed_bytes:
            return []
        commands: list[Command] = list(self._findings.values())
        if is_trusted:
            commands += [command for command in self._job.due(now) if not self._is_poison(command)]
        return [Work(command) for command in commands]

    def _is_poison(self, command: Command) -> bool:
        return bool(self._poison) and msgspec.msgpack.encode(command) in self._poison

    async def _write(self, batch: Batch | None) -> None:
        if batch is not None and batch.records:
            await self._keeper.append(batch)
        else:
            await self._keeper.check_fence()

    def _release(self, batch: Batch | None, staged: dict[int, Work], now: Micros) -> None:
        """Durable: from here on everybody may know."""
        told: dict[NodeId, None] = {}
        ended: JobEnd | None = None
        for released in () if batch is None else self._sequence.committed(batch):
            work, outcome = staged[released.ticket], released.outcome
            self._settle(work)
            reply = outcome.reply
            if isinstance(reply, Attached) and work.line is not None:
                self._attach(work.line, reply, now)
            elif isinstance(reply, JobStatus):
                reply = self._with_steps(reply)
            work.succeed(reply)
            self._log(outcome)
            for effect in outcome.effects:
                match effect:
                    case TellNode(node=node):
                        told[node] = None
                    case FinishJob(end=end):
                        ended = end
        self._roster.push(told, self._desired, now)
        if ended is not None and not self.finished.done():
            self.finished.set_result(ended)

    def _attach(self, line: Line, attached: Attached, now: Micros) -> None:
        self._findings.pop(attached.node, None)  # of an older stream
        if line.is_open:
            self._roster.attach(line, attached, now)
            self._observations.attached(attached.node, attached.incarnation, now)
        else:
            self._findings[attached.node] = NodeDisconnected(node=attached.node, incarnation=attached.incarnation)
            self._wake.set()
        log.info(
            "attached node=%d node_rank=%d incarnation=%d peer=%s",
            attached.node,
            attached.node_rank,
            attached.incarnation,
            line.stream.peer,
        )

    def _reject(self, work: Work, error: Rejected) -> None:
        self._settle(work)
        if not work.is_from_outside and isinstance(work.body, Command):
            # It came too late: the node is gone or back already. Should a deadline stay due all the same, do not spin.
            log.debug("finding refused command=%s reason=%s", type(work.body).__name__, error)
            if isinstance(work.body, DeadlinePassed):
                self._deadlines_from = Micros(self._clock.now() + LATE)
        else:
            log.info("refused command=%s code=%s reason=%s", type(work.body).__name__, error.code, error)
        work.fail(error)

    def _settle(self, work: Work) -> None:
        """It was decided: no longer in work, or no longer to be found again."""
        if work.is_from_outside:
            self._num_in_work -= 1
        elif isinstance(work.body, NodeDisconnected | NodeSilent):
            if self._findings.get(work.body.node) == work.body:
                del self._findings[work.body.node]
            if isinstance(work.body, NodeSilent):
                self._roster.end(
                    work.body.node, work.body.incarnation
                )  # should it wake up, it has to present itself anew

    def _with_steps(self, status: JobStatus) -> JobStatus:
        """The job knows the steps of reports only; heartbeats know newer ones."""
        steps = self._observations.steps()
        nodes = (replace(node, step=steps.get(node.node, node.step)) for node in status.nodes)
        return replace(status, nodes=tuple(nodes))

    def _log(self, outcome: Outcome) -> None:
        for verdict in outcome.verdicts:
            if verdict != self._verdict:
                log.info("verdict %s", verdict)
                self._verdict = verdict

    # When things go wrong.

    async def _fall_back(self, error: Unavailable, batch: Batch | None, works: list[Work]) -> None:
        """Not durable, so it never happened: forget the state that saw it."""
        if not self._failed_bytes:
            log.error("journal cannot be written, commands are refused until it can: %s", error)
        self._failed_bytes = max(64 * 1024, sum(map(len, batch.records)) if batch is not None else 0)
        self._retry_at = Micros(self._clock.now() + RETRY_PERIOD)
        await self._rebuild()
        late, self._queue = self._queue, []
        for work in [*works, *late]:
            self._settle_unwritten(work, error)

    def _refuse_commands(self, works: list[Work]) -> list[Work]:
        """While the journal cannot be written; gives what can be answered all the same."""
        error = Unavailable("The master's journal cannot be written now; the command changed nothing.", 1.0)
        for work in works:
            if not isinstance(work.body, Query):
                self._settle_unwritten(work, error)
        return [work for work in works if isinstance(work.body, Query)]

    def _settle_unwritten(self, work: Work, error: Unavailable) -> None:
        if work.is_from_outside:
            self._num_in_work -= 1
            work.fail(error)

    async def _try_again(self) -> None:
        try:
            await self._keeper.probe(self._failed_bytes)
        except Unavailable:
            self._retry_at = Micros(self._clock.now() + RETRY_PERIOD)
            return
        self._failed_bytes = 0
        log.warning("journal can be written again")

    async def _quarantine(self, work: Work, fault: CoreFault) -> None:
        """The core failed in the middle of a command: its state is worth nothing, read it again without that one."""
        log.error("core fault command=%s", type(work.body).__name__, exc_info=fault)
        command = msgspec.msgpack.encode(work.body)
        self._poison.add(command)
        try:
            await self._keeper.quarantine(command, repr(fault.__cause__ or fault))
        except Unavailable as error:
            log.warning("quarantine not written reason=%s", error)
        await self._rebuild()
        self._reject(
            work, Rejected(f"{type(work.body).__name__} broke the master; nothing was changed.", code="internal")
        )
        self._wake.set()

    async def _rebuild(self) -> None:
        self._adopt(await self._keeper.restore())

    def _adopt(self, job: Job) -> None:
        self._job = job
        self._sequence = CommitSequence(job, master_epoch=self._keeper.master_epoch, next_number=job.number + 1)

    async def _save_snapshot(self) -> None:
        """Between two turns the state is exactly what is durable."""
        if not self._keeper.wants_snapshot or self._clock.now() < self._retry_at:
            return
        try:
            assert self._sequence.is_settled, "a snapshot of what is not durable"
            await self._keeper.save_snapshot(self._job.number + 1, self._job.encode())
        except Unavailable as error:
            self._retry_at = Micros(self._clock.now() + RETRY_PERIOD)
            log.warning("snapshot not written reason=%s", error)

    # Coming in.

    def _accept(self, line: Line, request: Request) -> None:
        if isinstance(request.body, Attach) and line.has_presented:
            text = "this stream is attached already; another node needs its own"
            line.stream.send(Refusal(id=request.id, code="attached", message=text))
            return
        if isinstance(request.body, Attach | Query):
            line.has_presented |= isinstance(request.body, Attach)
            self._enqueue(Work(request.body, line=line, id=request.id))
            return
        if line.node is None or line.incarnation is None:
            text = "attach first: the stream's first request must be an Attach"
            line.stream.send(Refusal(id=request.id, code="not-attached", message=text))
            return
        origin = Origin(line.node, line.incarnation, request.sequence)
        if request.sequence < 1:
            text = "a command needs a sequence number from 1 on, or it could be applied twice"
            line.stream.send(Refusal(id=request.id, code="malformed", message=text))
            return
        work = Work(request.body, origin, line, request.id)
        if not line.gate.admits(request.sequence):
            work.fail(Unavailable("an earlier command of this node was refused for now", self._retry_after()))
            return
        line.gate.passed(request.sequence)
        self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        if self._num_in_work >= MAX_REQUESTS_IN_WORK:
            self._num_refused += 1
            text = f"the master has {MAX_REQUESTS_IN_WORK} requests in work"
            work.fail(Unavailable(text, self._retry_after()))
            return
        self._num_in_work += 1
        self._queue.append(work)
        self._wake.set()

    def _retry_after(self) -> float:
        return max(SHORTEST_RETRY, self._num_refused * SERVICE_TIME)

    def _desired(self, node: NodeId) -> Desired:
        return self._job.desired(node)
