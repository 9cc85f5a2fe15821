"""
What both ends of a gRPC connection share: names, options, certificates, the metadata that opens a call, and the outbox.

gRPC carries raw bytes here, without protobuf, so no version of it can conflict with a user's framework. Its own retries
are off: trying again is done at one layer only, ours, which knows idempotency keys and jitter.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import grpc.aio
from msgspec.structs import replace

from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.codec import encode_frame, encode_frames
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.frames import Answer, FromAgent, FromMaster, Observed, Refusal
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, PROTOCOL_VERSION
from dlrover.protocol.text import UNENCODABLE, encodable

log = logging.getLogger(__name__)

SERVICE = "dlrover.Master"
AGENT_METHOD = "Agent"
ASK_METHOD = "Ask"

TOKEN_KEY = "dlrover-token-bin"
"""The suffix tells gRPC that the value is bytes: tokens derived from a user's job id need not be ASCII."""
PROTOCOL_KEY = "dlrover-protocol"
VERSION_KEY = "dlrover-version"

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # an http_proxy variable must not carry loopback or pod traffic away
    # A new channel must try to connect at once: subchannels shared with an earlier channel would remember its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name: how long one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A master whose host lost power says nothing; 20 s of unanswered pings end the stream.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

MAX_CALLS_WAITING = 65_536
"""Calls that were opened and that the master has not looked at yet: agents by the ten thousand may come at once."""

MAX_STREAMS = 16
"""Of one connection at a time. Without this bound gRPC queues as many calls as a stranger opens, 10 KB each."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),  # by default two masters would share one port, silently
    # By default gRPC cancels calls at random when more than a thousand wait to be looked at, as after a restart of the
    # master. Who is sent away comes again, and is one more who waits.
    ("grpc.server.max_pending_requests", MAX_CALLS_WAITING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS_WAITING),
    # What a connection may cost before it has shown the token, see docs/reference/protocol.md. An agent needs one stream.
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    # By default gRPC takes megabytes of a stream that we do not read, if they come quickly; so it takes 64 KiB.
    ("grpc.http2.bdp_probe", 0),
    # We never compress. With grpcio 1.66 a megabyte grows to a gigabyte before its length is compared with the limit.
    ("grpc.per_message_decompression", 0),
    # Together not faster than the 40 s after which a silent node counts as gone.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.max_pings_without_data", 0),
)

_OUTBOX_LIMIT = 4096
"""Parcels that may wait for a peer that does not read; beyond it we stop reading from that peer."""

Parcel = TypeVar("Parcel", FromAgent, FromMaster)


class Outbox(Generic[Parcel]):
    """Parcels on their way out. One writer sends what gathered while its previous write was under way as one frame."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._has_work.set()
        self._is_idle.clear()
        if len(self._parcels) >= _OUTBOX_LIMIT:
            self._has_room.clear()

    async def room(self) -> None:
        await self._has_room.wait()

    async def idle(self) -> None:
        """Until everything was handed to the transport."""
        await self._is_idle.wait()

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Until cancelled, or until the stream is gone: the reader of that stream then learns why. Nothing else ends it."""
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                parcels, self._parcels = self._parcels, []
                self._has_room.set()
                for frame in _frames(parcels):
                    await write(frame)
                if not self._parcels:
                    self._is_idle.set()
        except (grpc.RpcError, grpc.aio.UsageError, grpc.aio.InternalError, asyncio.InvalidStateError):
            return
        finally:
            # Nobody may wait for a writer that is gone.
            self._is_idle.set()
            self._has_room.set()


def _frames(parcels: Sequence[FromAgent] | Sequence[FromMaster]) -> list[bytes]:
    """Without what cannot be encoded: it must not take along what was queued with it, heartbeats among them."""
    try:
        return encode_frames(parcels)
    except UNENCODABLE:
        return [frame for parcel in parcels for frame in _frame(parcel)]


def _frame(parcel: FromAgent | FromMaster) -> list[bytes]:
    """Of one parcel, or of what can be said instead of it; empty if that is nothing."""
    try:
        return encode_frames((parcel,))  # type: ignore[arg-type]
    except UNENCODABLE as error:
        content = parcel.observation if isinstance(parcel, Observed) else getattr(parcel, "body", parcel)
        log.error("a message cannot be encoded, and is not sent kind=%s reason=%s", type(content).__name__, error)
        return [encode_frame((instead_of(parcel),))] if isinstance(parcel, Answer | Refusal) else []


def instead_of(verdict: Answer | Refusal) -> Refusal:
    """Of one that cannot be encoded: a caller waits for it."""
    if isinstance(verdict, Refusal):
        return replace(verdict, message=encodable(verdict.message))
    kind = type(verdict.body).__name__
    return Refusal(id=verdict.id, code=ErrorCode.INTERNAL, message=f"The answer ({kind}) cannot be encoded.")


@functools.cache
def package_version() -> str:
    from importlib import metadata  # here: 20 ms that a restarting master can spare

    return metadata.version("dlrover")


def call_metadata(token: str) -> tuple[tuple[str, str | bytes], ...]:
    return (
        (TOKEN_KEY, token.encode()),
        (PROTOCOL_KEY, str(PROTOCOL_VERSION)),
        (VERSION_KEY, package_version()),
    )


def open_channel(address: str, tls: TlsConfig | None, *more: tuple[str, int]) -> grpc.aio.Channel:
    """`more`: options of gRPC beside ours."""
    options = (*CLIENT_OPTIONS, *more)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, client_credentials(tls), options=options)


def client_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    if bool(tls.cert) != bool(tls.key):
        raise ConfigError("TLS: a client certificate needs both cert and key (or neither)")
    return grpc.ssl_channel_credentials(
        root_certificates=_read(tls.ca, "ca") if tls.ca else None,
        private_key=_read(tls.key, "key") if tls.key else None,
        certificate_chain=_read(tls.cert, "cert") if tls.cert else None,
    )


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    if not (tls.cert and tls.key):
        raise ConfigError("TLS: the master needs a certificate: give both cert and key")
    return grpc.ssl_server_credentials(
        [(_read(tls.key, "key"), _read(tls.cert, "cert"))],
        root_certificates=_read(tls.ca, "ca") if tls.ca else None,
        require_client_auth=bool(tls.ca),
    )


def _read(path: str, field: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS {field}: cannot read {path}: {error.strerror}. Give a readable PEM file") from error
