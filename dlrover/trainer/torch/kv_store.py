"""
`MasterKVStore`: a `torch.distributed.Store` that the job's master keeps.

It is made for exchanging small things among the workers of a job, and outlives what a TCPStore does not: the death of a rank,
and of the master itself. `init_process_group(store=MasterKVStore(...))` works, up to 64 ranks or so; by default torch's
own store at the coordinator connects the ranks.

Waiting happens on the master, which answers the moment the last key is there; no process polls.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NoReturn

import torch.distributed
from torch.distributed import DistStoreError, Store

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Reply, Round, WorkerRequest
from dlrover.protocol.messages.kv import (
    MAX_VALUE_BYTES,
    KvAdd,
    KvAppend,
    KvCheck,
    KvCompareSet,
    KvCount,
    KvDelete,
    KvFlag,
    KvGet,
    KvKeys,
    KvList,
    KvNumber,
    KvPop,
    KvPush,
    KvQueueLength,
    KvSet,
    KvValues,
    KvWait,
)
from dlrover.trainer import environment
from dlrover.trainer.agent_link import Link, current_link, pause_before_retry

DEFAULT_TIMEOUT = timedelta(seconds=300)
_SLICE = 30.0
"""Seconds that one question waits on the master; longer waits are renewed, so no call waits there for a dead worker."""
_PATIENCE = 10.0
"""Least seconds for what does not wait: a timeout of milliseconds is meant for keys, not for a master that restarts."""
_MARGIN = 2.0
"""Seconds after the end of a wait for the answer that says so."""
_CHUNK_BYTES = 2 * MAX_VALUE_BYTES
"""What one message carries of a `multi_set`."""
_HEADER_BYTES = 10
"""At most, of a key and its value in a message."""

QueueEmptyError: type[Exception] = getattr(torch.distributed, "QueueEmptyError", DistStoreError)
"""What torch raises where it has queues; older versions have neither."""


_kept: list[Store] = []
"""Every store for the life of the process. torch's process groups hold only the C++ half of a store; once the Python half is
collected, the next group that is made from it dies of an internal assertion."""


class MasterKVStore(Store):  # type: ignore[misc]  # torch is not typed for us
    """
    Keys are `prefix/key`, in the namespace of one round: `round` 0 is that of the whole job, by default it is the
    worker's own, whose keys are dropped when two newer rounds exist.

    Values are bytes (text is encoded), at most 1 MiB each and 64 MiB in all. A wait that ends raises `DistStoreError`.
    """

    def __init__(
        self,
        prefix: str = "",
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        *,
        round: int | None = None,  # noqa: A002  # our word, and nobody rounds here
        link: Link | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a str, not {type(prefix).__name__}")
        where = environment.current()
        self._prefix = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        self._round = Round(round) if round is not None else where.round if where is not None else Round(0)
        self._link = current_link() if link is None else link
        _kept.append(self)
        # Kept by torch's half of the object, where a PrefixStore around us looks for it and changes it.
        self.set_timeout(timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))

    # What torch calls, on itself or through the wrappers that it puts around a store.

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(KvSet(items={self._key(key): _bytes(value)}, round=self._round))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        number = operator.index(amount)  # a TypeError for what is no integer, as torch's
        if not -(1 << 63) <= number < 1 << 63:
            raise TypeError(f"an amount must be a 64-bit integer (got {number})")
        return _number(self._ask(KvAdd(key=self._key(key), amount=number, round=self._round)))

    def check(self, keys: Sequence[str]) -> bool:
        return _flag(self._ask(KvCheck(keys=self._keys(keys), round=self._round)))

    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        names = self._keys(keys)
        timeout = self.timeout if timeout is None else timeout
        if not isinstance(timeout, timedelta | float):
            raise TypeError(f"a timeout must be a timedelta or a float of seconds, not {type(timeout).__name__}")
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        self._wait(lambda wait: KvWait(keys=names, wait=wait, round=self._round), seconds)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        command = KvCompareSet(
            key=self._key(key), expected=_bytes(expected_value), desired=_bytes(desired_value), round=self._round
        )
        try:
            return self._take(command, time.monotonic() + self.timeout.total_seconds())
        except (Rejected, Unavailable) as error:
            _raise(error)

    def delete_key(self, key: str) -> bool:
        return _flag(self._ask(KvDelete(key=self._key(key), round=self._round)))

    def num_keys(self) -> int:
        return _number(self._ask(KvCount(prefix=self._prefix, round=self._round)))

    def list_keys(self) -> list[str]:
        reply = self._ask(KvList(prefix=self._prefix, round=self._round))
        assert isinstance(reply, KvKeys), f"{reply} for a question for keys"
        return [key.removeprefix(self._prefix) for key in reply.keys]

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(KvAppend(key=self._key(key), value=_bytes(value), round=self._round))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """All values, as soon as all are there."""
        return self._get(self._keys(keys), time.monotonic() + self.timeout.total_seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """At once, but for more than 2 MiB, which take several messages."""
        names = self._keys(keys)
        if isinstance(values, str | bytes):
            raise TypeError(f"give a list of values, not one {type(values).__name__}")
        if len(values) != len(names):
            raise DistStoreError(
                f"multi_set needs as many values as keys (got {len(names)} keys and {len(values)} values)"
            )
        chunk: dict[str, bytes] = {}
        size_bytes = 0
        for name, value in zip(names, map(_bytes, values), strict=True):
            weight = len(name.encode()) + len(value) + _HEADER_BYTES
            if chunk and size_bytes + weight > _CHUNK_BYTES:
                self._ask(KvSet(items=chunk, round=self._round))
                chunk, size_bytes = {}, 0
            chunk[name] = value
            size_bytes += weight
        if chunk:
            self._ask(KvSet(items=chunk, round=self._round))

    def has_extended_api(self) -> bool:
        """append, multi_get and multi_set."""
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask(KvPush(key=self._key(key), value=_bytes(value), round=self._round))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        if not isinstance(block, bool):
            raise TypeError(f"block must be a bool, not {type(block).__name__}")
        name = self._key(key)
        end_at = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                return self._take(KvPop(key=name, round=self._round), end_at)
            except Rejected as error:
                if error.code != ErrorCode.KV_EMPTY:
                    _raise(error)
                if not block:
                    raise QueueEmptyError(f"queue is empty: {key}") from error
            except Unavailable as error:
                _raise(error)
            # Somebody else may be faster when it is filled; then wait for the rest of the time.
            self._wait(
                lambda wait: KvWait(keys=(name,), wait=wait, round=self._round, is_for_queues=True),
                max(end_at - time.monotonic(), 0.0),
            )

    def queue_len(self, key: str) -> int:
        return _number(self._ask(KvQueueLength(key=self._key(key), round=self._round)))

    def clone(self) -> MasterKVStore:
        return MasterKVStore(self._prefix, self.timeout, round=self._round, link=self._link)

    # The names by which torch's C++ half looks these two up, when it wraps us.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    @property
    def _patience(self) -> float:
        return max(float(self.timeout.total_seconds()), _PATIENCE)

    def _key(self, key: str | bytes) -> str:
        if isinstance(key, bytes):
            key = key.decode()
        if not isinstance(key, str):
            raise TypeError(f"a key must be a str, not {type(key).__name__}")
        return self._prefix + key

    def _keys(self, keys: Sequence[str]) -> tuple[str, ...]:
        if isinstance(keys, str | bytes | dict):
            raise TypeError(f"give a list of keys, not one {type(keys).__name__}")
        return tuple(map(self._key, keys))

    def _get(self, names: tuple[str, ...], end_at: float) -> list[bytes]:
        if not names:
            return []
        left = max(end_at - time.monotonic(), 0.0)
        try:
            return list(_values(self._wait_for(lambda wait: KvGet(keys=names, wait=wait, round=self._round), left)))
        except Rejected as error:
            if error.code not in (ErrorCode.KV_TOO_LARGE, ErrorCode.TOO_LARGE) or len(names) == 1:
                _raise(error)
        half = len(names) // 2  # more than one message holds, of keys or of values
        return self._get(names[:half], end_at) + self._get(names[half:], end_at)

    def _take(self, command: KvPop | KvCompareSet, end_at: float) -> bytes:
        """While too many large answers are under way to this node, its others wait."""
        while True:
            try:
                return _values(self._link.ask(command, timeout=self._patience))[0]
            except Rejected as error:
                left = end_at - time.monotonic()
                if error.code != ErrorCode.KV_BUSY or left <= 0:
                    raise
            pause_before_retry(left)

    def _ask(self, request: WorkerRequest) -> Reply:
        try:
            return self._link.ask(request, timeout=self._patience)
        except (Rejected, Unavailable) as error:
            _raise(error)

    def _wait(self, question: Callable[[float], WorkerRequest], seconds: float) -> Reply:
        try:
            return self._wait_for(question, seconds)
        except Rejected as error:
            _raise(error)

    def _wait_for(self, question: Callable[[float], WorkerRequest], seconds: float) -> Reply:
        """Ask until there is an answer or the time is over."""
        end_at = time.monotonic() + seconds
        while True:
            wait = min(max(end_at - time.monotonic(), 0.0), _SLICE)
            try:
                return self._link.ask(question(wait), timeout=wait + _MARGIN)
            except (Rejected, Unavailable) as error:
                if isinstance(error, Rejected) and error.code != ErrorCode.KV_TIMEOUT:
                    raise
                left = end_at - time.monotonic()
                if left <= 0:
                    raise DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms: {error}") from error
                if isinstance(error, Unavailable):
                    pause_before_retry(left)


def store_barrier(store: Store, world_size: int, key_prefix: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
    """Wait until `world_size` callers have come here with this prefix, which serves once."""
    last_member = f"{key_prefix}/last_member"
    if store.add(f"{key_prefix}/num_members", 1) == world_size:
        store.set(last_member, "1")
    store.wait([last_member], timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout))


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a value must be str or bytes, not {type(value).__name__}")
    return bytes(value)


def _number(reply: Reply) -> int:
    assert isinstance(reply, KvNumber), f"{reply} for a question for a number"
    return reply.number


def _flag(reply: Reply) -> bool:
    assert isinstance(reply, KvFlag), f"{reply} for a yes-or-no question"
    return reply.flag


def _values(reply: Reply) -> tuple[bytes, ...]:
    assert isinstance(reply, KvValues), f"{reply} for a question for values"
    return reply.values


def _raise(error: Rejected | Unavailable) -> NoReturn:
    """In the words of torch's stores."""
    if isinstance(error, Rejected) and error.code in (
        ErrorCode.KV_NOT_A_NUMBER,
        ErrorCode.KV_TOO_LARGE,
        ErrorCode.TOO_LARGE,
    ):
        raise ValueError(str(error)) from error
    raise DistStoreError(str(error)) from error
