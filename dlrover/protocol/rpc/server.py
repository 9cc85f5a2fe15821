"""
The master's side of the wire: who may enter, and bytes to messages.

Everything a stranger can do wrong ends here with a clear status and changes nothing: a wrong token, another protocol
version, bytes that are no message, a message too large. What passes goes to the master's loop, which decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import resource
import socket
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio

from dlrover.protocol.addresses import Address, TlsConfig
from dlrover.protocol.codec import QUESTION, Question, Unreadable, decode_from_agent
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.messages.frames import FromAgent, FromMaster
from dlrover.protocol.messages.job import PROTOCOL_VERSION, Reply
from dlrover.protocol.rpc.door import MAX_OUTSIDE, Door, leave_the_silent_to_the_kernel, place_of
from dlrover.protocol.rpc.questions import sendable, verdict_on
from dlrover.protocol.rpc.rarely import Rarely
from dlrover.protocol.rpc.transport import (
    AGENT_METHOD,
    ASK_METHOD,
    PROTOCOL_KEY,
    SERVER_OPTIONS,
    SERVICE,
    TOKEN_KEY,
    VERSION_KEY,
    Outbox,
    package_version,
    server_credentials,
)

log = logging.getLogger(__name__)

FLUSH_TIMEOUT = 1.0
MAX_RESERVE = 512
"""Descriptors that connections never take: the journal, the page and the door itself need some."""


class PortTaken(ConfigError):
    """Another process listens there: perhaps the job's master, and we are to connect instead."""


class AgentStream:
    """One agent's open stream, as the master's loop sees it."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._outbox: Outbox[FromMaster] = Outbox()
        self._ended = asyncio.Event()

    def send(self, parcel: FromMaster) -> None:
        """Never blocks; whatever gathers leaves together."""
        self._outbox.put(parcel)

    def end(self) -> None:
        """Close it once what was sent has left; the agent may come back on another one."""
        self._ended.set()


class MessageSink(Protocol):
    """Where messages go. All three run in the event loop and must not block."""

    def receive(self, stream: AgentStream, parcels: Sequence[FromAgent | Unreadable]) -> None: ...

    def closed(self, stream: AgentStream) -> None:
        """Once for each stream, whatever ended it."""

    async def ask(self, question: Question) -> Reply:
        """Raises Rejected or Unavailable."""


class MasterServer:
    """
    Serves agents' streams and one-shot questions on one port.

    Binding and serving are apart: a master that finds its port taken must not have touched the journal of the one that
    holds it. Who connects in between waits in the kernel's queue.
    """

    def __init__(self, *, token: str, tls: TlsConfig | None = None) -> None:
        self._master_loop: MessageSink | None = None
        self._token = token.encode()
        self._tls = tls
        self._streams: list[AgentStream] = []
        self._server: grpc.aio.Server | None = None
        self._door: Door | None = None
        self._watching: asyncio.Future[None] | None = None
        self._refusals = Rarely()

    def bind(self, host: str, port: int) -> int:
        """Gives the port, which matters if 0 was asked for. Raises PortTaken or ConfigError."""
        credentials = None if self._tls is None else server_credentials(self._tls)
        most_connections = max_connections()
        server = grpc.aio.server(options=(*SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", most_connections)))
        handlers = {
            f"/{SERVICE}/{AGENT_METHOD}": grpc.stream_stream_rpc_method_handler(self._serve_agent),
            f"/{SERVICE}/{ASK_METHOD}": grpc.stream_unary_rpc_method_handler(self._serve_ask),
        }
        other = grpc.stream_unary_rpc_method_handler(self._serve_other)
        server.add_generic_rpc_handlers((MethodTable(handlers, other),))
        address = str(Address(host, port))
        try:
            bound = (
                server.add_insecure_port(address)
                if credentials is None
                else server.add_secure_port(address, credentials)
            )
        except RuntimeError as error:
            raise bind_error(host, port, error) from error
        self._server = server
        leave_the_silent_to_the_kernel(int(bound))
        self._door = Door(int(bound), max_outside=min(MAX_OUTSIDE, most_connections // 4))
        return int(bound)

    async def start(self, master_loop: MessageSink, *, num_expected: int = 0) -> None:
        """`num_expected`: agents that were attached to a former master and will come back, all at once."""
        assert self._server is not None, "bind first"
        self._master_loop = master_loop
        await self._server.start()
        _, door = self._behind()
        door.num_expected = num_expected
        self._watching = asyncio.ensure_future(door.run())

    async def stop(self) -> None:
        """End the streams after what was sent has left, then close the port."""
        if self._watching is not None:
            self._watching.cancel()
        for stream in self._streams:
            stream.end()
        if self._server is not None:
            await self._server.stop(FLUSH_TIMEOUT)

    async def _serve_agent(self, _: object, call: grpc.aio.ServicerContext) -> None:
        master_loop, door = self._behind()
        await self._admit(call, door)
        with door.inside(place_of(call.peer())):
            await self._converse(call, master_loop)

    async def _converse(self, call: grpc.aio.ServicerContext, master_loop: MessageSink) -> None:
        await call.send_initial_metadata(())
        stream = AgentStream(call.peer())
        self._streams.append(stream)
        reader = asyncio.ensure_future(_read(stream, call, master_loop))
        writer = asyncio.ensure_future(stream._outbox.run(call.write))
        ended = asyncio.ensure_future(stream._ended.wait())
        try:
            await asyncio.wait({reader, ended, writer}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done() and (trouble := writer.exception()) is not None:
                # A bug of ours: the agent would wait for answers for ever. Without the stream it presents itself anew.
                log.error("a message to an agent could not be sent peer=%s", stream.peer, exc_info=trouble)
                return
            await asyncio.wait({reader, ended}, return_when=asyncio.FIRST_COMPLETED)
            if reader.done():
                reader.result()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stream._outbox.idle(), FLUSH_TIMEOUT)
        except Rejected as error:
            await call.abort(_status_of(error), str(error))
        finally:
            self._streams.remove(stream)
            master_loop.closed(stream)
            for task in (reader, writer, ended):
                task.cancel()
            await asyncio.gather(reader, writer, ended, return_exceptions=True)

    async def _serve_ask(self, _: object, call: grpc.aio.ServicerContext) -> bytes:
        """A stream of one message: for a unary method gRPC would read the whole message before we see the token."""
        master_loop, door = self._behind()
        await self._admit(call, door)
        with door.inside(place_of(call.peer())):
            return await _answer(call, master_loop)

    async def _serve_other(self, _: object, call: grpc.aio.ServicerContext) -> bytes:
        """A method that there is not. gRPC itself would say so to strangers, too, as often as they ask."""
        await self._admit(call, self._behind()[1])
        await call.abort(grpc.StatusCode.UNIMPLEMENTED, "this master has no such method")
        raise AssertionError("abort always raises")

    def _behind(self) -> tuple[MessageSink, Door]:
        assert self._master_loop is not None, "served before start"
        assert self._door is not None, "served before bind"
        return self._master_loop, self._door

    async def _admit(self, call: grpc.aio.ServicerContext, door: Door) -> None:
        """Token first: a stranger learns nothing else about us."""
        said = dict(call.invocation_metadata())
        token = said.get(TOKEN_KEY, b"")
        if self._token and not hmac.compare_digest(token if isinstance(token, bytes) else b"", self._token):
            place = place_of(call.peer())
            is_answered = door.refuse(place)
            if self._refusals.now():
                log.warning(
                    "callers without the job token rejected num=%d newest=%s reason=token",
                    self._refusals.num,
                    call.peer(),
                )
            if not is_answered:
                await door.hold(place)
            await call.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "the job token is missing or wrong. Give the job's token with DLROVER_JOB_TOKEN or its token "
                "file. If this is the master of another job, choose another port",
            )
        protocol = str(said.get(PROTOCOL_KEY, ""))
        if protocol != str(PROTOCOL_VERSION):
            log.warning(
                "a caller was rejected peer=%s reason=protocol theirs=%s ours=%s",
                call.peer(),
                protocol,
                PROTOCOL_VERSION,
            )
            await call.abort(
                grpc.StatusCode.FAILED_PRECONDITION, explain_versions(protocol, str(said.get(VERSION_KEY, "unknown")))
            )


class MethodTable(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every call has a handler: all are refused in the same way."""

    def __init__(self, handlers: dict[str, grpc.RpcMethodHandler], other: grpc.RpcMethodHandler) -> None:
        self._handlers = handlers
        self._other = other

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handlers.get(details.method, self._other)


