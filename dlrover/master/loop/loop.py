"""
The loop of the master (in short: the loop): every request of the job passes here, in one order, and leaves only when it is durable.

One task does all of it, turn by turn: take what gathered, let the core decide, write it as one transaction, then
release replies, pushes and effects. While the disk works, the next turn's requests gather; so load batches itself and
no lock is needed. Timers are turns too: the task sleeps until the next deadline of the job or of the observations.

Here the turn (`turn.py`) meets disk and streams; each thing that it works on has its own room. `Admission` says what may come in, `Inbox` holds it until
the turn takes it, `LongPolls` keeps questions that have no answer yet, `PluginAnswers` asks users' plug-ins meanwhile,
`Presence` knows who is there and whether our own time can be trusted, `DurableJob` keeps the job together with its
journal, and `AgentLines` tells nodes what they shall do.

While the journal cannot be written, commands are refused for now. Questions and heartbeats go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from dlrover.core.job import Job
from dlrover.master.clock import MasterClock
from dlrover.master.journal.durable_job import DurableJob
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.admission import Admission
from dlrover.master.loop.inbox import Inbox
from dlrover.master.loop.long_polls import LongPolls
from dlrover.master.loop.plugin_answers import PluginAnswers
from dlrover.master.loop.presence import Presence
from dlrover.master.loop.request import Work
from dlrover.master.loop.stalls import LoopWatch
from dlrover.master.loop.streams import AgentLines
from dlrover.master.loop.turn import COMING_BACK
from dlrover.master.loop.turning import Listeners, Turning
from dlrover.master.topology_plugins import TopologyPlugins
from dlrover.master.view.bookkeeper import Bookkeeper
from dlrover.protocol.codec import Question, Unreadable
from dlrover.protocol.messages.frames import Ack, Beat, FromAgent, Observed, Ordered, Refusal, Request
from dlrover.protocol.messages.goodput import GoodputStatus
from dlrover.protocol.messages.job import (
    Command,
    JobEnd,
    MasterStarted,
    Micros,
    NodeId,
    Query,
    Reply,
)
from dlrover.protocol.messages.watch import AskActivity, WatchOrder
from dlrover.protocol.rpc.server import AgentStream

log = logging.getLogger(__name__)

LONGEST_NAP = 5.0
"""Seconds, however far the next deadline is."""
POISONED_NAP = 0.5
"""Seconds between two looks while a deadline is due that broke the core once: it stays due, and others come."""


class MasterLoop:
    """Implements the seam of `protocol.rpc.server`; `run` is its one task."""

    def __init__(
        self,
        journal_thread: JournalThread,
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
        self._durable = DurableJob(journal_thread, job, clock)
        self._presence = Presence(self._durable, clock, stalls)
        self._lines = AgentLines()
        self._waiting = LongPolls()
        self._inbox = Inbox(self._wake)
        self._plugin_answers = PluginAnswers(
            TopologyPlugins() if topology is None else topology, self._durable, self._inbox
        )
        self._admission = Admission(
            self._inbox, self._plugin_answers, clock, events=self._books.events, answers=self.answers
        )
        self.finished: asyncio.Future[JobEnd] = asyncio.get_running_loop().create_future()
        self.listeners = Listeners()
        self._turning = Turning(
            self._durable,
            clock,
            presence=self._presence,
            lines=self._lines,
            waiting=self._waiting,
            inbox=self._inbox,
            plugin_answers=self._plugin_answers,
            books=self._books,
            listeners=self.listeners,
            wake=self._wake.set,
            on_end=self._finish,
        )

    # The seam towards the wire.

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None:
        line = self._lines.line(stream)
        now = self._clock.now()
        self._presence.reached(now)
        for parcel in parcels:
            match parcel:
                case Request():
                    self._admission.accept(line, parcel)
                case Beat(heartbeat=heartbeat):
                    if (heartbeat.node, heartbeat.incarnation) == (line.node, line.incarnation):
                        self._presence.heard(heartbeat, now)
                        self._lines.remind(line, self._clock.elapsed())
                case Observed(observation=observation):
                    if (observation.node, observation.incarnation) == (line.node, line.incarnation):
                        self._books.observed(observation, self._durable.job, now)
                        self.listeners.on_observation(observation, now)
                case Ack(number=number):
                    self._lines.acknowledge(line, number)
                case Unreadable():
                    stream.send(Refusal(id=parcel.id, code=parcel.code, message=parcel.message))

    def closed(self, stream: AgentStream) -> None:
        self._waiting.drop(self._lines.line(stream))
        finding = self._lines.close(stream)
        if finding is not None:
            self._presence.went(finding)
            self._wake.set()

    async def ask(self, question: Question) -> Reply:
        return await self._admission.ask(question)

    # For the others in this process.

    def tell(self, command: Command) -> asyncio.Future[Reply]:
        """A command of the master's own shell. Done when durable; may fail as `ask` does, but not for want of room."""
        return self._admission.tell(command)

    def last_heard(self) -> dict[NodeId, Micros]:
        """When each attached node was last heard of, by the job's clock."""
        return self._presence.last_heard()

    def now(self) -> Micros:
        return self._clock.now()

    @property
    def num_in_work(self) -> int:
        return self._inbox.num_in_work

    @property
    def heartbeat(self) -> float:
        """Seconds between two heartbeats of a node."""
        return self._presence.patience.heartbeat

    def goodput(self) -> GoodputStatus:
        """Where the time went up to now; for those who may see what is being written."""
        return self._durable.job.goodput(max(self._clock.now(), self._durable.job.now))

    def order(self, node: NodeId, order: WatchOrder) -> bool:
        """Tell a node what to do now. False when it is not attached."""
        line = self._lines.line_of(node)
        if line is None:
            return False
        line.stream.send(Ordered(replace(order, at=self._clock.now())))
        return True

    @property
    def job(self) -> Job:
        """To be looked at between two turns, by those who watch: what they see may not be durable yet, so they must not pass it on."""
        return self._durable.job

    # The task.

    async def begin(self, master_epoch: int) -> None:
        """The first command of this life; nothing is served before it is durable. Raises what the journal raises."""
        await self._durable.begin()
        work = Work(
            MasterStarted(master_epoch, self._job_name, self._user), answer=asyncio.get_running_loop().create_future()
        )
        self._inbox.put(work)
        self._wake.clear()  # its turn comes now, and no other is needed
        await self._turning.turn()
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
                await self._turning.turn()
        finally:
            self._presence.stop()
            self._plugin_answers.close()

    def _finish(self, end: JobEnd) -> None:
        if not self.finished.done():
            self.finished.set_result(end)

    def _nap(self) -> float:
        """Seconds until there is something to do for which no event wakes us."""
        if self._durable.is_failing:
            return self._durable.nap_until_retry()
        now, at = self._clock.now(), self._waiting.next_deadline()
        of_job = min(LONGEST_NAP, max(0.0, (self._presence.quiet_until() - now) / 1e6))
        of_waiting = LONGEST_NAP if at is None else max(0.0, (at - self._clock.elapsed()) / 1e6)
        return min(max(of_job, POISONED_NAP) if self._durable.is_poison_due(now) else of_job, of_waiting)
