"""
How a call goes out of a process of the user: what both ends agree on, and the errors a caller can meet.

Arguments and results are the user's objects. They are pickled and opened in the user's own processes only; in between they are bytes.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from dlrover.host.edges import attempt, contained
from dlrover.protocol.errors import DLRoverError, JobError

Parts = Sequence[Any]
"""A pickle, and after it the large buffers that it names."""


class InstanceLost(JobError):
    """The callee died after the call was sent. It may have run. Methods with @rpc(retry=True) are sent again instead."""

    def __init__(self, role: str, rank: int, incarnation: int) -> None:
        super().__init__(
            f"{role}-{rank} (incarnation {incarnation}) ended during the call. The call may have run. If it may "
            "run twice, mark the method with @rpc(retry=True)."
        )
        self.role, self.rank, self.incarnation = role, rank, incarnation

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.role, self.rank, self.incarnation)


class RoleGone(JobError):
    """The role has ended and does not come back."""


class CallRefused(DLRoverError):
    """The callee has no such method, or takes no calls."""


class CallTimeout(DLRoverError):
    """No answer within the time of the call."""


class CallFailed(DLRoverError):
    """The method raised. `__cause__` is what it raised, if that can be pickled."""


class Ending(DLRoverError):
    """This instance was asked to end: calls and streams wait no more."""


class CallHeader(Struct, frozen=True, kw_only=True):
    id: str
    """The same when a call is sent again."""
    method: str
    caller: str = ""
    is_repeatable: bool = False
    timeout: float = 60.0


class Raised(Exception):
    """Carries a pickled exception through processes that must not open it."""

    def __init__(self, kind: str, text: str, data: bytes = b"") -> None:
        super().__init__(kind, text, data)
        self.kind, self.text, self.data = kind, text, data


HEADER = msgspec.msgpack.Decoder(CallHeader)
OUT_OF_BAND = 1 << 16
"""Bytes from which a buffer travels beside the pickle."""
REFUSED, FAILED, LOST, GONE, LATE, ENDED = "refused", "failed", "lost", "gone", "late", "ended"


class Wire(Protocol):
    """One process's way to the other instances."""

    def call(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Future[Parts]:
        """Fails with `Raised` or an error of this module."""

    def serve(self, answer: Callable[[CallHeader, Parts], Parts]) -> None:
        """Calls to this instance are answered by it, in threads of the wire."""

    def num_ranks(self, role: str) -> int:
        """Raises `ConfigError` for a role that the job does not have."""

    def roles(self) -> Mapping[str, int]: ...


def freeze(value: object) -> list[Any]:
    """As parts. Large buffers are not copied."""
    buffers: list[Any] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < OUT_OF_BAND:
            return True
        buffers.append(raw)
        return False

    try:
        stream = io.BytesIO()
        pickle.Pickler(stream, protocol=5, buffer_callback=keep).dump(value)
        return [stream.getvalue(), *buffers]
    except (pickle.PicklingError, AttributeError, TypeError):
        buffers.clear()
        return [_by_value(value)]


def thaw(parts: Parts) -> Any:
    return pickle.loads(bytes(parts[0]) if not isinstance(parts[0], bytes) else parts[0], buffers=parts[1:])


def raised(error: BaseException, method: str, name: str) -> Raised:
    """What a method raised, for its caller."""
    if isinstance(error, CallRefused):
        return Raised(REFUSED, str(error))
    text = "".join(traceback.format_exception(error)).strip()
    data = attempt(lambda: _checked(error), lambda _error: b"")  # an object of the user's: it may fail in any way
    return Raised(FAILED, f"{method} of {name} raised {type(error).__name__}: {error}\n{text}", data)


def _checked(error: BaseException) -> bytes:
    """It can be read again."""
    data = pickle.dumps(error)
    pickle.loads(data)
    return data


def as_error(error: Raised) -> DLRoverError:
    """For the caller."""
    if error.kind == REFUSED:
        return CallRefused(error.text)
    if error.kind == LOST:
        role, rank, incarnation = error.text.split()
        return InstanceLost(role, int(rank), int(incarnation))
    if error.kind == GONE:
        return RoleGone(error.text)
    if error.kind == LATE:
        return CallTimeout(error.text)
    if error.kind == ENDED:
        return Ending(error.text)
    failure = CallFailed(error.text)
    if error.data:
        # The class may exist at the callee only.
        with contained(lambda reason: failure.add_note(f"The text of the error cannot be shown: {reason}")):
            failure.__cause__ = pickle.loads(error.data)
    return failure


def as_raised(error: BaseException) -> Raised:
    """For the way through a process that must not open anything."""
    match error:
        case Raised():
            return error
        case InstanceLost():
            return Raised(LOST, f"{error.role} {error.rank} {error.incarnation}")
        case RoleGone():
            return Raised(GONE, str(error))
        case CallTimeout():
            return Raised(LATE, str(error))
        case CallRefused():
            return Raised(REFUSED, str(error))
        case Ending():
            return Raised(ENDED, str(error))
    return Raised(FAILED, f"{type(error).__name__}: {error}")


def _by_value(value: object) -> bytes:
    """Functions and classes of a script itself, which no other process can import."""
    try:
        import cloudpickle
    except ImportError:
        from ray import cloudpickle
    data: bytes = cloudpickle.dumps(value)
    return data
