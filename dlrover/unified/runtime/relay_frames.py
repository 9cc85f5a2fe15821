"""
What a forked worker and the node actor above it say to each other: messages of ours, and beside them the bytes of a call, which only pass through.

One frame: how long the message is and how many parts follow, then the length of each part, the message, the parts.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.unified.runtime.wire import CallHeader

SOCKET_VARIABLE = "DLROVER_ENSEMBLE_SOCKET"
MAX_MESSAGE = 1 << 20
MAX_PARTS = 1024


class WorkerHello(Struct, tag=True, frozen=True):
    """The first message of a worker."""

    rank: int
    pid: int


class WorkerWelcome(Struct, tag=True, frozen=True, kw_only=True):
    job: str
    job_uid: str
    role: str
    num_ranks: dict[str, int]
    """By role. Part 1 is the user's configuration."""
    takes_calls: bool = True
    """False: other instances refuse calls to this role."""


class ServeCalls(Struct, tag=True, frozen=True):
    """From now on the worker answers calls."""

    repeatable: tuple[str, ...]


class ServingCalls(Struct, tag=True, frozen=True):
    """Its life has this number."""

    incarnation: int


class RelayedCall(Struct, tag=True, frozen=True):
    """A call to another instance; from the actor to the worker: a call of another instance."""

    ticket: int
    role: str
    rank: int
    header: CallHeader


class RelayedAnswer(Struct, tag=True, frozen=True):
    """Parts are the result, or none."""

    ticket: int
    kind: str = ""
    """Of an error; empty: it went well."""
    text: str = ""
    data: bytes = b""


Message = WorkerHello | WorkerWelcome | ServeCalls | ServingCalls | RelayedCall | RelayedAnswer

_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")
HEAD_BYTES = _HEAD.size
LENGTH_BYTES = _LENGTH.size
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class BadFrame(Exception):
    """The other side is no worker or actor of ours."""


def pack_frame(message: Message, parts: Any = ()) -> list[Any]:
    """Buffers to send one after the other."""
    data = msgspec.msgpack.encode(message)
    views = [memoryview(part).cast("B") for part in parts]
    return [
        b"".join([_HEAD.pack(len(data), len(views)), *(_LENGTH.pack(view.nbytes) for view in views), data]),
        *views,
    ]


def read_head(data: bytes | bytearray) -> tuple[int, int]:
    """Bytes of the message, and number of parts. Raises `BadFrame`."""
    size, num_parts = _HEAD.unpack(data)
    if size > MAX_MESSAGE or num_parts > MAX_PARTS:
        raise BadFrame(f"a message of {size} bytes with {num_parts} parts")
    return size, num_parts


def read_lengths(data: bytes | bytearray) -> list[int]:
    return [_LENGTH.unpack_from(data, place)[0] for place in range(0, len(data), LENGTH_BYTES)]


def read_message(data: bytes | bytearray) -> Message:
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise BadFrame(str(error)) from error
