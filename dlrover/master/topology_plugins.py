"""
The user's plug-ins for the network: where a node is, and in which order nodes stand in a world.

They run here, at the edge, because they may ask other systems and take any time. Each call has a time limit in a thread of
its own, each answer is kept, and whatever goes wrong costs one warning: the node then has no known place, or the order
is our own. What they answer enters the job as part of a command, so a replay never asks them again.

A plug-in is named `module::Class`, is built without arguments, and has one method: `query(host)`, which gives the
switches above the host from the inside outwards, or `sort(nodes)`, which gives node ranks (or a dict of them) in order.
The classes of the original for that purpose live here too; old import paths lead to them.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dlrover.core.membership.topology import Placed, arrange
from dlrover.host.extensions import NoAnswer, TimedCalls, UnusableExtension, build
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import NodeRank
from dlrover.protocol.text import encodable

log = logging.getLogger(__name__)

T = TypeVar("T")

TIME_LIMIT = 2.0
"""Seconds for one answer: nodes wait for it before they may join."""
NUM_THREADS = 8
MAX_TIMEOUTS = 4
"""So many times in a row a plug-in may take too long; then it is asked no more. Its threads may never come back."""
MAX_CACHED = 100_000
MAX_DEPTH = 8
MAX_NAME = 256


@dataclass
class NodeTopologyMeta:
    """A node as sorters see it; the original's name and fields."""

    node_id: int = 0
    node_rank: int = 0
    process_num: int = 0
    node_ip: str = ""
    asw: str = ""
    """Access switch: the inner one."""
    psw: str = ""
    """The outer one."""
    node_group: int = -1
    """Its scheduling group; -1: none."""
    node_group_size: int = 0
    """Always 0: how many groups there are is not known here."""
    node_group_id: str = ""
    """Always empty, like the size."""


class TopologyQuerier(abc.ABC):
    """What a querier may derive from; having `query` is enough."""

    @abc.abstractmethod
    def query(self, node_ip: str) -> tuple[str, str]:
        """Access switch and the one above it; empty: not known."""


class TopologySorter(abc.ABC):
    """What a sorter may derive from; having `sort` is enough."""

    @abc.abstractmethod
    def sort(self, nodes: Mapping[int, NodeTopologyMeta]) -> Mapping[int, NodeTopologyMeta]:
        """The same nodes in their order in the world."""


class DefaultTopologyQuerier(TopologyQuerier):
    """Knows nothing."""

    def query(self, node_ip: str) -> tuple[str, str]:
        return "", ""


class DpTopologySorter(TopologySorter):
    """Nodes below one switch together, the switch of the lowest rank first: what the master does by itself."""

    def sort(self, nodes: Mapping[int, NodeTopologyMeta]) -> dict[int, NodeTopologyMeta]:
        placed = [Placed(NodeRank(rank), _place((node.asw, node.psw))) for rank, node in nodes.items()]
        return {rank: nodes[rank] for rank in arrange(placed)}


class TopologyPlugins:
    """Both plug-ins, either of which may be missing. Nothing here raises once it is built."""

    def __init__(
        self,
        *,
        query: Callable[[str], Any] | None = None,
        sort: Callable[[dict[int, NodeTopologyMeta]], Any] | None = None,
        time_limit: float = TIME_LIMIT,
    ) -> None:
        self.time_limit = time_limit
        self._query = query
        self._sort = sort
        self._places: dict[str, tuple[str, ...]] = {}
        self._calls = {
            which: TimedCalls("topology", time_limit=time_limit, max_timeouts=MAX_TIMEOUTS, num_threads=NUM_THREADS)
            for which in ("querier", "sorter")
        }
        self._is_warned = {"querier": False, "sorter": False}

    @classmethod
    def load(cls, querier: str, sorter: str) -> TopologyPlugins:
        """Raises ConfigError: a plug-in that the user asked for and that cannot be had is found at the start."""
        query = _method_of(querier, "query", "topology querier") if querier else None
        return cls(query=query, sort=_method_of(sorter, "sort", "topology sorter") if sorter else None)

    @property
    def has_querier(self) -> bool:
        return self._query is not None

    @property
    def has_sorter(self) -> bool:
        return self._sort is not None

    def known_place(self, host: str) -> tuple[str, ...] | None:
        """Without a question to an agent; None: one has to be asked."""
        return () if self._query is None else self._places.get(host)

    async def place_of(self, host: str) -> tuple[str, ...]:
        if self._query is None:
            return ()
        if host not in self._places:
            query = self._query
            place = await self._call("querier", lambda: _place(query(host)))
            if place is None:
                return ()
            if len(self._places) >= MAX_CACHED:
                self._places.clear()
            self._places[host] = place
        return self._places[host]

    async def order(self, nodes: list[NodeTopologyMeta]) -> tuple[NodeRank, ...]:
        """Empty: no answer."""
        if self._sort is None:
            return ()
        sort = self._sort
        given = {node.node_rank: node for node in nodes}
        return await self._call("sorter", lambda: _ranks(sort(dict(given)), given)) or ()

    def close(self) -> None:
        for calls in self._calls.values():
            calls.close()

    async def _call(self, which: str, work: Callable[[], T]) -> T | None:
        calls = self._calls[which]
        try:
            return await calls.call(work)
        except NoAnswer as error:
            self._warn(which, str(error))
        if calls.is_disabled:
            log.warning("topology plug-in %s is disabled after %d timeouts in a row", which, MAX_TIMEOUTS)
            self._query = None if which == "querier" else self._query
            self._sort = None if which == "sorter" else self._sort
        return None

    def _warn(self, which: str, why: str) -> None:
        if not self._is_warned[which]:
            self._is_warned[which] = True
            log.warning(
                "topology plug-in %s returned no usable answer, so nodes are ordered without it: %s. This is "
                "logged only once.",
                which,
                why,
            )


def _method_of(name: str, method: str, what: str) -> Callable[..., Any]:
    try:
        bound: Callable[..., Any] = getattr(build(name, method=method), method)
    except UnusableExtension as error:
        raise ConfigError(f"The {what} {name} cannot be used: {error}.") from error
    return bound


def _place(switches: Iterable[str]) -> tuple[str, ...]:
    """From the querier's inside-out to our outside-in. Raises for what is no list of names."""
    place = tuple(reversed([_name(switch) for switch in switches]))
    if len(place) > MAX_DEPTH:
        raise ValueError(f"a host can have at most {MAX_DEPTH} levels of switches (got {len(place)})")
    return place if any(place) else ()


def _name(switch: object) -> str:
    if not isinstance(switch, str) or len(switch) > MAX_NAME:
        raise ValueError(f"{switch!r:.80} is not a name of a switch")
    return encodable(switch)


def _ranks(answer: Any, given: Mapping[int, NodeTopologyMeta]) -> tuple[NodeRank, ...]:
    ranks = [node.node_rank if isinstance(node, NodeTopologyMeta) else node for node in answer]
    if sorted(ranks) != sorted(given):
        raise ValueError(f"the sorter must return each of the {len(given)} node ranks once")
    return tuple(NodeRank(rank) for rank in ranks)
