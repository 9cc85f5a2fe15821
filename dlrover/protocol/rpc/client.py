"""
The agent's side of the wire: one stream to the master that heals itself, and `ask` for one-shot clients.

A broken stream is nothing special. The channel tries again with jitter, presents the agent anew, and sends every
request that was never answered once more under its old sequence number, so the master applies it once. It goes on until
the caller closes it or the master refuses for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from msgspec.structs import replace

from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.codec import QUESTION, VERDICT, Question, check_size, decode_from_master
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.frames import (
    Ack,
    Answer,
    Beat,
    FromAgent,
    FromMaster,
    Observed,
    Ordered,
    Push,
    Refusal,
    Request,
)
from dlrover.protocol.messages.job import AgentCommand, Attach, Attached, Desired, Heartbeat, Query, Reply
from dlrover.protocol.messages.watch import WatchObservation, WatchOrder
from dlrover.protocol.rpc.transport import AGENT_METHOD, ASK_METHOD, SERVICE, Outbox, call_metadata, open_channel

log = logging.getLogger(__name__)

ATTACH_TIMEOUT = 30.0
"""
Until the master has accepted the stream, and again until the attach is durable: long, because after a master restart ten thousand
agents come at the same moment, and who leaves and comes again makes it longer for all. A host that keeps silent ends the attempt sooner:
gRPC gives a connection 5 s.
"""
FIRST_PAUSE = 0.02
"""A restarted local master serves again in well under a second; the first attempts must come quickly."""
LONGEST_PAUSE = 2.0
FLUSH_TIMEOUT = 1.0

ATTACH_ID = 0


class Backoff:
    """Full jitter: each pause is drawn from zero to an envelope that doubles, so that agents do not march in step."""

    def __init__(self) -> None:
        self._envelope = FIRST_PAUSE

    def reset(self) -> None:
        self._envelope = FIRST_PAUSE

    def pause(self) -> float:
        pause = random.uniform(0, self._envelope)
        self._envelope = min(2 * self._envelope, LONGEST_PAUSE)
        return pause


@dataclass(eq=False)
class _Waiting:
    """A request without an answer yet."""

    request: Request
    answer: asyncio.Future[Reply]
    is_sent: bool = field(default=False)
    """On the stream open now. The master may have it, so it must be brought to an end even if the caller left."""


class _Requests:
    """Those without an answer yet, in the order of their numbers. The commands among them are also numbered in sequence."""

    def __init__(self) -> None:
        self._last_id = ATTACH_ID
        self._last_sequence = 0
        self._waiting: dict[int, _Waiting] = {}  # in the order of id, which is also that of sequence
        self._unsettled: dict[int, None] = {}  # sequence numbers of the commands in `_waiting`, smallest first

    def __iter__(self) -> Iterator[_Waiting]:
        return iter(tuple(self._waiting.values()))

    def add(self, body: AgentCommand | Query) -> _Waiting:
        is_query = isinstance(body, Query)
        sequence = 0 if is_query else self._last_sequence + 1
        request = Request(
            id=self._last_id + 1,
            body=body,
            sequence=sequence,
            answered=0 if is_query else next(iter(self._unsettled), sequence) - 1,
        )
        check_size(request)
        self._last_id = request.id
        self._last_sequence = max(self._last_sequence, sequence)
        waiting = self._waiting[request.id] = _Waiting(request, asyncio.get_running_loop().create_future())
        if not is_query:
            self._unsettled[sequence] = None
        return waiting

    def get(self, number: int) -> _Waiting | None:
        return self._waiting.get(number)

    def settle(self, number: int) -> _Waiting | None:
        """Answered, or the answer is not wanted any more."""
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            self._unsettled.pop(waiting.request.sequence, None)
        return waiting

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
                waiting.answer.exception()  # seen: a caller that left must not lead to a warning
        self._waiting.clear()


class _HeldBack:
    """Numbers of requests for which the master was too busy: sent again in order, after a pause."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._timer: asyncio.TimerHandle | None = None

    def hold(self, number: int, retry_after: float, send: Callable[[int], None]) -> None:
        """It refuses later numbers of ours until then, so the order is kept."""
        self._numbers.append(number)
        if self._timer is None:
            pause = retry_after * random.uniform(1.0, 2.0)
            self._timer = asyncio.get_running_loop().call_later(pause, self._send_all, send)

    def _send_all(self, send: Callable[[int], None]) -> None:
        numbers, self._numbers, self._timer = sorted(self._numbers), [], None
        for number in numbers:
            send(number)

    def clear(self) -> None:
        """With the stream. On the next one all are sent anyway."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._numbers.clear()


class AgentChannel:
    """
    One bidirectional stream to the master, reconnecting by itself.

    `attach` is asked for the presentation at each attempt. `on_attached` is called at each attach, then `on_desired`
    with what it carried; `on_desired` later with each newer level. Both run in the event loop and must not block; what
    they saw is acknowledged when they return. `on_order` hears what is to be done now or never. `on_blocked` hears why the
    master can decide nothing, when it refuses a request of ours for that reason, and an empty text when it decides again.
    `find_address` is asked before each attempt, where the master may move to another machine.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str,
        tls: TlsConfig | None,
        attach: Callable[[], Attach],
        on_attached: Callable[[Attached], None],
        on_desired: Callable[[Desired], None],
        on_order: Callable[[WatchOrder], None] | None = None,
        on_blocked: Callable[[str], None] | None = None,
        find_address: Callable[[], str] | None = None,
    ) -> None:
        self._address = address
        self._find_address = find_address
        self._token = token
        self._tls = tls
        self._attach = attach
        self._on_attached = on_attached
        self._on_desired = on_desired
        self._on_order = on_order
        self._on_blocked = on_blocked
        self._blocked = ""
        self._requests = _Requests()
        self._held = _HeldBack()
        self._outbox: Outbox[FromAgent] | None = None  # of the attached stream; None while there is none
        self._outage_since: float | None = time.monotonic()
        self._backoff = Backoff()
        self._master_epoch = 0
        self._desired_number = -1
        self._closing = asyncio.Event()
        self._leaving = asyncio.Event()  # the stream that is open now shall end
        self._over: Exception | None = None
        self.trouble = ""
        """Why the newest attempt failed, for people; empty while attached."""

    async def run(self) -> None:
        """Until close(). Raises Rejected if the master refuses for good: bad token, other version, rank held."""
        over: Exception = Unavailable(f"the channel to the master at {self._address} was closed")
        try:
            while not self._closing.is_set():
                try:
                    await self._attempt()
                except Unavailable as error:
                    self._note(error)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), self._backoff.pause())
        except Exception as error:
            over = error
            raise
        finally:
            self._over = over
            self._requests.fail(over)

    async def call(self, command: AgentCommand | Query, *, timeout: float) -> Reply:
        """
        Durable when it returns. Raises Rejected, or Unavailable without an answer: a command may still be applied then.

        A question may wait on the master; if the stream breaks meanwhile, it is asked again on the next one.
        """
        assert not isinstance(command, Attach), "the channel attaches by itself"
        if self._over is not None:
            raise self._over
        waiting = self._requests.add(command)
        if self._outbox is not None:
            self._send(waiting)
        try:
            async with asyncio.timeout(timeout):  # cheaper than wait_for, which makes a future of its own
                return await waiting.answer
        except TimeoutError:
            trouble = f" ({self.trouble})" if self.trouble else ""
            raise Unavailable(f"no answer from the master at {self._address} within {timeout:g} s{trouble}") from None
        finally:
            if not waiting.is_sent or isinstance(command, Query):
                self._requests.settle(waiting.request.id)

    def beat(self, heartbeat: Heartbeat) -> None:
        """Volatile: without a stream it is dropped, attaching says more."""
        if self._outbox is not None:
            self._outbox.put(Beat(heartbeat))

    def observe(self, observation: WatchObservation) -> None:
        """Volatile like a heartbeat."""
        if self._outbox is not None:
            self._outbox.put(Observed(observation))

    def outage(self) -> float:
        """Seconds without an attached stream, 0.0 when attached."""
        return 0.0 if self._outage_since is None else time.monotonic() - self._outage_since

    async def close(self) -> None:
        """What was queued still leaves, within a bound; unanswered calls end with Unavailable."""
        if self._outbox is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._outbox.idle(), FLUSH_TIMEOUT)
        self._closing.set()
        self._leaving.set()

    async def reattach(self) -> None:
        """End the stream and present the agent anew, because what it said of itself no longer holds."""
        self._leaving.set()

    async def _attempt(self) -> None:
        """One stream, from connecting to its end."""
        if self._find_address is not None:
            self._address = self._find_address()
        # A fresh channel each time, because an old one would wait for gRPC's own reconnect back-off.
        async with open_channel(self._address, self._tls) as channel:
            stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(
                metadata=call_metadata(self._token), wait_for_ready=False
            )
            outbox: Outbox[FromAgent] = Outbox()
            presentation = self._presentation()
            check_size(presentation)
            outbox.put(presentation)
            leaving = asyncio.ensure_future(self._leaving.wait())
            connected = asyncio.ensure_future(stream.initial_metadata())
            tasks: list[asyncio.Future[Any]] = [leaving, connected]
            try:
                await asyncio.wait(tasks, timeout=ATTACH_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not connected.done():
                    raise Unavailable(
                        f"the master at {self._address} did not accept the stream within {ATTACH_TIMEOUT:g} s"
                    )
                if stream.done():
                    raise error_of(await stream.code(), await stream.details(), self._address)
                reader = asyncio.ensure_future(self._read(stream, outbox))
                writer = asyncio.ensure_future(outbox.run(stream.write))
                tasks += [reader, writer]
                await asyncio.wait({reader, leaving, writer}, return_when=asyncio.FIRST_COMPLETED)
                if writer.done() and (trouble := writer.exception()) is not None:
                    # A bug of ours: on a stream that nobody writes to we would be mute, and seem to be attached.
                    raise Unavailable(f"cannot write to the master at {self._address}: {trouble!r}") from trouble
                await asyncio.wait({reader, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if reader.done():
                    reader.result()
                with contextlib.suppress(TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                    await asyncio.wait_for(stream.done_writing(), FLUSH_TIMEOUT)
            except grpc.aio.AioRpcError as error:
                if self._outbox is not None and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # Our presentation was not too large: whatever else was is no reason to give the node up.
                    raise Unavailable(f"master at {self._address} ended the stream: {error.details()}") from error
                raise error_of(error.code(), error.details(), self._address) from error
            finally:
                self._detach()
                self._leaving.clear()
                stream.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _presentation(self) -> Request:
        """With the newest epoch we know: a master whose journal was lost counts on from there, or we could not obey it."""
        attach = self._attach()
        return Request(id=ATTACH_ID, body=replace(attach, master_epoch=max(attach.master_epoch, self._master_epoch)))

    async def _read(self, stream: grpc.aio.StreamStreamCall, outbox: Outbox[FromAgent]) -> None:
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT) as limit:
                while True:
                    data = await stream.read()
                    if data is grpc.aio.EOF:
                        raise Unavailable(f"the master at {self._address} closed the stream")
                    for parcel in decode_from_master(data):
                        self._receive(parcel, outbox)
                    if self._outbox is not None:
                        limit.reschedule(None)
        except TimeoutError:
            raise Unavailable(
                f"the master at {self._address} did not answer `Attach` within {ATTACH_TIMEOUT:g} s"
            ) from None

    def _receive(self, parcel: FromMaster, outbox: Outbox[FromAgent]) -> None:
        match parcel:
            case Answer(id=number, body=body):
                if number == ATTACH_ID and isinstance(body, Attached):
                    self._accept(body, outbox)
                elif (waiting := self._decided(number)) is not None and not waiting.answer.done():
                    waiting.answer.set_result(body)
            case Refusal(id=number, retry_after=None):
                rejected = Rejected(parcel.message, code=parcel.code)
                if number == ATTACH_ID:
                    raise rejected
                if (waiting := self._decided(number)) is not None and not waiting.answer.done():
                    waiting.answer.set_exception(rejected)
            case Refusal(id=number, retry_after=float() as retry_after):
                if parcel.code == ErrorCode.BLOCKED:
                    self._note_blocked(parcel.message)
                if number == ATTACH_ID or self._requests.get(number) is not None:
                    self._held.hold(number, retry_after, lambda held: self._send_again(held, outbox))
            case Push(desired=desired):
                self._take(desired, outbox)
            case Ordered(order=order):
                if self._on_order is not None:
                    self._on_order(order)

    def _accept(self, attached: Attached, outbox: Outbox[FromAgent]) -> None:
        if attached.master_epoch < self._master_epoch:
            raise Unavailable(
                f"the master at {self._address} is old: it has epoch {attached.master_epoch}, and a master of "
                f"epoch {self._master_epoch} answered before"
            )
        self._master_epoch = attached.master_epoch
        self._outbox = outbox
        self._outage_since = None
        self.trouble = ""
        self._note_blocked("")
        self._backoff.reset()
        self._on_attached(attached)
        self._desired_number = attached.desired.number
        self._on_desired(attached.desired)
        outbox.put(Ack(attached.desired.number))
        for waiting in self._requests:
            self._send(waiting)

    def _take(self, desired: Desired, outbox: Outbox[FromAgent]) -> None:
        if desired.master_epoch < self._master_epoch:
            return
        self._master_epoch = desired.master_epoch  # raised while we are attached, if another agent knew a newer one
        if desired.number > self._desired_number:
            self._desired_number = desired.number
            self._on_desired(desired)
        outbox.put(Ack(desired.number))

    def _decided(self, number: int) -> _Waiting | None:
        """The master has answered; questions it answers also while it is blocked."""
        waiting = self._requests.settle(number)
        if waiting is not None and not isinstance(waiting.request.body, Query):
            self._note_blocked("")
        return waiting

    def _send(self, waiting: _Waiting) -> None:
        assert self._outbox is not None, "only an attached stream carries requests"
        waiting.is_sent = True
        self._outbox.put(waiting.request)

    def _send_again(self, number: int, outbox: Outbox[FromAgent]) -> None:
        """On the stream with that outbox. The presentation comes before the stream is attached."""
        if number == ATTACH_ID:
            outbox.put(self._presentation())
        elif (waiting := self._requests.get(number)) is not None:
            self._send(waiting)

    def _detach(self) -> None:
        self._held.clear()
        if self._outbox is None:
            return
        self._outbox = None
        self._outage_since = time.monotonic()
        for waiting in self._requests:
            waiting.is_sent = False
            if waiting.answer.done():  # its caller gave up
                self._requests.settle(waiting.request.id)

    def _note_blocked(self, reason: str) -> None:
        if reason != self._blocked and self._on_blocked is not None:
            self._on_blocked(reason)
        self._blocked = reason

    def _note(self, error: Unavailable) -> None:
        text = str(error)
        if text != self.trouble:
            log.info("the master cannot be reached address=%s reason=%s", self._address, text)
        self.trouble = text


async def ask(address: str, body: Question, *, token: str, tls: TlsConfig | None = None, timeout: float) -> Reply:
    """One question, one answer. No server listens: Unavailable at once. A busy master is asked again until the timeout."""
    end_at = time.monotonic() + timeout
    data = QUESTION.encode(body)
    refusal: Unavailable | None = None
    async with open_channel(address, tls) as channel:
        method = channel.unary_unary(f"/{SERVICE}/{ASK_METHOD}")
        while True:
            left = end_at - time.monotonic()
            try:
                answer = VERDICT.decode(await method(data, timeout=max(left, 0.001), metadata=call_metadata(token)))
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    # If it is there, it said why.
                    silent = Unavailable(f"master at {address} is not reachable: no answer within {timeout:g} s")
                    raise refusal or silent from error
                raise error_of(error.code(), error.details(), address) from error
            if isinstance(answer, Answer):
                return answer.body
            if answer.retry_after is None:
                raise Rejected(answer.message, code=answer.code)
            refusal = Unavailable(answer.message, answer.retry_after)
            pause = answer.retry_after * random.uniform(1.0, 2.0)
            if pause >= end_at - time.monotonic():
                raise refusal
            await asyncio.sleep(pause)


_FINAL_CODES = {
    grpc.StatusCode.UNAUTHENTICATED: ErrorCode.BAD_TOKEN,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorCode.VERSION,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.MALFORMED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.TOO_LARGE,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.NOT_A_MASTER,
}
"""Statuses that the same call would get again. All others may pass."""


def error_of(
    code: grpc.StatusCode, details: str | None, address: str, *, who: str = "master"
) -> Rejected | Unavailable:
    text = details or code.name
    if code is grpc.StatusCode.UNIMPLEMENTED:
        text = (
            "the program that listens there is not a DLRover "
            f"{('master' if who == 'master' else 'service of this kind')} ({text}). Check the address"
        )
    if code in _FINAL_CODES:
        return Rejected(f"{who} at {address}: {text}", code=_FINAL_CODES[code])
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        text = "no answer within the deadline"
    return Unavailable(f"{who} at {address} is not reachable: {text}")
