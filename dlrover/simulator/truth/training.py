"""
The training itself, seen from outside: how far the model is, and what that costs.

Steps are not events. A world that trains has begun at some instant with some step; how far it is follows from the
clock. It stands still while a member is frozen, and is over for good when the workers of a member have ended. What the
next world resumes from follows from who is still there: memory survives with its node, a checkpoint always does.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover.protocol.messages.job import WorldSpec
from dlrover.simulator.shapes import Shape
from dlrover.simulator.virtual_time import VirtualTime, micros


class RunningWorld:
    """The workers of one round, on all its nodes."""

    __slots__ = (
        "base",
        "began_at",
        "is_over",
        "num_frozen",
        "paused_at",
        "round",
        "size",
        "started",
        "step_micros",
        "version",
    )

    def __init__(self, round_: int, size: int, step_micros: int) -> None:
        self.round = round_
        self.size = size
        self.step_micros = step_micros
        self.started: dict[int, None] = {}
        """Launches whose workers run."""
        self.base = 0
        self.began_at: int | None = None
        """When step `base` was restored; None: not all workers have started."""
        self.num_frozen = 0
        self.paused_at: int | None = None
        self.is_over = False
        self.version = 0
        """Tells a planned end from one that no longer holds."""


class Training:
    """Owned by the simulation; agents tell it what their workers do."""

    def __init__(
        self, shape: Shape, events: VirtualTime, on_finished: Callable[[str], None], on_begun: Callable[[str], None]
    ) -> None:
        self._shape = shape
        self._events = events
        self._on_finished = on_finished
        self._on_begun = on_begun
        self.worlds: dict[str, RunningWorld] = {}
        """By coordinator: unlike the number of a round, which a lost journal forgets, no address serves twice."""
        self.best_step = 0
        """Greatest step ever reached."""
        self.resume_step = 0
        """Of the newest memory snapshots."""
        self.holders: dict[int, None] = {}
        """Launches whose memory holds the state of `resume_step`."""
        self.num_updates = 0
        """Of variables of parameter servers, ever: nothing of them is a world."""
        self.num_lost_steps = 0
        self.turns: list[tuple[int, int, int]] = []
        """(when, step, nodes) at each begin and end of a world."""

    def started(self, spec: WorldSpec, launch: int) -> None:
        """All workers of a node run."""
        key = spec.coordinator
        world = self.worlds.get(key)
        if world is None:
            pace = micros(self._shape.step_time(spec.group_world_size))
            world = self.worlds[key] = RunningWorld(spec.round, spec.group_world_size, max(1, pace))
        world.started[launch] = None
        if len(world.started) == world.size and not world.is_over:
            world.version += 1
            self._events.after(micros(self._shape.costs.restore), self._begin, key, world.version)

    def _begin(self, key: str, version: int) -> None:
        world = self.worlds.get(key)
        if world is None or world.is_over or world.version != version:
            return
        step = self.resume_step
        if not self._shape.has_replicas and any(launch not in world.started for launch in self.holders):
            step -= step % self._shape.checkpoint_every
        self.num_lost_steps += self.resume_step - step
        self.resume_step = world.base = step
        self.holders = dict(world.started)
        world.began_at = self._events.now
        self.turns.append((self._events.now, step, world.size))
        self._plan_end(key, world)
        self._on_begun(key)

    def is_training(self, key: str) -> bool:
        """Whether that world makes steps right now."""
        world = self.worlds.get(key)
        return world is not None and world.began_at is not None and not world.is_over and world.paused_at is None

    def _plan_end(self, key: str, world: RunningWorld) -> None:
        world.version += 1
        if world.num_frozen:
            world.paused_at = self._events.now
            return
        assert world.began_at is not None, "a world that never began cannot end"
        end_at = world.began_at + (self._shape.num_steps - world.base) * world.step_micros
        self._events.at(end_at, self._finish, key, world.version)

    def _finish(self, key: str, version: int) -> None:
        world = self.worlds.get(key)
        if world is not None and not world.is_over and world.version == version:
            self._stop(world)
            self._on_finished(key)

    def step(self, key: str) -> int | None:
        """How far that world is now; None before its first step."""
        world = self.worlds.get(key)
        if world is None or world.began_at is None:
            return None
        if world.is_over:
            return world.base
        until = self._events.now if world.paused_at is None else world.paused_at
        return min(self._shape.num_steps, world.base + (until - world.began_at) // world.step_micros)

    def froze(self, key: str) -> None:
        world = self.worlds.get(key)
        if world is None:
            return
        world.num_frozen += 1
        if world.began_at is not None and not world.is_over and world.paused_at is None:
            world.paused_at = self._events.now
            world.version += 1

    def thawed(self, key: str) -> None:
        world = self.worlds.get(key)
        if world is None or not world.num_frozen:
            return
        world.num_frozen -= 1
        if not world.num_frozen and world.paused_at is not None and not world.is_over:
            assert world.began_at is not None, "paused before it began"
            world.began_at += self._events.now - world.paused_at
            world.paused_at = None
            self._plan_end(key, world)

    def ended(self, key: str, launch: int) -> bool:
        """The workers of a node have ended, somehow. Returns whether that took their peers by surprise."""
        world = self.worlds.get(key)
        if world is None:
            return False
        world.started.pop(launch, None)
        was_alive = not world.is_over
        if was_alive:
            self._stop(world)
        if not world.started:
            del self.worlds[key]
        return was_alive

    def _stop(self, world: RunningWorld) -> None:
        world.version += 1
        if world.began_at is not None:
            until = self._events.now if world.paused_at is None else world.paused_at
            step = min(self._shape.num_steps, world.base + (until - world.began_at) // world.step_micros)
            world.base = step
            self.turns.append((self._events.now, step, world.size))
            self.resume_step = max(self.resume_step, step)
            self.best_step = max(self.best_step, step)
        world.is_over = True

    def progress(self) -> int:
        """The greatest step that any world has reached up to now."""
        steps = [self.step(key) or 0 for key in self.worlds]
        return max([self.best_step, self.num_updates, *steps])
