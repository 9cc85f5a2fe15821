"""
A server whose memory will not last: which one, what it needs, and a warning where it cannot have that.
"""

from __future__ import annotations

from msgspec import Struct

from dlrover.core.scaling import memory
from dlrover.core.scaling.servers.plans import excess_of, measured_servers
from dlrover.core.state import JobState
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import PlannedNode, ScaleMode, SizePlan


class ShortServer(Struct, frozen=True, kw_only=True):
    """A server whose memory will not last."""

    rank: int
    had_mb: int
    more_mb: int
    found: memory.MemoryForecast
    plan: SizePlan
    is_possible: bool
    """It can get more, by the job's limits and the largest node."""

    @property
    def why(self) -> str:
        found = self.found
        return (
            f"it uses {found.now_mb:.0f} of {self.had_mb} MiB and would use {found.then_mb:.0f} MiB in "
            f"{found.seconds / 60:.0f} min"
        )


def short_server(state: JobState, seconds_left: float | None) -> ShortServer | None:
    """The fullest server, if the growth of the servers' memory leads it to its limit."""
    scaling, nodes = state.scaling, measured_servers(state)
    found = memory.forecast_of(scaling, NodeType.PS, seconds_left)
    if found is None or not nodes or state.fleet is None:
        return None
    node = max(nodes, key=lambda each: each.memory_mb)
    had = state.fleet.nodes[node.platform_node].resource.memory_mb
    if not memory.is_danger(found, had):
        return None
    more = memory.more_for_server(found, had, scaling.terms.largest.memory_mb)
    plan = SizePlan(nodes=(PlannedNode(platform_node=node.platform_node, memory_mb=more),))
    is_possible = more > had and not excess_of(state, plan)
    return ShortServer(rank=node.rank, had_mb=had, more_mb=more, found=found, plan=plan, is_possible=is_possible)


def warn(state: JobState, seconds_left: float | None) -> None:
    """Where the job does not exchange it by itself, or cannot."""
    scaling = state.scaling
    scaling.warnings.pop("server-memory", None)
    short = short_server(state, seconds_left)
    is_own = scaling.mode is ScaleMode.ON and NodeType.PS in scaling.terms.types
    if short is not None and not (short.is_possible and is_own):
        rest = "" if short.is_possible else ", and it cannot get more"
        scaling.warnings["server-memory"] = f"Server {short.rank} runs out of memory: {short.why}{rest}."
