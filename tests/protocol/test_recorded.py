"""
Messages of protocol version 1, as they were first written, must be understood for as long as the version says so.

The `.msgpack` files are the bytes of that day, the `.json` files beside them the same for people. A change that needs
new recordings is a change of `PROTOCOL_VERSION`: add files for the new version and keep these.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.protocol.codec import decode_from_agent, decode_from_master
from dlrover.protocol.frames import Answer, FromAgent, FromMaster, Push, Request
from dlrover.protocol.messages import PROTOCOL_VERSION, AgentCommand, Query, Reply, Wish

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("name", "decode"), [("v1-from-agent", decode_from_agent), ("v1-from-master", decode_from_master)]
)
def test_the_bytes_of_version_1_still_mean_the_same(name: str, decode: Callable[[bytes], list[Any]]) -> None:
    assert PROTOCOL_VERSION == 1
    parcels = decode((RECORDED / f"{name}.msgpack").read_bytes())
    meant = msgspec.json.decode((RECORDED / f"{name}.json").read_bytes())
    assert [_subset(msgspec.to_builtins(parcel), said) for parcel, said in zip(parcels, meant, strict=True)] == meant


def test_every_message_of_the_wire_is_recorded() -> None:
    from_agent = decode_from_agent((RECORDED / "v1-from-agent.msgpack").read_bytes())
    from_master = decode_from_master((RECORDED / "v1-from-master.msgpack").read_bytes())
    assert {type(parcel) for parcel in from_agent} == set(FromAgent.__args__)
    assert {type(parcel) for parcel in from_master} == set(FromMaster.__args__)
    bodies = {type(parcel.body) for parcel in from_agent if isinstance(parcel, Request)}
    assert bodies == set((AgentCommand | Query).__args__)
    assert {type(parcel.body) for parcel in from_master if isinstance(parcel, Answer)} == set(Reply.__args__)
    wishes = {type(parcel.desired.wish) for parcel in from_master if isinstance(parcel, Push)}
    wishes |= {
        type(parcel.body.desired.wish) for parcel in from_master if hasattr(getattr(parcel, "body", None), "desired")
    }
    assert wishes == set(Wish.__args__)


def _subset(actual: Any, like: Any) -> Any:
    """Only what was said then: fields that were added since have defaults."""
    if isinstance(like, dict):
        return {key: _subset(actual[key], value) for key, value in like.items()}
    if isinstance(like, list):
        return [_subset(item, value) for item, value in zip(actual, like, strict=True)]
    return actual
