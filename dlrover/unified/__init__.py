"""
Jobs started from Python on a cluster, and what the processes of a multi-role job use.

Names are imported when they are used first: a worker that only calls another role must not import what submits jobs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrover.unified.ray_job import RayJob, RayJobHandle
    from dlrover.unified.runtime.calls import FutureSequence, RoleActor, RoleGroup, group
    from dlrover.unified.runtime.current import current
    from dlrover.unified.runtime.methods import rpc
    from dlrover.unified.runtime.stream import Stream, Weights, serve
    from dlrover.unified.runtime.wire import CallFailed, CallRefused, CallTimeout, InstanceLost, RoleGone
    from dlrover.unified.shell.driver import EnsembleHandle, attach
    from dlrover.unified.surface import Ensemble, Role

_HOMES = {
    "CallFailed": "runtime.wire",
    "CallRefused": "runtime.wire",
    "CallTimeout": "runtime.wire",
    "Ensemble": "surface",
    "EnsembleHandle": "shell.driver",
    "FutureSequence": "runtime.calls",
    "InstanceLost": "runtime.wire",
    "RayJob": "ray_job",
    "RayJobHandle": "ray_job",
    "Role": "surface",
    "RoleActor": "runtime.calls",
    "RoleGone": "runtime.wire",
    "RoleGroup": "runtime.calls",
    "Stream": "runtime.stream",
    "Weights": "runtime.stream",
    "attach": "shell.driver",
    "current": "runtime.current",
    "group": "runtime.calls",
    "rpc": "runtime.methods",
    "serve": "runtime.stream",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"dlrover.unified has no {name!r}")
    return getattr(importlib.import_module(f"dlrover.unified.{_HOMES[name]}"), name)


__all__ = [
    "CallFailed",
    "CallRefused",
    "CallTimeout",
    "Ensemble",
    "EnsembleHandle",
    "FutureSequence",
    "InstanceLost",
    "RayJob",
    "RayJobHandle",
    "Role",
    "RoleActor",
    "RoleGone",
    "RoleGroup",
    "Stream",
    "Weights",
    "attach",
    "current",
    "group",
    "rpc",
    "serve",
]
