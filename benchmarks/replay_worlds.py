"""
All-reduce jobs on the same cluster, in virtual time: with the nodes that their users ask for, and with a room that Brain divides.

The elastic jobs decide with the core's own functions: the fit, the brakes, probation, and a room that shrinks is an order. Brain's `divide` gives the room.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from msgspec.structs import replace
from replay_cluster import Result
from replay_laws import Order, Scene, WorldKind

from dlrover.brain.room import divide
from dlrover.core.scaling import allreduce, brakes, probation
from dlrover.core.scaling.evidence import keep_run, measured_speed
from dlrover.core.scaling.facts import LONGEST_HORIZON, UNBOUNDED, ScaleFacts
from dlrover.core.scaling.state import OwnChange, Probation, Scaling
from dlrover.core.scaling.verdict import decide_world
from dlrover.protocol.messages.brain import AllowanceAsked, JobRef
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.job import Limits
from dlrover.protocol.messages.scaling import (
    Configuration,
    GroupSize,
    RunMeasured,
    ScaleMode,
    ScaleOutcome,
    ScaleTerms,
    SpeedPoint,
)

LOOK, SLOW_LOOK = 75.0, 300.0
"""Seconds until the next measurement: after a change, and when nothing changed."""
DIVIDE = 600.0
"""Seconds between two divisions of the room. Each job asks Brain once a minute; here all of them ask at once, and less often."""
BATCH = 1024
"""Records of a step; each law keeps it whatever the number of nodes is."""


@dataclass
class _World:
    order: Order
    kind: WorldKind
    result: Result
    nodes: int
    at: float
    works_from: float
    limits: Limits
    share: int
    scaling: Scaling = field(default_factory=lambda: Scaling(terms=ScaleTerms(mode=ScaleMode.ON), mode=ScaleMode.ON))
    progress: float = 0.0
    sized_at: float = 0.0
    number: int = 0
    version: int = 0
    asked: AllowanceAsked | None = None

    def configuration(self) -> Configuration:
        return Configuration(groups=(GroupSize(NodeType.WORKER, self.nodes),), total_batch=BATCH)


class WorldCluster:
    def __init__(self, scene: Scene, *, is_elastic: bool, pause: float) -> None:
        self._scene, self._given, self._is_elastic, self._pause = scene, scene.given, is_elastic, pause
        self._chance = random.Random(f"noise {scene.seed}")
        self._events: list[tuple[float, int, str, str, int]] = []
        self._numbers = itertools.count()
        self._queue: list[Order] = []
        self._running: dict[str, _World] = {}
        self._lives: dict[int, int] = {}
        self._room = scene.given.cores // scene.given.worlds.node_cores
        self._divided_at = -math.inf
        self.results: list[Result] = []

    def run(self) -> list[Result]:
        orders = {order.uid: order for order in self._scene.orders}
        for order in self._scene.orders:
            self._add(order.at, "submitted", order.uid, 0)
        while self._events:
            now, _, what, uid, version = heapq.heappop(self._events)
            if what == "submitted":
                self._queue.append(orders[uid])
                self._start_jobs(now)
                continue
            world = self._running.get(uid)
            if world is None or version != world.version:
                continue
            self._account(world, now)
            if what == "ends":
                world.result.ended = now
                self.results.append(world.result)
                del self._running[uid]
                self._start_jobs(now)
            else:
                self._look(world, now)
        assert not self._queue, "a job that never fits was submitted"
        return self.results

    def _add(self, at: float, what: str, uid: str, version: int) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what, uid, version))

    @property
    def _free(self) -> int:
        return self._room - sum(world.nodes for world in self._running.values())

    # Beginnings.

    def _start_jobs(self, now: float) -> None:
        if self._is_elastic:
            while self._queue and self._free > 0:
                order = self._queue.pop(0)
                self._begin(order, min(order.nodes, self._free), now)
            return
        while self._queue and self._queue[0].nodes <= self._free:
            self._begin(self._queue[0], self._queue.pop(0).nodes, now)
        if self._queue:
            self._fill_back(now)

    def _fill_back(self, now: float) -> None:
        """EASY, with run times that the scheduler knows."""
        head, free, shadow = self._queue[0].nodes, self._free, now
        for ends_at, nodes in sorted((self._ends_at(world), world.nodes) for world in self._running.values()):
            free, shadow = free + nodes, ends_at
            if free >= head:
                break
        beside = free - head
        for order in self._queue[1:]:
            lasts = order.work * self._scene.worlds[order.kind].step_time(order.nodes, 0.5)
            is_short = now + lasts <= shadow
            if order.nodes <= (self._free if is_short else min(self._free, beside)):
                self._queue.remove(order)
                self._begin(order, order.nodes, now)
                beside -= 0 if is_short else order.nodes

    def _begin(self, order: Order, nodes: int, now: float) -> None:
        life = self._lives.get(order.kind, 0)
        self._lives[order.kind] = life + 1
        limits = Limits(min_nodes=1, max_nodes=self._given.worlds.most)
        result = Result(order.uid, order.kind, life, order.at, now)
        begins = now + self._given.start_delay
        world = _World(order, self._scene.worlds[order.kind], result, nodes, now, begins, limits, nodes)
        world.sized_at = begins
        self._running[order.uid] = world
        self._plan_events(world)

    # Progress.

    def _rate(self, world: _World) -> float:
        return 1 / world.kind.step_time(world.nodes, 0.0) / world.order.work

    def _account(self, world: _World, now: float) -> None:
        works, drift, x = max(0.0, now - max(world.at, world.works_from)), world.kind.drift, world.progress
        if works > 0:
            reached = self._rate(world) * works
            if drift > 0:
                x = (math.sqrt((1 + drift * x) ** 2 + 2 * drift * reached) - 1) / drift
            else:
                x += reached
            world.progress = min(1.0, x)
        cores = world.nodes * world.kind.node_cores
        world.result.core_seconds += cores * (now - world.at)
        world.at = now

    def _ends_at(self, world: _World) -> float:
        drift, x = world.kind.drift, world.progress
        return max(world.at, world.works_from) + ((1 - x) + drift / 2 * (1 - x * x)) / self._rate(world)

    def _plan_events(self, world: _World, wait: float = LOOK) -> None:
        world.version += 1
        ends_at, look_at = self._ends_at(world), max(world.at, world.works_from) + wait
        is_look = self._is_elastic and look_at < ends_at
        self._add(look_at if is_look else ends_at, "looks" if is_look else "ends", world.order.uid, world.version)

    # An elastic job decides.

    def _look(self, world: _World, now: float) -> None:
        scaling = world.scaling
        world.number += 1
        keep_run(scaling, self._measured(world, now), micros(now))
        world.asked = self._asked(world)
        if now - self._divided_at >= DIVIDE:
            self._divided_at = now
            self._divide()
        known = self._facts(world, now)
        wanted = known.most if world.nodes > known.most else 0
        if wanted:
            scaling.probation = None
            self._note(world, 0, now)
        elif scaling.probation is not None:
            wanted = self._judge(world, known, now)
        if not wanted and scaling.probation is None:
            wanted = self._decide(world, known, now)
        if wanted and wanted != world.nodes:
            world.nodes = wanted
            world.works_from = now + self._pause
            world.sized_at = world.works_from
            world.result.changes += 1
            world.result.paused += self._pause
        is_calm = not wanted and scaling.probation is None
        self._plan_events(world, SLOW_LOOK if is_calm else LOOK)
        self._start_jobs(now)

    def _judge(self, world: _World, known: ScaleFacts, now: float) -> int:
        scaling, watched = world.scaling, world.scaling.probation
        judgement = probation.judge(scaling, known)
        if judgement is None or watched is None:
            return 0
        scaling.probation = None
        if judgement.outcome is not ScaleOutcome.TAKEN_BACK:
            return 0
        brakes.refuse(scaling, watched.plan, watched.nodes_after, known.now)
        back = min(judgement.back_to or watched.nodes_before, known.most)
        self._note(world, back - world.nodes, now)
        return back

    def _decide(self, world: _World, known: ScaleFacts, now: float) -> int:
        verdict = decide_world(world.scaling, known)
        group = None if verdict.plan is None else verdict.plan.group(NodeType.WORKER)
        if verdict.plan is None or group is None or group.count is None:
            return 0
        self._note(world, group.count - world.nodes, now)
        world.scaling.probation = Probation(
            number=world.number,
            at=known.now,
            kind=brakes.WORKERS,
            plan=verdict.plan,
            back=allreduce.plan_of(world.nodes),
            nodes_before=world.nodes,
            nodes_after=group.count,
            speed_before=known.speed,
            expected_speed=verdict.expected_speed,
            least_ratio=verdict.least_ratio,
        )
        return group.count

    def _note(self, world: _World, direction: int, now: float) -> None:
        scaling, at = world.scaling, micros(now)
        scaling.changed_at, scaling.number_at_change = at, world.number
        if direction:
            scaling.changed_kinds[brakes.WORKERS] = at
            change = OwnChange(at=at, kind=brakes.WORKERS, direction=1 if direction > 0 else -1)
            scaling.own_changes = [each for each in scaling.own_changes if each.at > at - micros(3600.0)] + [change]

    def _measured(self, world: _World, now: float) -> RunMeasured:
        seconds = now - world.sized_at
        time = world.kind.step_time(world.nodes, world.progress)
        steps = max(20, int(seconds / time))
        seen = time * max(0.05, self._chance.gauss(1.0, world.kind.noise * 1.25 / math.sqrt(min(61, steps))))
        return RunMeasured(
            number=world.number,
            configuration=world.configuration(),
            seconds=seconds,
            steps=steps,
            step_time=seen,
            last_step=int(world.progress * world.order.work),
        )

    def _facts(self, world: _World, now: float) -> ScaleFacts:
        scaling, newest = world.scaling, world.scaling.newest
        assert newest is not None, "a run was measured"
        is_seen = newest.number > scaling.number_at_change
        configuration = newest.configuration if is_seen else None
        left = (1 - world.progress) * world.order.work * newest.step_time
        return ScaleFacts(
            now=Micros(micros(now)),
            limits=world.limits,
            nodes=world.nodes,
            standby=0,
            most_by_limits=UNBOUNDED,
            room=min(world.share, world.nodes + self._free),
            cost=self._pause,
            horizon=min(LONGEST_HORIZON, left),
            off="",
            under_way="",
            configuration=configuration,
            unseen="" if is_seen else "not measured since the last change",
            speed=0.0 if configuration is None else measured_speed(scaling, configuration),
        )

    def _divide(self) -> None:
        """Among those that run; who waits is counted with one node."""
        worlds = list(self._running.values())
        asked = [self._asked(world) if world.asked is None else world.asked for world in worlds]
        room = max(len(worlds), self._room - len(self._queue))
        for world, (nodes, _) in zip(worlds, divide(asked, room), strict=True):
            world.share = max(1, nodes)

    def _asked(self, world: _World) -> AllowanceAsked:
        scaling, newest = world.scaling, world.scaling.newest
        curve: dict[int, float] = {}
        speed = 0.0
        if newest is not None:
            configuration = newest.configuration
            for run in allreduce.runs_like(scaling, configuration):
                curve[run.configuration.num_workers] = measured_speed(scaling, run.configuration)
            speed = measured_speed(scaling, configuration)
            fit = allreduce.fit_of(scaling, configuration)
            if fit is not None and not fit.why_unused:
                reach = range(1, min(world.limits.max_nodes, 2 * max(curve)) + 1)
                facts = self._facts(world, world.at)
                known = replace(facts, nodes=configuration.num_workers, speed=speed)
                curve.update(allreduce.forecasts(fit, configuration, known, reach))
        left = 0.0 if newest is None else (1 - world.progress) * world.order.work * newest.step_time * speed
        return AllowanceAsked(
            job=JobRef(uid=world.order.uid),
            min_nodes=1,
            max_nodes=world.limits.max_nodes,
            nodes=world.nodes,
            points=tuple(SpeedPoint(nodes, curve[nodes]) for nodes in sorted(curve) if curve[nodes] > 0),
            remaining=left,
            change_cost=self._pause,
        )
