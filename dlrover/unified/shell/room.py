"""
Room for a whole job: one placement group, so that all its instances start or none. Removed when the job is over.

Ray puts a bundle whose machine was lost on another one by itself; an instance of it waits meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from dlrover.unified.layout import say as say_amounts
from dlrover.unified.plan import EnsemblePlan

LOOK_AGAIN = 0.05
SPEAK_EVERY = 10.0
"""Seconds between two sentences about room that is missing."""


class JobRoom:
    def __init__(self, plan: EnsemblePlan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.name = group_name(plan)

    async def place(self) -> None:
        """Until every bundle is placed."""
        if not self._plan.layout.bundles:
            return
        group = self._group() or self._make()
        loop = asyncio.get_running_loop()
        speak_at = loop.time() + SPEAK_EVERY
        while not await asyncio.to_thread(_is_placed, group):
            if loop.time() >= speak_at:
                speak_at = loop.time() + SPEAK_EVERY
                self._say(await asyncio.to_thread(self.missing))
            await asyncio.sleep(LOOK_AGAIN)  # Ray's own wait holds a thread for as long

    def strategy(self, role: str, place: int) -> Any:
        """For `scheduling_strategy` of an actor."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = self._plan.layout.places.get(role)
        if not places or place >= len(places):
            return "DEFAULT"
        group = self._group()
        assert group is not None, "the job has no placement group yet"
        return PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=places[place], placement_group_capture_child_tasks=True
        )

    def missing(self) -> str:
        """What has no room, for people."""
        from dlrover.platforms.ray import cluster

        machines = cluster.machines()
        layout = self._plan.layout
        for bundle, members in zip(layout.bundles, layout.members, strict=True):
            if not any(all(machine.free.get(n, 0.0) >= a for n, a in bundle.items()) for machine in machines):
                most = {name: max((m.free.get(name, 0.0) for m in machines), default=0.0) for name in bundle}
                return (
                    f"There is no room yet for {members}: it asks for {say_amounts(bundle)}, and the most that a "
                    f"machine has free is {say_amounts(most)}."
                )
        return (
            f"{len(layout.bundles)} groups of instances wait for room. Each alone would fit, but all are placed "
            "together."
        )

    def remove(self) -> None:
        from ray.util import remove_placement_group

        group = self._group()
        if group is not None:
            with contextlib.suppress(ValueError):
                remove_placement_group(group)

    def _group(self) -> Any:
        import ray

        with contextlib.suppress(ValueError):
            return ray.util.get_placement_group(self.name)
        return None

    def _make(self) -> Any:
        import ray

        layout = self._plan.layout
        return ray.util.placement_group(
            [dict(bundle) for bundle in layout.bundles],
            strategy=layout.spread.value,
            name=self.name,
            lifetime="detached",
        )


def group_name(plan: EnsemblePlan) -> str:
    """Known to all actors that the conductor or a host of it made."""
    return f"dlrover_placement_group_{plan.spec.name}"


def _is_placed(group: Any) -> bool:
    from ray.util import placement_group_table

    return bool(placement_group_table(group).get("state") == "CREATED")
