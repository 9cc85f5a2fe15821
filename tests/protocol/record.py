"""
Record messages that were added to the protocol since its first recording: `python -m tests.protocol.record`.

Run it once when a message is new, and commit what it wrote. It never touches what was recorded before: those bytes are
what older peers send, and must be understood for as long as the protocol's version says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from dlrover.protocol.codec import decode_from_agent, decode_from_master
from dlrover.protocol.messages.frames import Answer, FromAgent, FromMaster, Observed, Ordered, Push, Request
from dlrover.protocol.messages.job import AgentCommand, Desired, Query, Reply, Wish
from dlrover.protocol.messages.watch import WatchObservation

RECORDED = Path(__file__).parent / "recorded"
FIRST, ADDED = "v1", "v1-added"


def recorded_from_agent() -> list[FromAgent]:
    files = sorted(RECORDED.glob(f"{FIRST}*-from-agent.msgpack"))
    return [parcel for file in files for parcel in decode_from_agent(file.read_bytes())]  # type: ignore[misc]


def recorded_from_master() -> list[FromMaster]:
    files = sorted(RECORDED.glob(f"{FIRST}*-from-master.msgpack"))
    return [parcel for file in files for parcel in decode_from_master(file.read_bytes())]


def bodies_from_agent() -> set[type]:
    return {type(parcel.body) for parcel in recorded_from_agent() if isinstance(parcel, Request)}


def bodies_from_master() -> set[type]:
    return {type(parcel.body) for parcel in recorded_from_master() if isinstance(parcel, Answer)}


def wishes() -> set[type]:
    parcels = recorded_from_master()
    pushed = {type(parcel.desired.wish) for parcel in parcels if isinstance(parcel, Push)}
    answered = [parcel.body for parcel in parcels if isinstance(parcel, Answer)]
    return pushed | {type(body.desired.wish) for body in answered if hasattr(body, "desired")}


def observed() -> set[type]:
    return {type(parcel.observation) for parcel in recorded_from_agent() if isinstance(parcel, Observed)}


def record_missing() -> None:
    observations: list[Any] = [Observed(a_sample(kind)) for kind in _missing(WatchObservation.__args__, observed())]
    _append(f"{ADDED}-from-agent", observations)
    if not any(isinstance(parcel, Ordered) for parcel in recorded_from_master()):
        _append(f"{ADDED}-from-master", [a_sample(Ordered)])
    commands = _missing((AgentCommand | Query).__args__, bodies_from_agent())
    requests = [Request(id=1, sequence=1, body=a_sample(kind)) for kind in commands]
    _append(f"{ADDED}-from-agent", requests)
    answers: list[Any] = [Answer(id=1, body=a_sample(kind)) for kind in _missing(Reply.__args__, bodies_from_master())]
    pushes = [Push(Desired(1, 1, a_sample(kind))) for kind in _missing(Wish.__args__, wishes())]
    _append(f"{ADDED}-from-master", [*answers, *pushes])


def a_sample(kind: type) -> Any:
    """One message of that kind, with something in every field."""
    return msgspec.convert(_value(inspect.type_info(kind)), kind)


def _value(info: inspect.Type) -> Any:
    match info:
        case inspect.StructType():
            fields = {field.encode_name: _value(field.type) for field in info.fields if field.required}
            return {info.tag_field: info.tag, **fields} if info.tag_field is not None else fields
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 1.5
        case inspect.StrType():
            return "text"
        case inspect.BytesType():
            return b"bytes"
        case inspect.BoolType():
            return True
        case inspect.EnumType():
            return next(iter(info.cls)).value
        case inspect.VarTupleType() | inspect.ListType():
            return [_value(info.item_type)]
        case inspect.TupleType():
            return [_value(item) for item in info.item_types]
        case inspect.DictType():
            return {_value(info.key_type): _value(info.value_type)}
        case inspect.UnionType():
            return _value(next(each for each in info.types if not isinstance(each, inspect.NoneType)))
        case inspect.NoneType():
            return None
        case _:
            raise AssertionError(f"no sample for {info}")


def _missing(kinds: tuple[type, ...], known: set[type]) -> list[type]:
    return sorted((kind for kind in kinds if kind not in known), key=lambda kind: kind.__name__)


def _append(name: str, parcels: list[Any]) -> None:
    if not parcels:
        return
    file = RECORDED / f"{name}.msgpack"
    before = msgspec.msgpack.decode(file.read_bytes()) if file.exists() else []
    together = before + msgspec.to_builtins(parcels, builtin_types=(bytes,))
    file.write_bytes(msgspec.msgpack.encode(together))
    text = json.dumps(msgspec.to_builtins(together), indent=1)
    file.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    record_missing()
