"""
The key-value store of the job: values that workers leave for each other, with the semantics of torch's stores.

It is durable state like everything else, so a restarted master still has it. Values are never part of the state's
digest, which is computed at each commit: the store keeps a digest of its own history instead, to which each change adds
itself, so that a megabyte is hashed once and not a thousand times.

Waiting is not state. A question whose answer does not exist yet says what it waits for (`NotYet`), and every change says
what it touched (`LookAgain`); who waits for how long is the business of the shell.
"""

from __future__ import annotations

import hashlib
import re

import msgspec
from msgspec import Struct

from dlrover.core.outcome import NotYet
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, Done, Reply, Round
from dlrover.protocol.messages.kv import (
    ENTRY_BYTES,
    MAX_KEY_BYTES,
    MAX_STORE_BYTES,
    MAX_VALUE_BYTES,
    AnyKvCommand,
    AnyKvQuery,
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

_MAX_REPLY_BYTES = MAX_MESSAGE_BYTES - 64 * 1024
"""What the values of one answer may weigh, with room for what is around them."""
_HEADER_BYTES = 5
"""At most, of each value or key in a message."""
_LARGEST = 2**63 - 1
_DECIMAL = re.compile(rb"[+-]?[0-9]{1,19}")
_NUM_NAMED = 8
_NUM_AWAITED = 1024
"""Of the missing keys, at a time: what a waiting question costs the master's memory."""


class KvRoom(Struct):
    """One namespace."""

    values: dict[str, bytes] = {}
    queues: dict[str, list[bytes]] = {}
    """None of them is empty."""

    def has(self, key: str) -> bool:
        return key in self.values or key in self.queues


class KvStore(Struct):
    rooms: dict[Round, KvRoom] = {}
    """By round; 0: of the whole job. None of them is empty."""
    size_bytes: int = 0
    """As the limit counts it."""
    history: bytes = b""
    """Digest of all changes so far."""

    def outline(self) -> KvStore:
        """What stands for the store in the digest of the job."""
        return KvStore(size_bytes=self.size_bytes, history=self.history)

    def room(self, round_: Round) -> KvRoom:
        """To look at; a namespace without entries is not kept."""
        return self.rooms.get(round_) or KvRoom()

    def apply(self, command: AnyKvCommand) -> Reply:
        """Change the store, or raise `Rejected` with nothing changed."""
        room = self.room(command.round)
        match command:
            case KvSet(items=items):
                _check_items(items)
                self._put(command.round, items)
                return Done()
            case KvAdd(key=key):
                number = _added(room.values.get(key), command)
                self._put(command.round, {key: str(number).encode()})
                return KvNumber(number)
            case KvCompareSet(key=key, expected=expected, desired=desired):
                value = room.values.get(key)
                if value == expected or (value is None and not expected):
                    _check_items({key: desired})
                    self._put(command.round, {key: desired})
                    return KvValues((desired,))
                # torch's answer for a key that does not exist is what was expected.
                return KvValues((expected if value is None else value,))
            case KvAppend(key=key, value=more):
                _check_items({key: more})
                whole = room.values.get(key, b"") + more
                _check_items({key: whole})
                self._put(command.round, {key: whole}, change=("append", key, more))
                return Done()
            case KvDelete(key=key):
                return KvFlag(self._delete(command.round, key))
            case KvPush(key=key, value=value):
                _check_items({key: value})
                self._push(command.round, key, value)
                return Done()
            case KvPop(key=key):
                return KvValues((self._pop(command.round, key),))

    def answer(self, query: AnyKvQuery) -> Reply | NotYet:
        room = self.room(query.round)
        match query:
            case KvGet(keys=keys):
                missing = [key for key in keys if key not in room.values]
                if missing:
                    return _not_yet(query, missing)
                values = tuple(room.values[key] for key in keys)
                _check_reply(sum(map(len, values)) + _HEADER_BYTES * len(values), f"The values of {len(keys)} keys")
                return KvValues(values)
            case KvWait(keys=keys):
                missing = [key for key in keys if not (key in room.queues if query.is_for_queues else room.has(key))]
                return _not_yet(query, missing) if missing else Done()
            case KvCheck(keys=keys):
                return KvFlag(all(room.has(key) for key in keys))
            case KvCount(prefix=prefix):
                if not prefix:
                    return KvNumber(len(room.values))
                return KvNumber(sum(key.startswith(prefix) for key in room.values))
            case KvList(prefix=prefix):
                found = tuple(key for key in room.values if key.startswith(prefix))
                _check_reply(sum(map(_size, found)) + _HEADER_BYTES * len(found), f"The names of {len(found)} keys")
                return KvKeys(found)
            case KvQueueLength(key=key):
                return KvNumber(len(room.queues.get(key, ())))

    def drop_before(self, round_: Round) -> None:
        """Forget the namespaces of older rounds; that of the job stays."""
        for old in [number for number in self.rooms if 0 < number < round_]:
            room = self.rooms.pop(old)
            self.size_bytes -= sum(_weight(key, value) for key, value in room.values.items())
            self.size_bytes -= sum(_weight(key, value) for key, queue in room.queues.items() for value in queue)
            self._note(old, ("drop",))

    def _put(self, round_: Round, items: dict[str, bytes], *, change: tuple[object, ...] | None = None) -> None:
        values = self.room(round_).values
        growth = 0
        for key, value in items.items():
            old = values.get(key)
            growth += _weight(key, value) if old is None else len(value) - len(old)
        self._check_growth(growth)
        self.size_bytes += growth
        if items:
            self._open(round_).values.update(items)
            self._note(round_, ("put", items) if change is None else change)

    def _delete(self, round_: Round, key: str) -> bool:
        values = self.room(round_).values
        value = values.pop(key, None)
        if value is None:
            return False
        self.size_bytes -= _weight(key, value)
        self._note(round_, ("delete", key))
        self._close(round_)
        return True

    def _push(self, round_: Round, key: str, value: bytes) -> None:
        self._check_growth(_weight(key, value))
        self.size_bytes += _weight(key, value)
        self._open(round_).queues.setdefault(key, []).append(value)
        self._note(round_, ("push", key, value))

    def _pop(self, round_: Round, key: str) -> bytes:
        queues = self.room(round_).queues
        if key not in queues:
            raise Rejected(f"The queue {_shown(key)} is empty.", code=ErrorCode.KV_EMPTY)
        value = queues[key].pop(0)
        if not queues[key]:
            del queues[key]
        self.size_bytes -= _weight(key, value)
        self._note(round_, ("pop", key))
        self._close(round_)
        return value

    def _open(self, round_: Round) -> KvRoom:
        return self.rooms.setdefault(round_, KvRoom())

    def _close(self, round_: Round) -> None:
        room = self.rooms.get(round_)
        if room is not None and not room.values and not room.queues:
            del self.rooms[round_]

    def _check_growth(self, growth: int) -> None:
        if growth > 0 and self.size_bytes + growth > MAX_STORE_BYTES:
            raise Rejected(
                f"The key-value store holds {self.size_bytes} bytes, and {growth} more would exceed its limit of "
                f"{MAX_STORE_BYTES}. Delete keys that are not needed any more, or keep large data in files.",
                code=ErrorCode.KV_FULL,
            )

    def _note(self, round_: Round, change: tuple[object, ...]) -> None:
        data = _ENCODER.encode((round_, change))
        self.history = hashlib.blake2b(self.history + data, digest_size=16).digest()


def topics_of(command: AnyKvCommand) -> tuple[str, ...]:
    """What questions may wait for that the command has brought."""
    match command:
        case KvSet(items=items):
            start = topic(command.round, "")
            return tuple([start + key for key in items])
        case KvAdd(key=key) | KvAppend(key=key) | KvCompareSet(key=key) | KvPush(key=key):
            return (topic(command.round, key),)
        case KvDelete() | KvPop():
            return ()


def topic(round_: Round, key: str) -> str:
    return f"kv/{round_}/{key}"


def _check_items(items: dict[str, bytes]) -> None:
    for key, value in items.items():
        if _size(key) > MAX_KEY_BYTES:
            raise Rejected(
                f"A key has at most {MAX_KEY_BYTES} bytes; {_shown(key)} is longer.", code=ErrorCode.KV_TOO_LARGE
            )
        if len(value) > MAX_VALUE_BYTES:
            raise Rejected(
                f"The value of {_shown(key)} would have {len(value)} bytes; the limit is {MAX_VALUE_BYTES}. "
                "Keep large data in files and their names here.",
                code=ErrorCode.KV_TOO_LARGE,
            )


def _check_reply(size_bytes: int, what: str) -> None:
    if size_bytes > _MAX_REPLY_BYTES:
        raise Rejected(
            f"{what} have {size_bytes} bytes together, and one answer holds {_MAX_REPLY_BYTES}. Ask for fewer at once.",
            code=ErrorCode.KV_TOO_LARGE,
        )


def _added(value: bytes | None, command: KvAdd) -> int:
    _check_items({command.key: b""})
    if value and not _DECIMAL.fullmatch(value):
        raise Rejected(
            f"{_shown(command.key)} holds {len(value)} bytes that are no decimal number; nothing can be added to it.",
            code=ErrorCode.KV_NOT_A_NUMBER,
        )
    number = (int(value) if value else 0) + command.amount
    if not -_LARGEST - 1 <= number <= _LARGEST:
        raise Rejected(
            f"Adding {command.amount} to {_shown(command.key)} exceeds 64 bits; nothing changed.",
            code=ErrorCode.KV_NOT_A_NUMBER,
        )
    return number


def _not_yet(query: KvGet | KvWait, missing: list[str]) -> NotYet:
    """A question is looked at anew, which costs all of its keys, only when each of these has come: they may be thousands."""
    topics = tuple([topic(query.round, key) for key in missing[:_NUM_AWAITED]])
    return NotYet(topics, Rejected(_explain(missing), code=ErrorCode.KV_TIMEOUT))


def _explain(missing: list[str]) -> str:
    named = ", ".join(map(_shown, missing[:_NUM_NAMED]))
    more = len(missing) - _NUM_NAMED
    return f"No process has set {named}{f' and {more} more' if more > 0 else ''}."


def _shown(key: str) -> str:
    return repr(key if len(key) <= 200 else f"{key[:200]}...")


def _weight(key: str, value: bytes) -> int:
    return _size(key) + len(value) + ENTRY_BYTES


def _size(key: str) -> int:
    """In UTF-8, without making it where that can be told."""
    return len(key) if key.isascii() else len(key.encode())


_ENCODER = msgspec.msgpack.Encoder()
