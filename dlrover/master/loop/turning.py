"""
Where a turn (`turn.py`) meets the disk, the streams and those who watch: it decides, writes, and releases what is durable.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.core.commit_order import BrokenQuestion, CoreFault, RecordBatch
from dlrover.core.outcome import NotYet, Outcome
from dlrover.master.clock import MasterClock
from dlrover.master.journal.durable_job import DurableJob
from dlrover.master.loop.inbox import Inbox
from dlrover.master.loop.long_polls import LongPolls
from dlrover.master.loop.plugin_answers import PluginAnswers
from dlrover.master.loop.presence import Presence
from dlrover.master.loop.request import Work
from dlrover.master.loop.streams import AgentLine, AgentLines
from dlrover.master.loop.turn import NO_SPIN, Turn, finding_of
from dlrover.master.view.bookkeeper import Bookkeeper
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode
from dlrover.protocol.messages.goodput import GoodputStatus
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    AwaitOrder,
    Command,
    DeadlinePassed,
    JobEnd,
    JobStatus,
    Micros,
    NodeSilent,
    Query,
)
from dlrover.protocol.messages.watch import PastVerdict, WatchObservation

log = logging.getLogger(__name__)


def _unwatched(observation: WatchObservation, now: Micros) -> None:
    """No observer watches."""


def _no_verdict() -> PastVerdict | None:
    return None


def _no_platform(intent: LaunchNode | RemoveNode) -> None:
    """A job that had a platform once goes on under a master without one: its nodes are started by hand now."""
    log.warning(
        "no platform can carry this out, because this master runs without one intent=%s node=%s",
        type(intent).__name__,
        intent.name,
    )


@dataclass
class Listeners:
    """Those in this process who take what the loop has for them. Set by the service before anything is decided."""

    on_intent: Callable[[LaunchNode | RemoveNode], None] = _no_platform
    """Takes what the job wants of its platform."""
    on_observation: Callable[[WatchObservation, Micros], None] = _unwatched
    """Takes what nodes tell of themselves besides being alive."""
    on_decided: list[Callable[[Command, Outcome, Micros], None]] = field(default_factory=list)
    """Hear what was decided, when it is durable: for those who watch, and change nothing."""
    newest_verdict: Callable[[], PastVerdict | None] = _no_verdict
    """Of the diagnosis, for the status."""
    dashboard: str = ""
    """Address of the page, for the status."""


class Turning:
    """Of one loop."""

    def __init__(
        self,
        durable: DurableJob,
        clock: MasterClock,
        *,
        presence: Presence,
        lines: AgentLines,
        waiting: LongPolls,
        inbox: Inbox,
        plugin_answers: PluginAnswers,
        books: Bookkeeper,
        listeners: Listeners,
        wake: Callable[[], None],
        on_end: Callable[[JobEnd], None],
    ) -> None:
        """`wake`: there is something to do. `on_end`: the job is over, and all of it is durable."""
        self._durable = durable
        self._clock = clock
        self._presence = presence
        self._lines = lines
        self._waiting = waiting
        self._inbox = inbox
        self._plugin_answers = plugin_answers
        self._books = books
        self._listeners = listeners
        self._wake = wake
        self._on_end = on_end
        self._verdict = ""

    async def turn(self) -> None:
        self._inbox.look_again(self._waiting.expired(self._clock.elapsed()))
        works = self._inbox.take()
        if self._durable.is_failing:
            works = self._refuse_commands(works)
        now = self._clock.now()
        self._presence.note_stalls(now)
        began_at = time.thread_time()
        turn: Turn[Work] = Turn()
        try:
            self._decide(turn, works, now)
        except CoreFault as fault:
            assert turn.current is not None, "the core fails on something"
            self._inbox.put_back([work for work in works if work is not turn.current and work not in self._waiting])
            await self._quarantine(turn.current, fault)
            return
        batch = self._durable.sequence.take()
        cpu_time = time.thread_time() - began_at
        if batch is None and not turn.rejected:
            with contextlib.suppress(Unavailable):
                await self._durable.write(None)  # a master that was replaced must not keep its agents by doing nothing
            return
        try:
            await self._durable.write(batch, cpu_time=cpu_time)
        except Unavailable as error:
            await self._fall_back(error, batch, turn.works)
            return
        self._release(batch, turn, now)
        for work, rejection in turn.rejected:
            self._reject(work, rejection)
        self._inbox.end_turn()
        await self._durable.save_snapshot()

    def _decide(self, turn: Turn[Work], works: list[Work], now: Micros) -> None:
        is_time_trusted = self._presence.look(now)
        is_writing = not self._durable.is_failing
        findings = self._presence.findings() if is_writing else []
        turn.decide(
            works,
            lambda work: self._stage(work, now),
            findings=[Work(finding) for finding in findings],
            due=lambda: map(Work, self._durable.due(now) if is_time_trusted and is_writing else ()),
            before=lambda work: self._account(now, None if work is None else work.body),
            after=self._await_order,
        )

    def _await_order(self, work: Work) -> Iterator[Work]:
        if isinstance(work.body, Attach) and self._plugin_answers.is_order_missing(work.body):
            yield Work(
                AwaitOrder(limit=2 * self._plugin_answers.time_limit)
            )  # the answer may first come for the nodes before it

    def _account(self, now: Micros, before: Command | Query | None = None) -> Iterator[Work]:
        """What the bookkeeper has to journal."""
        if self._durable.is_failing:
            return
        account = self._books.account(now, before)
        if account is not None:
            yield Work(account)
        run = self._books.measured(self._durable.job, now) if before is None else None
        if run is not None:
            yield Work(run)

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
        self._inbox.leave(work)  # who waits costs nothing, and must not keep others from coming in
        return None

    def _release(self, batch: RecordBatch | None, turn: Turn[Work], now: Micros) -> None:
        """Durable: from here on it may be published."""
        released = () if batch is None else self._durable.sequence.committed(batch)
        for work, outcome, intents in turn.release(released):
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
            if isinstance(work.body, Command):
                for hear in self._listeners.on_decided:
                    hear(work.body, outcome, now)
                self._books.decided(work.body, outcome, self._durable.job, now)
            for intent in intents:
                self._listeners.on_intent(intent)
        self._inbox.look_again(self._waiting.touched(turn.touched))
        self._lines.push(turn.told, self._durable.desired, self._clock.elapsed())
        for ended in turn.ended:
            self._lines.end(ended.node, ended.incarnation)
        if turn.end is not None:
            self._on_end(turn.end)

    def _attach(self, line: AgentLine, attached: Attached) -> None:
        if line.is_open:
            line.clock_stood_still = self._clock.stood_still
            self._lines.attach(line, attached, self._clock.elapsed())
            self._presence.came(attached, self._clock.now())  # it hears of it now, however long the disk took
        else:
            self._presence.came_and_went(attached)
            self._wake()
        self._plugin_answers.ask_for_order()
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
            log.info("command rejected command=%s code=%s reason=%s", type(work.body).__name__, error.code, error)
        work.fail(error)

    def _settle(self, work: Work) -> None:
        """It was decided: no longer in work, or no longer to be found again."""
        self._inbox.leave(work)
        finding = finding_of(work)
        if finding is not None:
            self._presence.settle(finding)
        if isinstance(finding, NodeSilent):  # should it wake up, it has to present itself anew
            self._lines.end(finding.node, finding.incarnation)

    def _completed(self, status: JobStatus) -> JobStatus:
        """With what is not in the job."""
        return replace(
            self._presence.with_steps(status),
            newest_verdict=self._listeners.newest_verdict(),
            dashboard=self._listeners.dashboard,
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
        for work in [*works, *self._inbox.take()]:
            self._inbox.turn_away(work, self._durable.refusal())

    def _refuse_commands(self, works: list[Work]) -> list[Work]:
        """While the journal cannot be written; gives what can be answered all the same."""
        for work in works:
            if not isinstance(work.body, Query):
                self._inbox.turn_away(work, self._durable.refusal())
        return [work for work in works if isinstance(work.body, Query)]

    async def _quarantine(self, work: Work, fault: CoreFault) -> None:
        await self._durable.quarantine(fault)
        self._begin_anew()
        self._reject(
            work,
            Rejected(
                f"The master failed on {type(work.body).__name__} because of a bug. Nothing was changed.",
                code=ErrorCode.INTERNAL,
            ),
        )
        self._wake()

    def _begin_anew(self) -> None:
        """The job was read again: it is as it was after the last durable turn."""
        self._books.began(self._durable.job)
        self._inbox.look_again(self._waiting.clear())  # what they saw was not durable