async def _answer(call: grpc.aio.ServicerContext, master_loop: MessageSink) -> bytes:
    data = await call.read()
    try:
        question = QUESTION.decode(b"" if data is grpc.aio.EOF else data)
    except Rejected as error:
        await call.abort(_status_of(error), str(error))
    _, data = sendable(await verdict_on(question, master_loop.ask))
    return data


async def _read(stream: AgentStream, call: grpc.aio.ServicerContext, master_loop: MessageSink) -> None:
    while True:
        data = await call.read()
        if data is grpc.aio.EOF:
            return
        master_loop.receive(stream, decode_from_agent(data))
        # A peer that sends without reading its answers must not fill our memory.
        await stream._outbox.room()


def explain_versions(protocol: str, version: str, *, who: str = "master") -> str:
    """Which side is older, and what to do about it."""
    ours = f"dlrover {package_version()}, protocol {PROTOCOL_VERSION}"
    theirs = f"dlrover {version}, protocol {protocol or 'unstated'}"
    if protocol.isdigit() and int(protocol) > PROTOCOL_VERSION:
        return f"the {who} ({ours}) is older than the caller ({theirs}). Upgrade dlrover where the {who} runs"
    return f"the caller ({theirs}) is older than the {who} ({ours}). Upgrade dlrover where the caller runs"


def _status_of(error: Rejected) -> grpc.StatusCode:
    return grpc.StatusCode.RESOURCE_EXHAUSTED if error.code == ErrorCode.TOO_LARGE else grpc.StatusCode.INVALID_ARGUMENT


def max_connections() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2**30 if limit == resource.RLIM_INFINITY else limit
    return limit - min(MAX_RESERVE, limit // 4)


def bind_error(host: str, port: int, error: RuntimeError, *, who: str = "master") -> ConfigError:
    """gRPC does not say why it could not bind; the kernel does."""
    address = Address(host, port)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as cause:
        if cause.errno == errno.EADDRINUSE:
            return PortTaken(
                f"Port {port} of {host} is in use by another process, so no {who} can listen there. "
                f"Choose another port, 0 for any free one, or stop what listens on {address}."
            )
        return ConfigError(f"cannot listen on {address}: {cause.strerror or cause}. Give an address of this machine.")
    return ConfigError(f"cannot listen on {address}: {error}")
