"""
One request on its way through the loop, and the way back to who sent it.

There are three senders: an agent on its stream, a one-shot client who waits for a future, and the loop itself, whose
findings no caller waits for.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dlrover.core.outcome import Origin
from dlrover.master.loop.streams import AgentLine
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Answer, Refusal
from dlrover.protocol.messages.job import Attach, Command, Query, Reply

SHORTEST_RETRY = 0.05
"""Seconds: a busy master has decided a full inbox several times over in this time."""


@dataclass(eq=False)
class Work:
    body: Command | Query
    origin: Origin | None = None
    line: AgentLine | None = None
    id: int = 0
    answer: asyncio.Future[Reply] | None = None
    """Of a one-shot question; else `line` and `id` say where the answer goes. Neither: a finding of our own."""
    waits_until: int = 0
    """Of a question: how long its answer may be waited for, by the master's elapsed microseconds."""

    @property
    def is_from_outside(self) -> bool:
        return self.line is not None or self.answer is not None

    def succeed(self, reply: Reply) -> None:
        if self.answer is not None:
            if not self.answer.done():
                self.answer.set_result(reply)
        elif self.line is not None:
            self.line.stream.send(Answer(id=self.id, body=reply))

    def fail(self, error: Rejected | Unavailable) -> None:
        if self.answer is not None:
            if not self.answer.done():
                self.answer.set_exception(error)
        elif self.line is not None:
            retry_after = None
            if isinstance(error, Unavailable):
                retry_after = SHORTEST_RETRY if error.retry_after is None else error.retry_after
                if self.origin is not None:
                    self.line.gate.hold(self.origin.sequence)
                elif isinstance(self.body, Attach):
                    self.line.has_presented = False
            self.line.stream.send(Refusal(id=self.id, code=error.code, message=str(error), retry_after=retry_after))
