"""
Messages of the key-value store.

Keys live in a namespace: that of a round, dropped when two newer rounds exist, or that of the whole job (round 0).
Commands change the store and never wait; questions never change it and may wait on the master until their answer exists.
Waiting for a value and taking it out of a queue are therefore two messages: a waiting command would hold up the sender's
numbering.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.protocol.messages.identity import Incarnation, NodeId, Round

MAX_KEY_BYTES = 4 * 1024
MAX_VALUE_BYTES = 1024 * 1024
MAX_STORE_BYTES = 64 * 1024 * 1024
"""Keys, values and `ENTRY_BYTES` for each entry, over all namespaces: the store is part of every snapshot of the journal."""
ENTRY_BYTES = 64
"""Counted for each entry on top of its key and value, or a million empty values would cost nothing."""
MAX_WAIT = 60.0
"""Seconds that one question may wait. Who wants to wait longer asks again: so no call waits for a worker that died."""


class KvCommand(Struct, frozen=True, kw_only=True):
    round: Round = Round(0)
    node: NodeId = NodeId(-1)
    """Put in by the agent, as is the incarnation: a worker cannot speak for another node."""
    incarnation: Incarnation = Incarnation(0)


class KvSet(KvCommand, tag=True, frozen=True, kw_only=True):
    """All of them or, if one is refused, none."""

    items: dict[str, bytes]


class KvAdd(KvCommand, tag=True, frozen=True, kw_only=True):
    """Values of counters are decimal text; a key that does not exist counts as 0. Answered by the new `KvNumber`."""

    key: str
    amount: int


class KvCompareSet(KvCommand, tag=True, frozen=True, kw_only=True):
    """Set if the value is as expected, or if nothing was expected and there is none. Answered by the value afterwards."""

    key: str
    expected: bytes
    desired: bytes


class KvAppend(KvCommand, tag=True, frozen=True, kw_only=True):
    key: str
    value: bytes


class KvDelete(KvCommand, tag=True, frozen=True, kw_only=True):
    """Answered by whether there was such a key."""

    key: str


class KvPush(KvCommand, tag=True, frozen=True, kw_only=True):
    key: str
    value: bytes


class KvPop(KvCommand, tag=True, frozen=True, kw_only=True):
    """Take the oldest value of a queue. Refused with "kv-empty" if there is none: wait with `KvWait` and try again."""

    key: str


class KvQuery(Struct, frozen=True, kw_only=True):
    round: Round = Round(0)


class KvGet(KvQuery, tag=True, frozen=True, kw_only=True):
    """The values of all keys, in their order. Refused with "kv-timeout" if one is missing and the wait is over."""

    keys: tuple[str, ...]
    wait: float = 0.0
    """Seconds."""


class KvWait(KvQuery, tag=True, frozen=True, kw_only=True):
    """`Done` when each key has a value, or is a queue that is not empty; else as `KvGet`."""

    keys: tuple[str, ...]
    wait: float = 0.0
    is_for_queues: bool = False
    """Values do not count."""


class KvCheck(KvQuery, tag=True, frozen=True, kw_only=True):
    """Whether `KvWait` would be done at once."""

    keys: tuple[str, ...]


class KvCount(KvQuery, tag=True, frozen=True, kw_only=True):
    """How many keys begin with the prefix. Queues do not count."""

    prefix: str = ""


class KvList(KvQuery, tag=True, frozen=True, kw_only=True):
    prefix: str = ""


class KvQueueLength(KvQuery, tag=True, frozen=True, kw_only=True):
    key: str


class KvNumber(Struct, tag=True, frozen=True):
    number: int


class KvFlag(Struct, tag=True, frozen=True):
    flag: bool


class KvValues(Struct, tag=True, frozen=True):
    values: tuple[bytes, ...]


class KvKeys(Struct, tag=True, frozen=True):
    keys: tuple[str, ...]


AnyKvCommand = KvSet | KvAdd | KvCompareSet | KvAppend | KvDelete | KvPush | KvPop
AnyKvQuery = KvGet | KvWait | KvCheck | KvCount | KvList | KvQueueLength
KvReply = KvNumber | KvFlag | KvValues | KvKeys
