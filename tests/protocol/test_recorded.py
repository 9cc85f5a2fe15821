"""
Messages of protocol version 1, as they were first written, must be understood for as long as the version says so.

The `.msgpack` files are the bytes of that day, the `.json` files beside them the same for people. Messages that were
added later are in files of their own (`python -m tests.protocol.record` writes what is missing). A change that needs
new recordings of an old message is a change of `PROTOCOL_VERSION`: add files for the new version and keep these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dlrover.protocol.codec import decode_from_agent, decode_from_master
from dlrover.protocol.messages.frames import FromAgent, FromMaster
from dlrover.protocol.messages.job import PROTOCOL_VERSION, AgentCommand, Query, Reply, Wish
from dlrover.protocol.messages.watch import WatchObservation
from tests.protocol.record import (
    RECORDED,
    bodies_from_agent,
    bodies_from_master,
    observed,
    recorded_from_agent,
    recorded_from_master,
    wishes,
)


@pytest.mark.parametrize(
    ("name", "decode"),
    [
        ("v1-from-agent", decode_from_agent),
        ("v1-from-master", decode_from_master),
        ("v1-added-from-agent", decode_from_agent),
        ("v1-added-from-master", decode_from_master),
    ],
)
def test_the_bytes_of_version_1_still_mean_the_same(name: str, decode: Callable[[bytes], list[Any]]) -> None:
    assert PROTOCOL_VERSION == 1
    parcels = decode((RECORDED / f"{name}.msgpack").read_bytes())
    meant = msgspec.json.decode((RECORDED / f"{name}.json").read_bytes())
    assert [_subset(msgspec.to_builtins(parcel), said) for parcel, said in zip(parcels, meant, strict=True)] == meant


def test_every_message_of_the_wire_is_recorded() -> None:
    assert {type(parcel) for parcel in recorded_from_agent()} == set(FromAgent.__args__)
    assert {type(parcel) for parcel in recorded_from_master()} == set(FromMaster.__args__)
    assert bodies_from_agent() == set((AgentCommand | Query).__args__)
    assert bodies_from_master() == set(Reply.__args__)
    assert wishes() == set(Wish.__args__)
    assert observed() == set(WatchObservation.__args__)


def _subset(actual: Any, like: Any) -> Any:
    """Only what was said then: fields that were added since have defaults."""
    if isinstance(like, dict):
        return {key: _subset(actual[key], value) for key, value in like.items()}
    if isinstance(like, list):
        return [_subset(item, value) for item, value in zip(actual, like, strict=True)]
    return actual
