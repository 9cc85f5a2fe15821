"""From a one-shot question to its verdict, for both transports: gRPC, and HTTP on the page's port."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from dlrover.protocol.codec import Question, fit_verdict
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import Answer, Refusal
from dlrover.protocol.messages.job import Reply
from dlrover.protocol.rpc.transport import instead_of
from dlrover.protocol.text import UNENCODABLE

log = logging.getLogger(__name__)

Ask = Callable[[Question], Awaitable[Reply]]
"""Raises Rejected or Unavailable."""


async def verdict_on(question: Question, ask: Ask) -> Answer | Refusal:
    try:
        return Answer(id=0, body=await ask(question))
    except (Rejected, Unavailable) as error:
        return refusal_of(error)


def refusal_of(error: Rejected | Unavailable) -> Refusal:
    if isinstance(error, Rejected):
        return Refusal(id=0, code=error.code, message=str(error))
    retry_after = 1.0 if error.retry_after is None else error.retry_after
    return Refusal(id=0, code=error.code, message=str(error), retry_after=retry_after)


def sendable(verdict: Answer | Refusal) -> tuple[Answer | Refusal, bytes]:
    """What is sent, and as bytes: the caller waits for a verdict also if this one is too large or cannot be encoded."""
    try:
        return fit_verdict(verdict)
    except UNENCODABLE as error:
        log.error("an answer cannot be encoded reason=%s", error)
        return fit_verdict(instead_of(verdict))
