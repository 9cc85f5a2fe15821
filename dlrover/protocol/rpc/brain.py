"""
The way to Brain, for masters, the cluster monitor and people: one question, one answer, each with a deadline.

The transport is the one that agents use. A channel is opened at the first question and again after each failure, because gRPC would otherwise wait for a
back-off of its own. Trying again is for the caller: it knows what may wait.
"""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.codec import Codec
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import BrainQuestion, BrainReply, BrainVerdict
from dlrover.protocol.messages.frames import Refusal
from dlrover.protocol.rpc.client import error_of
from dlrover.protocol.rpc.transport import ASK_METHOD, call_metadata, open_channel

BRAIN_SERVICE = "dlrover.Brain"
MAX_BRAIN_BYTES = 1024 * 1024
"""Of one message to Brain: what a job may send in a second."""

IDLE = ("grpc.client_idle_timeout_ms", 2000)
"""
After once to twice as long without a question gRPC closes the connection, and the next question opens another. A job asks about once a minute, and Brain's door closes what is silent for five
seconds: it takes that for a stranger.
"""

BRAIN_QUESTION: Codec[BrainQuestion] = Codec(BrainQuestion, name="question", max_bytes=MAX_BRAIN_BYTES)
BRAIN_VERDICT: Codec[BrainVerdict] = Codec(BrainVerdict, name="answer")


class BrainChannel:
    """For one event loop. Close it in the end."""

    def __init__(self, address: str, *, token: str, tls: TlsConfig | None = None) -> None:
        self.address = address
        self._token = token
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None

    async def ask(self, question: BrainQuestion, *, timeout: float) -> BrainReply:
        """
        Raises Unavailable if Brain cannot be reached, is busy (`retry_after` says when to come again) or does not answer in time, and
        Rejected if it refuses for good.
        """
        channel = self._channel or open_channel(self.address, self._tls, IDLE)
        self._channel = channel
        method = channel.unary_unary(f"/{BRAIN_SERVICE}/{ASK_METHOD}")
        try:
            async with asyncio.timeout(timeout):
                data = await method(
                    BRAIN_QUESTION.encode(question), timeout=timeout, metadata=call_metadata(self._token)
                )
        except TimeoutError:
            self._drop(channel)
            raise Unavailable(f"Brain at {self.address} did not answer within {timeout:g} s") from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Another question failed, and took the channel with it. Nothing has cancelled this task: it would end as if something had.
            self._drop(channel)
            raise Unavailable(f"The connection to Brain at {self.address} was closed") from None
        except grpc.aio.AioRpcError as error:
            self._drop(channel)
            raise error_of(error.code(), error.details(), self.address, who="Brain") from error
        verdict = BRAIN_VERDICT.decode(data)
        if not isinstance(verdict, Refusal):
            return verdict
        if verdict.retry_after is None:
            raise Rejected(verdict.message, code=verdict.code)
        raise Unavailable(verdict.message, verdict.retry_after, verdict.code)

    async def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def _drop(self, channel: grpc.aio.Channel) -> None:
        """The next question opens another one. Questions of other tasks that are under way on this one end with it."""
        is_current = self._channel is channel
        if not is_current:
            return
        closing = asyncio.ensure_future(channel.close())
        _CLOSING.add(closing)
        closing.add_done_callback(_CLOSING.discard)
        self._channel = None


_CLOSING: set[asyncio.Future[None]] = set()
"""The loop itself keeps only a weak reference to a task."""
