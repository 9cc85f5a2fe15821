"""
The port of masters and commands: who may enter, and bytes to messages.

The same door as a master's: a caller without a token is refused on the headers of its call, before a byte of its message is read, and costs no more than that. What passes goes to the desk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import grpc
import grpc.aio

from dlrover.brain.tenants import Doorkeeper, TokenHolder
from dlrover.protocol.addresses import Address, TlsConfig
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import BrainQuestion, BrainReply, BrainVerdict
from dlrover.protocol.messages.frames import Refusal
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from dlrover.protocol.rpc.brain import BRAIN_QUESTION, BRAIN_SERVICE, BRAIN_VERDICT, MAX_BRAIN_BYTES
from dlrover.protocol.rpc.door import MAX_OUTSIDE, Door, leave_the_silent_to_the_kernel, place_of
from dlrover.protocol.rpc.rarely import Rarely
from dlrover.protocol.rpc.server import MethodTable, bind_error, explain_versions, max_connections
from dlrover.protocol.rpc.transport import (
    ASK_METHOD,
    PROTOCOL_KEY,
    SERVER_OPTIONS,
    TOKEN_KEY,
    VERSION_KEY,
    server_credentials,
)
from dlrover.protocol.text import UNENCODABLE

log = logging.getLogger(__name__)

FLUSH_TIMEOUT = 2.0
READ_TIMEOUT = 10.0
"""Seconds within which the message of an admitted call must come."""
OPTIONS = tuple(option for option in SERVER_OPTIONS if option[0] != "grpc.max_receive_message_length")


class Desk(Protocol):
    """Who answers. It runs in the event loop and must not block."""

    async def answer(self, caller: TokenHolder, question: BrainQuestion, size_bytes: int) -> BrainReply: ...


class Listener(Protocol):
    """Who is told how long answers take."""

    def note(self, question: str, outcome: str, seconds: float) -> None: ...


class BrainServer:
    def __init__(self, doorkeeper: Doorkeeper, desk: Desk, listener: Listener, tls: TlsConfig | None) -> None:
        self._doorkeeper = doorkeeper
        self._desk = desk
        self._listener = listener
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        self._door: Door | None = None
        self._watching: asyncio.Future[None] | None = None
        self._refusals = Rarely()
        self._bugs = Rarely()

    def bind(self, host: str, port: int) -> int:
        """Gives the port. Raises ConfigError."""
        most = max_connections()
        options = (
            *OPTIONS,
            ("grpc.max_receive_message_length", MAX_BRAIN_BYTES),
            ("grpc.max_allowed_incoming_connections", most),
        )
        credentials = None if self._tls is None else server_credentials(self._tls)
        server = grpc.aio.server(options=options)
        ask = grpc.stream_unary_rpc_method_handler(self._serve_ask)
        other = grpc.stream_unary_rpc_method_handler(self._serve_other)
        server.add_generic_rpc_handlers((MethodTable({f"/{BRAIN_SERVICE}/{ASK_METHOD}": ask}, other),))
        address = str(Address(host, port))
        try:
            bound = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise bind_error(host, port, error, who="Brain") from error
        self._server = server
        leave_the_silent_to_the_kernel(int(bound))
        self._door = Door(int(bound), max_outside=min(MAX_OUTSIDE, most // 4))
        return int(bound)

    async def start(self) -> None:
        assert self._server is not None, "bind first"
        assert self._door is not None, "bind first"
        await self._server.start()
        self._watching = asyncio.ensure_future(self._door.run())

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await self._server.stop(FLUSH_TIMEOUT)

    async def _serve_ask(self, _: object, call: grpc.aio.ServicerContext) -> bytes:
        """A stream of one message: for a unary method gRPC would read the whole message before we see the token."""
        assert self._door is not None, "served before bind"
        caller = await self._admit(call, self._door)
        with self._door.inside(place_of(call.peer())):
            return await self._answer(call, caller)

    async def _serve_other(self, _: object, call: grpc.aio.ServicerContext) -> bytes:
        assert self._door is not None, "served before bind"
        await self._admit(call, self._door)
        await call.abort(
            grpc.StatusCode.UNIMPLEMENTED, "the program at this address is Brain, and it has no such method"
        )
        raise AssertionError("abort always raises")

    async def _admit(self, call: grpc.aio.ServicerContext, door: Door) -> TokenHolder:
        """Token first: a stranger learns nothing else about us."""
        said = dict(call.invocation_metadata())
        token = said.get(TOKEN_KEY, b"")
        caller = self._doorkeeper.caller_of(token.decode(errors="replace") if isinstance(token, bytes) else "")
        if caller is None:
            place = place_of(call.peer())
            is_answered = door.refuse(place)
            if self._refusals.now():
                log.warning(
                    "callers without a valid token rejected num=%d newest=%s reason=token",
                    self._refusals.num,
                    call.peer(),
                )
            if not is_answered:
                await door.hold(place)
            await call.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the token of a tenant of Brain is missing or wrong. Give it with --brain-token-file or DLROVER_BRAIN_TOKEN_FILE",
            )
        protocol = str(said.get(PROTOCOL_KEY, ""))
        if protocol != str(PROTOCOL_VERSION):
            await call.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                explain_versions(protocol, str(said.get(VERSION_KEY, "unknown")), who="Brain"),
            )
        assert caller is not None, "abort always raises"
        return caller

    async def _answer(self, call: grpc.aio.ServicerContext, caller: TokenHolder) -> bytes:
        try:
            async with asyncio.timeout(READ_TIMEOUT):
                data = await call.read()
            data = b"" if data is grpc.aio.EOF else data
            question = BRAIN_QUESTION.decode(data)
        except TimeoutError:
            await call.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no message came within {READ_TIMEOUT:g} s")
        except Rejected as error:
            is_large = error.code == ErrorCode.TOO_LARGE
            await call.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED if is_large else grpc.StatusCode.INVALID_ARGUMENT, str(error)
            )
        return _encoded(await self.verdict_on(caller, question, len(data)))

    async def verdict_on(self, caller: TokenHolder, question: BrainQuestion, size_bytes: int) -> BrainVerdict:
        kind, began_at = type(question).__name__, time.perf_counter()
        outcome = "answered"
        try:
            return await self._desk.answer(caller, question, size_bytes)
        except Rejected as error:
            outcome = "refused"
            return Refusal(id=0, code=error.code, message=str(error))
        except Unavailable as error:
            outcome = "sent-away"
            retry_after = 1.0 if error.retry_after is None else error.retry_after
            return Refusal(id=0, code=error.code, message=str(error), retry_after=retry_after)
        except Exception:
            outcome = "failed"
            if self._bugs.now():
                log.exception("a question failed because of a bug kind=%s num=%d", kind, self._bugs.num)
            return Refusal(
                id=0,
                code=ErrorCode.INTERNAL,
                message=f"Brain failed on {kind} because of a bug. Its log has the traceback.",
            )
        finally:
            self._listener.note(kind, outcome, time.perf_counter() - began_at)


def _encoded(verdict: BrainVerdict) -> bytes:
    try:
        data = BRAIN_VERDICT.encode(verdict)
    except UNENCODABLE as error:
        log.error("an answer cannot be encoded kind=%s reason=%s", type(verdict).__name__, error)
        return BRAIN_VERDICT.encode(Refusal(id=0, code=ErrorCode.INTERNAL, message="The answer cannot be encoded."))
    if len(data) <= MAX_MESSAGE_BYTES:
        return data
    text = f"The answer has {len(data)} bytes, but a message can carry only {MAX_MESSAGE_BYTES}. Ask for fewer rows."
    return BRAIN_VERDICT.encode(Refusal(id=0, code=ErrorCode.TOO_LARGE, message=text))
