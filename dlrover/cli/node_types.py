"""
Names of node types as people write them: in a fleet's file, on the command line, in the environment.

TensorFlow once called the chief `master`, and job files that say so are still around. The name means the chief wherever
a person writes it, and nowhere else: what we show and send says `chief`.
"""

from __future__ import annotations

import msgspec

from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import FleetSpec, NodeType

_FORMER_NAMES = {"master": NodeType.CHIEF}


def node_type_of(name: str) -> NodeType:
    """Raises `ValueError` for a name that was never one."""
    return _FORMER_NAMES.get(name) or NodeType(name)


def read_fleet(text: bytes) -> FleetSpec:
    """Raises `msgspec.MsgspecError` for what is no fleet, and `ConfigError` for one that names a type twice."""
    given = msgspec.json.decode(text)
    replicas = given.get("replicas") if isinstance(given, dict) else None
    if isinstance(replicas, dict):
        for former in [name for name in _FORMER_NAMES if name in replicas]:
            name = _FORMER_NAMES[former].value
            if name in replicas:
                raise ConfigError(f"{former} and {name} are two names of one type. Give only one of them.")
            replicas[name] = replicas.pop(former)
    return msgspec.convert(given, FleetSpec, str_keys=True)
