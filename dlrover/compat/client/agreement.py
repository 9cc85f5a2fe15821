"""
Two small agreements between the nodes of a round, made in the master's key-value store: on a step, and on a port.

Keys belong to the round, so the nodes of the next one begin anew.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover.compat.client import comm
from dlrover.compat.launch import environment
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Reply, Round, WorkerRequest
from dlrover.protocol.messages.kv import KvCompareSet, KvGet, KvSet, KvValues

Ask = Callable[[WorkerRequest], Reply]

_STEP = "dlrover/agreed-step"
_PORT = "dlrover/agreed-port"


def agree_on_step(ask: Ask, round_: Round, step: int) -> bool:
    """Whether all nodes have named this step."""
    return _named(ask, round_, _STEP, step) == {step}


def agree_on_port(ask: Ask, round_: Round, port: int) -> comm.SyncTrainingPort:
    """All nodes name a port that is free there. If they differ, all look again from the greatest on."""
    agreed = _read(ask, round_, [f"{_PORT}/agreed"])
    if agreed:
        return comm.SyncTrainingPort(port=agreed[0])
    lowest = next(iter(_read(ask, round_, [f"{_PORT}/lowest"])), 0)
    if port < lowest:
        return comm.SyncTrainingPort(newport=lowest)
    named = _named(ask, round_, f"{_PORT}/from-{lowest}", port)
    if not named:
        return comm.SyncTrainingPort()
    if len(named) == 1:
        # Two workers of one node may name different ports: the first that sees all agree counts.
        return comm.SyncTrainingPort(port=_exchange(ask, round_, f"{_PORT}/agreed", 0, port))
    return comm.SyncTrainingPort(newport=_exchange(ask, round_, f"{_PORT}/lowest", lowest, max(named)))


def _named(ask: Ask, round_: Round, topic: str, number: int) -> set[int]:
    """What all nodes say, with this one's number; empty while one is missing."""
    ask(KvSet(items={f"{topic}/{environment.get_group_rank()}": str(number).encode()}, round=round_))
    return set(_read(ask, round_, [f"{topic}/{rank}" for rank in range(environment.get_group_world_size())]))


def _exchange(ask: Ask, round_: Round, key: str, before: int, after: int) -> int:
    """The number that stands there then: this one, if no other rank was quicker. 0: there is none yet."""
    expected = str(before).encode() if before else b""
    reply = ask(KvCompareSet(key=key, expected=expected, desired=str(after).encode(), round=round_))
    assert isinstance(reply, KvValues), reply
    return int(reply.values[0])


def _read(ask: Ask, round_: Round, keys: list[str]) -> list[int]:
    try:
        reply = ask(KvGet(keys=tuple(keys), round=round_))
    except Rejected as error:
        if error.code != ErrorCode.KV_TIMEOUT:
            raise
        return []
    assert isinstance(reply, KvValues), reply
    return [int(value) for value in reply.values]
