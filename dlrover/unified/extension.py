"""
What a deployment adds to the conductor of multi-role jobs: classes that packages register under the entry points `dlrover.unified.extension`.

All of them are mixed into one object, so no two may define the same method.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from msgspec import Struct

from dlrover.protocol.errors import ConfigError

ENTRY_POINTS = "dlrover.unified.extension"


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A machine of the cluster."""

    id: str
    host: str = ""
    ip: str = ""


class ManagerExtension:
    manager: Any = None
    """The conductor of the job: `status()`, `stop(reason, exit_code)`, `restart(reason)`."""

    async def relaunch_nodes_impl(self, nodes: list[NodeInfo]) -> list[NodeInfo]:
        """Replace these machines; returns those that are being replaced. It may be asked twice for the same machine."""
        return []


def load_extension() -> ManagerExtension | None:
    """None: no package brings one. Raises `ConfigError` if they contradict each other or one cannot be loaded."""
    classes: list[type] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.value):
        try:
            found = point.load()
        except Exception as error:  # the edge to code that others have written
            raise ConfigError(
                f"The extension {point.value} cannot be loaded: {type(error).__name__}: {error}. Repair or remove its package."
            ) from error
        if not isinstance(found, type) or not issubclass(found, ManagerExtension):
            raise ConfigError(f"The extension {point.value} must be a subclass of ManagerExtension.")
        if found not in classes:
            classes.append(found)
    owners: dict[str, type] = {}
    for each in classes:
        for name, value in vars(each).items():
            if name.startswith("__") or not callable(value):
                continue
            if name in owners:
                raise ConfigError(
                    f"Two extensions define {name}: {_full_name(owners[name])} and {_full_name(each)}. Remove one of the packages."
                )
            owners[name] = each
    if not classes:
        return None
    mixed: ManagerExtension = type("Extension", tuple(classes), {})()
    return mixed


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
