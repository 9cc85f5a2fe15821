"""
The wire between agents: framed messages, raw bytes, and a proof on both sides that one knows the job's token.

Bulk bytes are moved by threads over blocking sockets, straight between the socket and the segment. The event loop
of the agent, which has heartbeats to send and workers to watch, sees none of them, and there is no copy in between.

Who calls is challenged with a random number and answers with a keyed hash of it; the other side proves itself in the same way.
The token never travels. Where the job has certificates the connection is TLS, and then needs one on each node.

Every read and write has a limit: a peer that says nothing for a few seconds is given up, and so is one that trickles beyond the deadline
of the whole.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import msgspec

from dlrover.agent.replicas.handshakes import HANDSHAKE, Caller, Handshakes
from dlrover.host.edges import logged
from dlrover.protocol.addresses import Address, TlsConfig, is_loopback, parse_address
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.messages.peers import (
    PEER_PROTOCOL,
    Accepted,
    Challenge,
    PeerMessage,
    Proof,
    Refused,
    Welcome,
)
from dlrover.protocol.rpc.rarely import Rarely

log = logging.getLogger("dlrover.agent")

STALL = 5.0
"""Seconds without a byte after which a peer is given up."""
WORK_PATIENCE = 60.0
"""Seconds for a peer to get the memory for a copy, or to add a piece to a parity."""
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_HANDSHAKE_BYTES = 4 * 1024
MAX_CONNECTIONS = 64
"""Conversations with other nodes at a time. Who has not proved to be one has slots of its own."""
MAX_REASON = 200
"""Characters of what a stranger may make us log."""
NICENESS = 5
_PAUSE = 1.0
"""Seconds until a connection is taken again after there was no descriptor or thread for one."""
_BLOCK_BYTES = 1024 * 1024
"""Moved between two looks at the clock and the rate limit."""
_PORTS_FOR_WORKERS = 2
"""Of those that can be reached from outside, so many are never taken: rounds change between them."""
_HEAD = struct.Struct("<II")
_DECODER: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
"""Made before there are connections: msgspec dies of two threads of which one uses a struct that the other is just learning."""
_NONCE_BYTES = 32

T = TypeVar("T")


def be_nice() -> None:
    """This thread works in the background: training, and what a restart waits for, go first."""
    if os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICENESS:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class RateLimit:
    """So many bytes per second over all transfers of a direction; 0: as many as there can be."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def pause(self, num_bytes: int) -> float:
        """How long to wait after these bytes."""
        if self._rate <= 0:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._rate
            return self._free_at - now


