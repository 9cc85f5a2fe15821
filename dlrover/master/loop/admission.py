"""
Coming in: what a request is, who is refused at once, and who knows the answer without the job.

There are three doors: an agent's stream, a one-shot client, and the master's own shell. What is neither refused nor
answered here goes to the inbox, for the next turn of the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dlrover.core.outcome import Origin
from dlrover.master.clock import MasterClock
from dlrover.master.loop.inbox import Inbox
from dlrover.master.loop.plugin_answers import PluginAnswers
from dlrover.master.loop.request import Work
from dlrover.master.loop.streams import AgentLine
from dlrover.master.view.events import EventLog
from dlrover.protocol.codec import Codec, Question
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.checkpoint import AwaitSaveDuties
from dlrover.protocol.messages.frames import Answer, Refusal, Request
from dlrover.protocol.messages.goodput import AskEvents
from dlrover.protocol.messages.job import MAX_FAILURE_BYTES, Attach, Command, Micros, Query, Reply, ReportFailure
from dlrover.protocol.messages.kv import MAX_WAIT
from dlrover.protocol.messages.peers import AskPeers
from dlrover.protocol.text import UNENCODABLE


class Admission:
    def __init__(
        self,
        inbox: Inbox,
        plugin_answers: PluginAnswers,
        clock: MasterClock,
        *,
        events: EventLog,
        answers: dict[type[Query], Callable[[Any], Reply]],
    ) -> None:
        """`answers`: to questions about what is not in the job."""
        self._inbox = inbox
        self._plugin_answers = plugin_answers
        self._clock = clock
        self._events = events
        self._answers = answers

    def accept(self, line: AgentLine, request: Request) -> None:
        """From an agent, or from a client that has not said yet who it is."""
        if isinstance(request.body, Attach) and line.has_presented:
            text = "another node uses this stream already; each node needs a stream of its own"
            line.stream.send(Refusal(id=request.id, code=ErrorCode.ATTACHED, message=text))
            return
        if isinstance(request.body, Attach):
            line.has_presented = True
            self._plugin_answers.place_and_attach(line, request.id, request.body)
            return
        if isinstance(request.body, Query) and (know := self._answers.get(type(request.body))) is not None:
            line.stream.send(Answer(id=request.id, body=know(request.body)))
            return
        if isinstance(request.body, AskEvents):
            self._plugin_answers.run(self._tell_events(line, request.id, request.body))
            return
        if isinstance(request.body, AwaitSaveDuties | AskPeers) and request.body.node != line.node:
            # Asked before our journal was lost: then that node had the number which another has now.
            text = f"node {line.node} may not send requests in the name of node {request.body.node}"
            line.stream.send(Refusal(id=request.id, code=ErrorCode.WRONG_SENDER, message=text))
            return
        if isinstance(request.body, Query):
            self._inbox.offer(Work(request.body, line=line, id=request.id, waits_until=self._waits_until(request.body)))
            return
        if line.node is None or line.incarnation is None:
            text = "the first request of a stream must be `Attach`"
            line.stream.send(Refusal(id=request.id, code=ErrorCode.NOT_ATTACHED, message=text))
            return
        origin = Origin(line.node, line.incarnation, request.sequence, request.answered)
        if request.sequence < 1:
            text = "a command needs a sequence number of at least 1; without it the command could take effect twice"
            line.stream.send(Refusal(id=request.id, code=ErrorCode.MALFORMED, message=text))
            return
        if isinstance(request.body, ReportFailure) and (size_bytes := _largest(request.body)) > MAX_FAILURE_BYTES:
            text = (
                f"the report of a failure has {size_bytes} bytes, and the limit is {MAX_FAILURE_BYTES}. Send "
                "only the end of its traceback and log"
            )
            line.stream.send(Refusal(id=request.id, code=ErrorCode.TOO_LARGE, message=text))
            return
        work = Work(self._in_our_time(request.body, line), origin, line, request.id)
        if not line.gate.admits(request.sequence):
            work.fail(
                Unavailable(
                    "an earlier command of this node was rejected and must be sent again first",
                    self._inbox.retry_after(),
                )
            )
            return
        line.gate.passed(request.sequence)
        self._inbox.offer(work)

    async def _tell_events(self, line: AgentLine, id_: int, question: AskEvents) -> None:
        events = await self._events.answer(question)
        if line.is_open:
            line.stream.send(Answer(id=id_, body=events))

    def _in_our_time(self, command: Command, line: AgentLine) -> Command:
        """An agent counts on from the time it was told; what our clock stood still since then it cannot know."""
        ahead = self._clock.stood_still - line.clock_stood_still
        if not ahead or not isinstance(command, ReportFailure):
            return command
        failures = (replace(failure, exited_at=Micros(failure.exited_at - ahead)) for failure in command.failures)
        return replace(command, failures=tuple(failures))

    async def ask(self, question: Question) -> Reply:
        """From a one-shot client. Raises Rejected or Unavailable."""
        if isinstance(question, Query) and (know := self._answers.get(type(question))) is not None:
            return know(question)
        if isinstance(question, AskEvents):
            return await self._events.answer(question)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        work = Work(question, answer=answer, waits_until=self._waits_until(question))
        self._inbox.offer(work)
        assert work.answer is not None
        return await work.answer

    def _waits_until(self, body: object) -> int:
        wait = getattr(body, "wait", 0.0)
        return self._clock.elapsed() + round(min(wait, MAX_WAIT) * 1e6) if wait > 0 else 0

    def tell(self, command: Command) -> asyncio.Future[Reply]:
        """
        From the master's own shell (what the platform shows). Done when durable; may fail as `ask` does.

        Never refused for want of room: who reports what exists must not lose against a storm of reports. Users' plug-ins
        have a hand in it, so it is checked as if it came over the wire: what is written must be readable for the next master.
        Its size is not: the list of a large fleet may be longer than a message.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        try:
            command = _COMMAND.decode(_COMMAND.encode(command))
        except Rejected as error:
            answer.set_exception(error)
            return answer
        except UNENCODABLE as error:
            answer.set_exception(
                Rejected(f"{type(command).__name__} cannot be written: {error}.", code=ErrorCode.MALFORMED)
            )
            return answer
        self._inbox.put(Work(command, answer=answer))
        return answer


def _largest(report: ReportFailure) -> int:
    """Bytes of the texts of the largest failure in it."""
    return max(
        (
            sum(len(text.encode()) for text in (failure.message, failure.traceback, failure.log_tail))
            for failure in report.failures
        ),
        default=0,
    )


_COMMAND: Codec[Command] = Codec(Command, name="command", max_bytes=None)
