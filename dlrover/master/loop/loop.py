"""
The loop of the master (in short: the desk): every request of the job passes here, in one order, and leaves only when it is durable.

One task does all of it, turn by turn: take what gathered, let the core decide, write it as one transaction, then
release replies, pushes and effects. While the disk works, the next turn's requests gather; so load batches itself and
no lock is needed. Timers are turns too: the task sleeps until the next deadline of the job or of the observations.

Here is the turn; each thing that it works on has its own room. `Reception` says what may come in, `Tray` holds it until
the turn takes it, `WaitingRoom` keeps questions that have no answer yet, `Errands` asks users' plug-ins meanwhile,
`Presence` knows who is there and whether our own time can be trusted, `DurableJob` keeps the job together with its
journal, and `Roster` tells nodes what they shall do.

While the journal cannot be written, commands are refused for now. Questions and heartbeats go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from dlrover.core.commit_order import BrokenQuestion, CoreFault, RecordBatch
from dlrover.core.job import Job
from dlrover.core.outcome import NotYet, Outcome
from dlrover.master.journal.durable_job import DurableJob
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.admission import Reception
from dlrover.master.loop.clock import MasterClock
from dlrover.master.loop.inbox import Tray
from dlrover.master.loop.long_polls import WaitingRoom
from dlrover.master.loop.plugin_answers import Errands
from dlrover.master.loop.presence import Presence
from dlrover.master.loop.request import Work
from dlrover.master.loop.stalls import LoopWatch
from dlrover.master.loop.streams import AgentLine, Roster
from dlrover.master.topology_plugins import TIME_LIMIT, TopologyPlugins
from dlrover.master.view.bookkeeper import Bookkeeper
from dlrover.protocol.codec import Question, Unreadable
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode
from dlrover.protocol.messages.frames import Ack, Beat, FromAgent, Observed, Ordered, Refusal, Request
from dlrover.protocol.messages.goodput import GoodputStatus
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    AwaitOrder,
    Command,
    DeadlinePassed,
    EndStream,
    FinishJob,
    JobEnd,
    JobStatus,
    LookAgain,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Query,
    Reply,
    TellNode,
)
from dlrover.protocol.messages.watch import AskActivity, PastVerdict, WatchObservation, WatchOrder
from dlrover.protocol.rpc.server import AgentStream

log = logging.getLogger(__name__)

LONGEST_NAP = 5.0
"""Seconds, however far the next deadline is."""
POISONED_NAP = 0.5
"""Seconds between two looks while a deadline is due that broke the core once: it stays due, and others come."""
NO_SPIN = 100_000
"""Microseconds until a deadline that was refused may be tried again."""
COMING_BACK = 5_000_000
"""Microseconds in which those that were refused while the journal could not be written have come again: they wait up
to twice the second that they were told, and some have to attach before they can say what matters."""


class MasterLoop:
    """Implements the seam of `protocol.rpc.server`; `run` is its one task."""

    def __init__(
        self,
        keeper: JournalThread,
        job: Job,
        clock: MasterClock,
        *,
        job_name: str,
        user: str = "",
        topology: TopologyPlugins | None = None,
        books: Bookkeeper | None = None,
        stalls: LoopWatch | None = None,
    ) -> None:
        """`stalls`: one that tests control."""
        self._clock = clock
        self._job_name = job_name
        self._user = user
        self._books = Bookkeeper() if books is None else books
        self._books.began(job)
        self.answers: dict[type[Query], Callable[[Any], Reply]] = {AskActivity: self._books.activity}
        """Questions about what is not in the job: others in this process know it."""
        self._wake = asyncio.Event()
        self._durable = DurableJob(keeper, job, clock)
        self._presence = Presence(self._durable, clock, stalls)
        self._roster = Roster()
        self._waiting = WaitingRoom()
        self._tray = Tray(self._wake)
        self._errands = Errands(TopologyPlugins() if topology is None else topology, self._durable, self._tray)
        self._reception = Reception(self._tray, self._errands, clock, events=self._books.events, answers=self.answers)
        self._verdict = ""
        self.finished: asyncio.Future[JobEnd] = asyncio.get_running_loop().create_future()
        self.on_intent: Callable[[LaunchNode | RemoveNode], None] = _no_platform
        """Takes what the job wants of its platform. Set by the service before anything is decided."""
        self.on_observation: Callable[[WatchObservation, Micros], None] = _unwatched
        """Takes what nodes tell of themselves besides being alive."""
        self.on_decided: list[Callable[[Command, Outcome, Micros], None]] = []
        """Hear what was decided, when it is durable: for those who watch, and change nothing."""
        self.newest_verdict: Callable[[], PastVerdict | None] = _no_verdict
        """Of the diagnosis, for the status."""
        self.dashboard = ""
        """Address of the page, for the status."""

    # The seam towards the wire.

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None:
        line = self._roster.line(stream)
        now = self._clock.now()
        self._presence.reached(now)
        for parcel in parcels:
            match parcel:
                case Request():
                    self._reception.accept(line, parcel)
                case Beat(heartbeat=heartbeat):
                    if (heartbeat.node, heartbeat.incarnation) == (line.node, line.incarnation):
                        self._presence.heard(heartbeat, now)
                        self._roster.remind(line, self._clock.elapsed())
                case Observed(observation=observation):
                    if (observation.node, observation.incarnation) == (line.node, line.incarnation):
                        self._books.observed(observation, self._durable.job, now)
                        self.on_observation(observation, now)
                case Ack(number=number):
                    self._roster.acknowledge(line, number)
                case Unreadable():
                    stream.send(Refusal(id=parcel.id, code=parcel.code, message=parcel.message))

    def closed(self, stream: AgentStream) -> None:
        self._waiting.drop(self._roster.line(stream))
        finding = self._roster.close(stream)
        if finding is not None:
            self._presence.went(finding)
            self._wake.set()

    async def ask(self, question: Question) -> Reply:
        return await self._reception.ask(question)

    # For the others in this process.

    def tell(self, command: Command) -> asyncio.Future[Reply]:
        """A command of the master's own shell. Done when durable; may fail as `ask` does, but not for want of room."""
        return self._reception.tell(command)

    def last_heard(self) -> dict[NodeId, Micros]:
        """When each attached node was last heard of, by the job's clock."""
        return self._presence.last_heard()

    def now(self) -> Micros:
        return self._clock.now()

    @property
    def num_in_work(self) -> int:
        return self._tray.num_in_work

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a node."""
        return self._presence.patience.heartbeat

    def goodput(self) -> GoodputStatus:
        """Where the time went up to now; for those who may see what is being written."""
        return self._durable.job.goodput(max(self._clock.now(), self._durable.job.now))

    def order(self, node: NodeId, order: WatchOrder) -> bool:
        """Tell a node what to do now. False when it is not attached."""
        line = self._roster.line_of(node)
        if line is None:
            return False
        line.stream.send(Ordered(replace(order, at=self._clock.now())))
        return True

    @property
    def job(self) -> Job:
        """To be looked at between two turns, by those who watch: what they see may not be durable yet, so it leaves nobody."""
        return self._durable.job

    # The task.

    async def begin(self, master_epoch: int) -> None:
        """The first command of this life; nothing is served before it is durable. Raises what the journal raises."""
        await self._durable.begin()
        work = Work(
            MasterStarted(master_epoch, self._job_name, self._user), answer=asyncio.get_running_loop().create_future()
        )
        self._tray.put(work)
        self._wake.clear()  # its turn comes now, and no other is needed
        await self._turn()
        assert work.answer is not None
        await work.answer
        self._presence.begin()

    async def run(self) -> None:
        """Until cancelled. Raises Fenced or JournalError: the process must end, and nothing more is released."""
        self._presence.start()
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._nap()):
                        await self._wake.wait()
                self._wake.clear()
                if await self._durable.try_again():
                    self._presence.hold_deadlines(COMING_BACK)
                await self._turn()
        finally:
            self._presence.stop()
            self._errands.close()

    def _nap(self) -> float:
        """Seconds until there is something to do that nobody wakes us for."""
        if self._durable.is_failing:
            return self._durable.nap_until_retry()
        return min(self._nap_of_job(), self._nap_of_waiting())

    def _nap_of_waiting(self) -> float:
        at = self._waiting.next_deadline()
        return LONGEST_NAP if at is None else max(0.0, (at - self._clock.elapsed()) / 1e6)

    def _nap_of_job(self) -> float:
        now = self._clock.now()
        nap = min(LONGEST_NAP, max(0.0, (self._presence.quiet_until() - now) / 1e6))
        return max(nap, POISONED_NAP) if self._durable.is_poison_due(now) else nap

    async def _turn(self) -> None:
        self._tray.look_again(self._waiting.expired(self._clock.elapsed()))
        works = self._tray.take()
        if self._durable.is_failing:
            works = self._refuse_commands(works)
        staged: dict[int, Work] = {}
        rejected: list[tuple[Work, Rejected]] = []
        now = self._clock.now()
        self._presence.note_stalls(now)
        began_at = time.thread_time()
        for work in self._in_order(works, now):
            try:
                ticket = self._stage(work, now)
                if ticket is not None:
                    staged[ticket] = work
            except Rejected as error:
                rejected.append((work, error))
            except CoreFault as fault:
                self._tray.put_back([other for other in works if other is not work and other not in self._waiting])
                await self._quarantine(work, fault)
                return
        batch = self._durable.sequence.take()
        cpu_time = time.thread_time() - began_at
        if batch is None and not rejected:
            with contextlib.suppress(Unavailable):
                await self._durable.write(None)  # a master that was replaced must not keep its agents by doing nothing
            return
        try:
            await self._durable.write(batch, cpu_time=cpu_time)
        except Unavailable as error:
            await self._fall_back(error, batch, [*staged.values(), *(work for work, _ in rejected)])
            return
        self._release(batch, staged, now)
        for work, rejection in rejected:
            self._reject(work, rejection)
        self._tray.end_turn()
        await self._durable.save_snapshot()

    def _in_order(self, works: list[Work], now: Micros) -> Iterator[Work]:
        """
        What silence says, what was sent, and last what time says.

        To be staged one by one: which deadlines are due is asked when all that came in time to meet them is applied.
        """
        is_time_trusted = self._presence.look(now)
        if not self._durable.is_failing:
            yield from [Work(finding) for finding in self._presence.findings()]
        yield from self._account(now)
        for work in works:
            yield from self._account(now, before=work.body)
            yield work
            if isinstance(work.body, Attach) and self._errands.is_order_missing(work.body):
                yield Work(AwaitOrder(limit=2 * TIME_LIMIT))  # the answer may first come for the nodes before it
        if is_time_trusted and not self._durable.is_failing:
            yield from [Work(command) for command in self._durable.due(now)]

    def _account(self, now: Micros, before: Command | Query | None = None) -> Iterator[Work]:
        """What the bookkeeper has to journal."""
        account = None if self._durable.is_failing else self._books.account(now, before)
        if account is not None:
            yield Work(account)

    def _stage(self, work: Work, now: Micros) -> int | None:
        """The ticket of its outcome; None: a question that goes on waiting for its answer."""
        if isinstance(work.body, Query):
            return self._stage_query(work, work.body)
        return self._durable.stage(work.body, now, work.origin)

    def _stage_query(self, work: Work, query: Query) -> int | None:
        if work.waits_until <= self._clock.elapsed():
            return self._durable.sequence.stage_query(query)
        answer = self._durable.sequence.try_query(query)
        if not isinstance(answer, NotYet):
            return answer
        if work.line is None or work.line.is_open:
            self._waiting.sit(work, answer.topics)
        self._tray.leave(work)  # who waits costs nothing, and must not keep others from coming in
        return None

    def _release(self, batch: RecordBatch | None, staged: dict[int, Work], now: Micros) -> None:
        """Durable: from here on everybody may know."""
        told: dict[NodeId, None] = {}
        touched: dict[str, None] = {}
        ended: JobEnd | None = None
        for released in () if batch is None else self._durable.sequence.committed(batch):
            work, outcome = staged[released.ticket], released.outcome
            self._settle(work)
            reply = outcome.reply
            if isinstance(reply, Attached) and work.line is not None:
                self._attach(work.line, reply)
            elif isinstance(reply, JobStatus):
                reply = self._completed(reply)
            elif isinstance(reply, GoodputStatus):
                reply = self._durable.job.goodput(now)
            work.succeed(reply)
            self._log(outcome)
            if self.on_decided and not isinstance(work.body, Query):
                for hear in self.on_decided:
                    hear(work.body, outcome, now)
            if isinstance(work.body, Command):
                self._books.decided(work.body, outcome, self._durable.job, now)
            for effect in outcome.effects:
                match effect:
                    case TellNode(node=node):
                        told[node] = None
                    case EndStream(node=node, incarnation=incarnation):
                        self._roster.end(node, incarnation)
                    case FinishJob(end=end):
                        ended = end
                    case LookAgain(topics=topics):
                        touched.update(dict.fromkeys(topics))
                    case LaunchNode() | RemoveNode():
                        self.on_intent(effect)
        self._tray.look_again(self._waiting.touched(touched))
        self._roster.push(told, self._durable.desired, self._clock.elapsed())
        if ended is not None and not self.finished.done():
            self.finished.set_result(ended)

    def _attach(self, line: AgentLine, attached: Attached) -> None:
        if line.is_open:
            line.clock_stood_still = self._clock.stood_still
            self._roster.attach(line, attached, self._clock.elapsed())
            self._presence.came(attached, self._clock.now())  # it hears of it now, however long the disk took
        else:
            self._presence.came_and_went(attached)
            self._wake.set()
        self._errands.ask_for_order()
        log.info(
            "attached node=%d node_rank=%d incarnation=%d peer=%s",
            attached.node,
            attached.node_rank,
            attached.incarnation,
            line.stream.peer,
        )

    def _reject(self, work: Work, error: Rejected) -> None:
        self._settle(work)
        if isinstance(error, BrokenQuestion):
            log.error("core fault query=%s", type(work.body).__name__, exc_info=error)
        elif not work.is_from_outside and isinstance(work.body, Command):
            # It came too late: the node is gone or back already. Should a deadline stay due all the same, do not spin.
            log.debug("finding refused command=%s reason=%s", type(work.body).__name__, error)
            if isinstance(work.body, DeadlinePassed):
                self._presence.hold_deadlines(NO_SPIN)
        else:
            log.info("refused command=%s code=%s reason=%s", type(work.body).__name__, error.code, error)
        work.fail(error)

    def _settle(self, work: Work) -> None:
        """It was decided: no longer in work, or no longer to be found again."""
        self._tray.leave(work)
        if not work.is_from_outside and isinstance(work.body, NodeDisconnected | NodeSilent):
            self._presence.settle(work.body)
            if isinstance(work.body, NodeSilent):  # should it wake up, it has to present itself anew
                self._roster.end(work.body.node, work.body.incarnation)

    def _completed(self, status: JobStatus) -> JobStatus:
        """With what is not in the job."""
        return replace(
            self._presence.with_steps(status),
            newest_verdict=self.newest_verdict(),
            dashboard=self.dashboard,
            blocked=self._durable.blocked,
            now=self._clock.now(),
        )

    def _log(self, outcome: Outcome) -> None:
        for verdict in outcome.verdicts:
            if verdict != self._verdict:
                log.info("verdict %s", verdict)
                self._verdict = verdict

    # When things go wrong.

    async def _fall_back(self, error: Unavailable, batch: RecordBatch | None, works: list[Work]) -> None:
        await self._durable.fall_back(error, batch)
        self._begin_anew()
        for work in [*works, *self._tray.take()]:
            self._tray.turn_away(work, self._durable.refusal())

    def _refuse_commands(self, works: list[Work]) -> list[Work]:
        """While the journal cannot be written; gives what can be answered all the same."""
        for work in works:
            if not isinstance(work.body, Query):
                self._tray.turn_away(work, self._durable.refusal())
        return [work for work in works if isinstance(work.body, Query)]

    async def _quarantine(self, work: Work, fault: CoreFault) -> None:
        await self._durable.quarantine(fault)
        self._begin_anew()
        self._reject(
            work, Rejected(f"{type(work.body).__name__} broke the master; nothing was changed.", code="internal")
        )
        self._wake.set()

    def _begin_anew(self) -> None:
        """The job was read again: it is as it was after the last durable turn."""
        self._books.began(self._durable.job)
        self._tray.look_again(self._waiting.clear())  # what they saw was not durable


def _unwatched(observation: WatchObservation, now: Micros) -> None:
    """Nobody watches."""


def _no_verdict() -> PastVerdict | None:
    return None


def _no_platform(intent: LaunchNode | RemoveNode) -> None:
    """A job that had a platform once goes on under a master without one: its nodes are started by hand now."""
    log.warning("no platform to ask intent=%s node=%s", type(intent).__name__, intent.name)