class Secret:
    """What both sides of a connection know: made from the job's token, and good for nothing else."""

    def __init__(self, token: str, job: str) -> None:
        self._key = hmac.digest(token.encode(), b"dlrover peers\0" + job.encode(), "sha256")

    def mac(self, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
        return hmac.digest(self._key, side + b"\0" + server_nonce + client_nonce, hashlib.sha256)


class PeerConnection:
    """One conversation. Used by one thread."""

    def __init__(self, sock: socket.socket, *, deadline: float, stall: float = STALL) -> None:
        """`deadline` is an instant of the monotonic clock."""
        self._socket = sock
        self.deadline = deadline
        self._stall = stall
        self.max_message_bytes = MAX_HANDSHAKE_BYTES
        """More once both have proved themselves: the memory for a message is taken when its length is known."""

    def send(self, message: PeerMessage) -> None:
        body = msgspec.msgpack.encode(message)
        assert len(body) <= MAX_MESSAGE_BYTES, f"{type(message).__name__} of {len(body)} bytes"
        self._arm()
        try:
            self._socket.sendall(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        except OSError as error:
            raise _lost(error) from error

    @overload
    def receive(self, kind: type[T], /) -> T: ...

    @overload
    def receive(self, *kinds: type[PeerMessage]) -> PeerMessage: ...

    def receive(self, *kinds: type[Any]) -> Any:
        """The next message, which must be one of these. Raises Rejected when the peer refuses or talks nonsense."""
        head = bytearray(_HEAD.size)
        self.receive_into(memoryview(head))
        length, crc = _HEAD.unpack(head)
        if length > self.max_message_bytes:
            raise Rejected(
                f"a message of {length} bytes: the limit is {self.max_message_bytes}", code=ErrorCode.TOO_LARGE
            )
        body = bytearray(length)
        self.receive_into(memoryview(body))
        if zlib.crc32(body) != crc:
            raise Rejected("a message is damaged: it arrived with a different checksum", code=ErrorCode.CORRUPT)
        try:
            message = _DECODER.decode(body)
        except msgspec.MsgspecError as error:
            raise Rejected(f"a message cannot be read: {error}", code=ErrorCode.MALFORMED) from error
        if isinstance(message, Refused):
            raise Rejected(message.message or message.code, code=message.code)
        if not isinstance(message, kinds):
            raise Rejected(
                f"unexpected message {type(message).__name__} in this state of the transfer", code=ErrorCode.MALFORMED
            )
        return message

    def await_consent(self) -> None:
        """
        Until the peer has the memory for what comes, or has made of it what it should. Both are work: clearing pages takes about a second per
        GiB, on a machine that is busy training some more.
        """
        usual, self._stall = self._stall, max(self._stall, WORK_PATIENCE)
        try:
            self.receive(Accepted)
        finally:
            self._stall = usual

    def send_bytes(
        self, data: memoryview, *, limit: RateLimit | None = None, is_paused: Callable[[], None] | None = None
    ) -> None:
        """`is_paused` is called between blocks and may take its time, or raise."""
        for start in range(0, data.nbytes, _BLOCK_BYTES):
            self._arm()
            block = data[start : start + _BLOCK_BYTES]
            try:
                self._socket.sendall(block)
            except OSError as error:
                raise _lost(error) from error
            if limit is not None and (pause := limit.pause(block.nbytes)) > 0:
                time.sleep(pause)
            if is_paused is not None:
                is_paused()

    def receive_into(self, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            self._arm()
            try:
                count = self._socket.recv_into(view[done : done + _BLOCK_BYTES])
            except OSError as error:
                raise _lost(error) from error
            if not count:
                raise Unavailable("the other node closed the connection")
            done += count

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _arm(self) -> None:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Unavailable("the deadline of the transfer has passed")
        self._socket.settimeout(min(left, self._stall))


def connect(
    address: str, secret: Secret, tls: TlsConfig | None, *, deadline: float, stall: float = STALL
) -> PeerConnection:
    """Both have proved that they are of this job when it returns. Raises Unavailable and Rejected."""
    place = parse_address(address)
    try:
        limit = max(0.001, min(stall, deadline - time.monotonic()))
        sock = socket.create_connection((place.host, place.port), timeout=limit)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            sock = _client_context(tls).wrap_socket(sock, server_hostname=place.host)
    except OSError as error:
        raise Unavailable(f"No agent answers at {address}: {error}") from error
    connection = PeerConnection(sock, deadline=deadline, stall=stall)
    try:
        challenge = connection.receive(Challenge)
        if challenge.version != PEER_PROTOCOL:
            raise Rejected(
                f"the agent at {address} uses version {challenge.version} of the protocol, and this agent uses "
                f"{PEER_PROTOCOL}. Install the same version of dlrover on all nodes",
                code=ErrorCode.VERSION,
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send(Proof(nonce=nonce, mac=secret.mac(b"caller", challenge.nonce, nonce)))
        welcome = connection.receive(Welcome)
        if not hmac.compare_digest(welcome.mac, secret.mac(b"called", challenge.nonce, nonce)):
            raise Rejected(
                f"the agent at {address} has another job token. Give all nodes of the job the same token",
                code=ErrorCode.BAD_TOKEN,
            )
    except BaseException:
        connection.close()
        raise
    connection.max_message_bytes = MAX_MESSAGE_BYTES
    return connection


class PeerServer:
    """Listens for other agents; each conversation has a thread of its own, and there are not many at a time."""

    def __init__(
        self,
        host: str,
        secret: Secret,
        tls: TlsConfig | None,
        serve: Callable[[PeerConnection], None],
        *,
        ports: tuple[int, ...] = (),
        patience: float = 600.0,
        stall: float = STALL,
        handshake: float = HANDSHAKE,
    ) -> None:
        """`serve` reads requests until the connection ends. Raises OSError and ConfigError when we cannot listen."""
        self._secret = secret
        self._serve = serve
        self._patience = patience
        self._stall = stall
        self._context = None if tls is None else _server_context(tls)
        self._handshake = handshake
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._handshakes = Handshakes()
        self._refusals = Rarely()
        self._open: set[Caller] = set()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._socket = _listen(host, ports)
        self.address = str(Address(host, self._socket.getsockname()[1]))
        threading.Thread(target=self._accept, name="dlrover-peers", daemon=True).start()

    def close(self) -> None:
        """Also ends the conversations that are under way."""
        self._is_closed.set()
        with self._lock:
            open_, self._open = self._open, set()
        for caller in (Caller(self._socket, ""), *open_):
            caller.shut_down()
        self._socket.close()

    def _accept(self) -> None:
        """Until closed: whatever else is in the way of a connection, a lack of descriptors or threads, passes."""
        is_told = False
        while not self._is_closed.is_set():
            try:
                self._take_next()
                is_told = False
            except (OSError, RuntimeError) as error:
                if not is_told and not self._is_closed.is_set():
                    log.warning("this node cannot serve its snapshots to other nodes now; it keeps trying: %s", error)
                    is_told = True
                self._is_closed.wait(_PAUSE)

    def _take_next(self) -> None:
        """Raises OSError, and RuntimeError where no thread can be started."""
        sock, (host, *_) = self._socket.accept()
        caller = Caller(sock, host)
        self._handshakes.begin(caller)
        try:
            threading.Thread(target=self._converse, args=(caller,), name="dlrover-peer", daemon=True).start()
        except RuntimeError:
            sock.close()
            self._handshakes.end(caller)
            raise

    def _converse(self, caller: Caller) -> None:
        with self._lock:
            self._open.add(caller)
        try:
            with logged(log, "bug in DLRover while another node was served"):
                self._talk(caller)
        finally:
            with self._lock:
                self._open.discard(caller)
            self._handshakes.end(caller)
            caller.socket.close()

    def _talk(self, caller: Caller) -> None:
        try:
            connection = self._prove_each_other(caller)
            if connection is not None:
                self._serve_peer(connection)
        except (OSError, Unavailable) as error:
            log.debug("a peer's connection ended: %s", error)
        except Rejected as error:
            log.warning("a request of another node was rejected: %s", error)

    def _prove_each_other(self, caller: Caller) -> PeerConnection | None:
        """None: it is a stranger. Raises OSError and Unavailable."""
        deadline = time.monotonic() + self._handshake
        caller.socket.settimeout(self._handshake)
        caller.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            caller.socket = self._context.wrap_socket(caller.socket, server_side=True)
        connection = PeerConnection(caller.socket, deadline=deadline, stall=self._handshake)
        try:
            self._prove(connection)
        except Rejected as error:
            if self._refusals.now():
                reason = str(error)[:MAX_REASON]
                log.warning(
                    "connections without the job token rejected num=%d newest=%s reason=%r",
                    self._refusals.num,
                    caller.address,
                    reason,
                )
            return None
        self._handshakes.succeed(caller)
        proven = PeerConnection(caller.socket, deadline=time.monotonic() + self._patience, stall=self._stall)
        proven.max_message_bytes = MAX_MESSAGE_BYTES
        return proven

    def _serve_peer(self, connection: PeerConnection) -> None:
        if not self._slots.acquire(blocking=False):
            raise Unavailable(f"this node already serves {MAX_CONNECTIONS} other nodes")
        try:
            self._serve(connection)
        finally:
            self._slots.release()

    def _prove(self, connection: PeerConnection) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.send(Challenge(nonce=nonce))
        proof = connection.receive(Proof)
        if not hmac.compare_digest(proof.mac, self._secret.mac(b"caller", nonce, proof.nonce)):
            connection.send(Refused(code=ErrorCode.BAD_TOKEN, message="The caller does not have this job's token."))
            raise Rejected("the caller does not have this job's token", code=ErrorCode.BAD_TOKEN)
        connection.send(Welcome(mac=self._secret.mac(b"called", nonce, proof.nonce)))


def _listen(host: str, ports: tuple[int, ...]) -> socket.socket:
    """On the loopback only if that is where the job is. `ports` are the only ones that others can reach, if given."""
    bind_to = host if is_loopback(host) else ""
    family = socket.AF_INET6 if ":" in bind_to or not bind_to else socket.AF_INET
    error: OSError | None = None
    for port in reversed(ports[_PORTS_FOR_WORKERS:]) if ports else (0,):
        try:
            if bind_to:
                return socket.create_server((bind_to, port), family=family)
            is_dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if is_dual else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
        except OSError as trouble:
            error = trouble
    raise error or OSError(f"HOST_PORTS lists only {len(ports)} ports, and the workers need all of them. Add a port")


def _server_context(tls: TlsConfig) -> ssl.SSLContext:
    if not (tls.cert and tls.key):
        raise ConfigError(
            "snapshots cannot be exchanged with other nodes: the job uses TLS, but this node has no "
            "certificate. Give --tls-cert and --tls-key"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    if tls.ca:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _client_context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca or None)
    if tls.cert and tls.key:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _lost(error: OSError) -> Unavailable:
    if isinstance(error, TimeoutError):
        return Unavailable("the other node sent nothing within the time limit")
    return Unavailable(f"the connection to the other node broke: {error}")
