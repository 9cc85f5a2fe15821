"""
Messages to bytes and back: the only codec on any socket of ours.

Decoding is the validation: what comes out has the declared types all the way down, or `Rejected` says where not.
Data only, so nothing on the wire can name code. The size is checked before a byte is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.checkpoint import RequestSave
from dlrover.protocol.messages.fleet import (
    MigrateNode,
    RestartJob,
    ResumeJob,
    ScaleJob,
    ScaleReplicas,
    SizeReplicas,
    SuspendJob,
)
from dlrover.protocol.messages.frames import Answer, FromAgent, FromMaster, Refusal
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, JobStatus, Query, StopJob
from dlrover.protocol.messages.requests import SteeringCommand
from dlrover.protocol.messages.scaling import ScaleTo, SetScaling
from dlrover.protocol.status_fitting import fit_into_answer
from dlrover.protocol.text import UNENCODABLE

T = TypeVar("T")

Question = (
    Query
    | StopJob
    | ScaleJob
    | ScaleReplicas
    | SizeReplicas
    | MigrateNode
    | SuspendJob
    | ResumeJob
    | RestartJob
    | RequestSave
    | SteeringCommand
    | SetScaling
    | ScaleTo
)
"""What a one-shot client may ask."""


class Unreadable(msgspec.Struct, frozen=True):
    """A request of a frame that did not decode but whose id did: it alone is refused, the others of the frame count."""

    id: int
    code: str
    message: str


class Codec(Generic[T]):
    """One message type, or one tagged union, to MessagePack (or JSON) and back."""

    def __init__(
        self, kind: object, *, name: str, max_bytes: int | None = MAX_MESSAGE_BYTES, is_json: bool = False
    ) -> None:
        """`max_bytes` None: it comes over no wire."""
        self._encoder = msgspec.json.Encoder() if is_json else _ENCODER
        self._decoder: msgspec.msgpack.Decoder[T] | msgspec.json.Decoder[T] = (
            msgspec.json.Decoder(kind) if is_json else msgspec.msgpack.Decoder(kind)
        )
        self._name = name
        self._max_bytes = max_bytes

    def encode(self, message: T) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> T:
        if self._max_bytes is not None and len(data) > self._max_bytes:
            raise Rejected(
                f"{self._name} has {len(data)} bytes; the limit is {self._max_bytes}", code=ErrorCode.TOO_LARGE
            )
        try:
            return self._decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise _explain(self._name, error) from error


def encode_frame(parcels: Sequence[FromAgent] | Sequence[FromMaster]) -> bytes:
    return _ENCODER.encode(parcels)


def encode_frames(parcels: Sequence[FromAgent] | Sequence[FromMaster]) -> list[bytes]:
    """As few frames as the size limit allows. What an agent sends is known to fit; an answer that does not is refused."""
    data = _ENCODER.encode(parcels)
    if len(data) <= MAX_MESSAGE_BYTES:
        return [data]
    if len(parcels) == 1:
        parcel = parcels[0]
        return [_ENCODER.encode([_fitting(parcel, len(data))]) if isinstance(parcel, Answer) else data]
    half = len(parcels) // 2
    return encode_frames(parcels[:half]) + encode_frames(parcels[half:])


def fit_verdict(verdict: Answer | Refusal) -> tuple[Answer | Refusal, bytes]:
    """For a one-shot client: what one message can carry of it, and that message."""
    data = _ENCODER.encode(verdict)
    if len(data) <= MAX_MESSAGE_BYTES or isinstance(verdict, Refusal):
        return verdict, data
    fitting = _fitting(verdict, len(data))
    return fitting, _ENCODER.encode(fitting)


def decode_from_agent(data: bytes) -> list[FromAgent | Unreadable]:
    """A newer agent may send a request this master does not know: that one is refused, the stream lives on."""
    try:
        return list(_FROM_AGENT.decode(data))
    except Rejected as error:
        if error.code == ErrorCode.TOO_LARGE:
            raise
        return [_decode_alone(raw) for raw in _PARCELS.decode(data)]


def decode_from_master(data: bytes) -> list[FromMaster]:
    return _FROM_MASTER.decode(data)


def check_size(parcel: FromAgent) -> None:
    """Before it is queued: a parcel that fits into no frame would otherwise end the stream again and again."""
    try:
        size_bytes = len(_ENCODER.encode([parcel]))
    except UNENCODABLE as error:
        raise Rejected(f"the message cannot be encoded: {error}", code=ErrorCode.MALFORMED) from error
    if size_bytes > MAX_MESSAGE_BYTES:
        raise Rejected(
            f"the message has {size_bytes} bytes; the limit is {MAX_MESSAGE_BYTES}", code=ErrorCode.TOO_LARGE
        )


def _fitting(answer: Answer, size_bytes: int) -> Answer | Refusal:
    """Instead of an answer that would end the stream, and the next one too when the question is asked again."""
    if isinstance(answer.body, JobStatus):
        fitting = Answer(id=answer.id, body=fit_into_answer(answer.body))
        if len(_ENCODER.encode([fitting])) <= MAX_MESSAGE_BYTES:
            return fitting
    kind = type(answer.body).__name__
    text = f"the answer ({kind}) has {size_bytes} bytes; the limit is {MAX_MESSAGE_BYTES}. Ask for less at once"
    return Refusal(id=answer.id, code=ErrorCode.TOO_LARGE, message=text)


class _Numbered(msgspec.Struct):
    id: int


_ENCODER = msgspec.msgpack.Encoder()
_FROM_AGENT: Codec[list[FromAgent]] = Codec(list[FromAgent], name="frame")
_FROM_MASTER: Codec[list[FromMaster]] = Codec(list[FromMaster], name="frame")
_ONE_FROM_AGENT: Codec[FromAgent] = Codec(FromAgent, name="message")
_PARCELS: Codec[list[msgspec.Raw]] = Codec(list[msgspec.Raw], name="frame")
_NUMBERED: Codec[_Numbered] = Codec(_Numbered, name="message")

QUESTION: Codec[Question] = Codec(Question, name="question")
VERDICT: Codec[Answer | Refusal] = Codec(Answer | Refusal, name="answer")


def _decode_alone(raw: msgspec.Raw) -> FromAgent | Unreadable:
    data = bytes(raw)
    try:
        return _ONE_FROM_AGENT.decode(data)
    except Rejected as error:
        try:
            return Unreadable(_NUMBERED.decode(data).id, error.code, str(error))
        except Rejected:
            raise error from None


def _explain(name: str, error: Exception) -> Rejected:
    text = str(error)
    if isinstance(error, msgspec.ValidationError) and "Invalid value" in text:
        # msgspec words an unknown tag as an invalid value of the tag field; say what it means for two versions of us.
        return Rejected(f"unknown {name}: {text}. The sender may be newer than the receiver", code=ErrorCode.UNKNOWN)
    return Rejected(f"malformed {name}: {text or type(error).__name__}", code=ErrorCode.MALFORMED)
