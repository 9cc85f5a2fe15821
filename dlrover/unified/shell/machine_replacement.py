"""
Another machine for one on which an instance failed too often. The cluster's own tools bring it, by an extension that the deployment has.

A machine that was asked to leave is marked in the store until that is known to have failed, so that people see which ones are on their way out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from dlrover.unified.extension import ManagerExtension, NodeInfo
from dlrover.unified.plan import GroupRule
from dlrover.unified.store import KeyValues

log = logging.getLogger(__name__)

POLL = 5.0
"""Seconds between two looks at the machines of the cluster."""
LIMIT = 900.0
"""Seconds for the replacement of one machine."""
GROUP_LIMIT = 1800.0
"""Seconds for that of a whole group."""


class LivingMachine(Struct, frozen=True, kw_only=True):
    node: NodeInfo
    labels: Mapping[str, str] = {}


class MachineReplacement:
    def __init__(
        self,
        extension: ManagerExtension | None,
        machines: Callable[[], Mapping[str, LivingMachine]],
        store: KeyValues,
        job_uid: str,
        *,
        say: Callable[[str], None],
        poll: float = POLL,
    ) -> None:
        """`machines`: those that live now, by their id."""
        self._extension = extension
        self._machines = machines
        self._store = store
        self._prefix = f"{job_uid}/removed/"
        self._say = say
        self._poll = poll

    def removed(self) -> list[str]:
        """Ids of machines that were asked to leave."""
        return [key.removeprefix(self._prefix) for key in self._store.keys(self._prefix)]

    async def replace(self, machine_id: str, rule: GroupRule, *, limit: float = LIMIT) -> bool:
        """False: it could not be done, or not in time."""
        machine = self._machines().get(machine_id)
        if self._extension is None or machine is None:
            return False
        try:
            return await self._relaunch([machine.node], min(limit, rule.timeout) if rule.label else limit)
        except TimeoutError:
            value = machine.labels.get(rule.label) if rule.label else None
            if value is None:
                return False
        group = [each.node for each in self._machines().values() if each.labels.get(rule.label) == value]
        self._say(f"All {len(group)} machines with {rule.label}={value} must be replaced.")
        try:
            return await self._relaunch(group, GROUP_LIMIT)
        except TimeoutError:
            return False

    async def _relaunch(self, nodes: Sequence[NodeInfo], limit: float) -> bool:
        """Raises TimeoutError; the machines stay marked then, because they may still leave."""
        assert self._extension is not None
        num_before = len(self._machines())
        names = ", ".join(node.host or node.id for node in nodes)
        for node in nodes:
            self._store.put(self._prefix + node.id, b"1")
        try:
            async with asyncio.timeout(limit):
                asked = {node.id for node in await self._extension.relaunch_nodes_impl(list(nodes))}
                self._unmark([node for node in nodes if node.id not in asked])
                if not asked:
                    self._say(f"The extension did not replace these machines: {names}.")
                    return False
                while True:
                    living = self._machines().keys()
                    if not asked & living and len(living) >= num_before:
                        break
                    await asyncio.sleep(self._poll)  # Ray tells nobody of a new machine
        except TimeoutError:
            self._say(f"Not replaced within {limit:g} s: {names}.")
            raise
        except Exception as error:  # the edge to code that others have written
            log.exception("the extension failed machines=%s", names)
            self._say(f"The extension failed to replace {names}: {type(error).__name__}: {error}")
            self._unmark(nodes)
            return False
        self._say(f"Replaced: {names}.")
        return True

    def _unmark(self, nodes: Iterable[NodeInfo]) -> None:
        for node in nodes:
            self._store.delete(self._prefix + node.id)
