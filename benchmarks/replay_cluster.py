"""
Many jobs with parameter servers on one cluster, in virtual time.

Jobs wait in one queue, in the order in which they come. Cores are what is scarce. With back-fill a later job may begin before an earlier one, if that does not
begin later for it (EASY); the scheduler is taken to know how long each job lasts, which flatters back-fill. A job grows only into cores that no waiting job needs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from replay_jobs import FIRST_LOOK, Seen, ServerJob
from replay_laws import MOST_MEMORY, Order, Scene, ServerKind, Size

from dlrover.core.scaling.history.seen import JobSeen

Begin = Callable[[Order, ServerKind, float, list[JobSeen]], ServerJob]
"""A policy: how a job begins, given the jobs that ended before."""
OOM_GROWTH, OOM_MORE = 2, 8192
"""A node that ran out of memory comes back with so many times as much, at most so many MiB more. In every policy."""


@dataclass
class Result:
    """What came of one job."""

    uid: str
    kind: int
    life: int
    """Which of its kind, from 0."""
    submitted: float
    began: float
    ended: float = 0.0
    core_seconds: float = 0.0
    used_core_seconds: float = 0.0
    memory_seconds: float = 0.0
    used_memory_seconds: float = 0.0
    changes: int = 0
    ooms: int = 0
    paused: float = 0.0


@dataclass
class _Running:
    order: Order
    kind: ServerKind
    job: ServerJob
    result: Result
    size: Size
    """That works now."""
    at: float
    """Until when it is accounted for."""
    works_from: float
    progress: float = 0.0
    sized_at: float = 0.0
    held: float = 0.0
    """Cores that it holds."""
    coming: Size | None = None
    version: int = 0


@dataclass(order=True)
class _Event:
    at: float
    number: int
    what: str = field(compare=False)
    uid: str = field(compare=False)
    version: int = field(compare=False, default=0)


class Cluster:
    def __init__(self, scene: Scene, begin: Begin, *, backfill: bool, pause: float) -> None:
        self._scene, self._given, self._begin = scene, scene.given, begin
        self._backfill, self._pause = backfill, pause
        self._chance = random.Random(f"noise {scene.seed}")
        self._events: list[_Event] = []
        self._numbers = itertools.count()
        self._queue: list[Order] = []
        self._running: dict[str, _Running] = {}
        self._ended: list[JobSeen] = []
        self._lives: dict[int, int] = {}
        self._waiting: dict[str, ServerJob] = {}
        self.results: list[Result] = []
        self._free = float(scene.given.cores)
        self._spare = self._free

    def run(self) -> list[Result]:
        orders = {order.uid: order for order in self._scene.orders}
        for order in self._scene.orders:
            self._add(order.at, "submitted", order.uid)
        while self._events:
            event = heapq.heappop(self._events)
            now = event.at
            if event.what == "submitted":
                self._queue.append(orders[event.uid])
                self._start_jobs(now)
                continue
            running = self._running.get(event.uid)
            if running is None or event.version != running.version:
                continue
            self._account(running, now)
            if event.what == "ends":
                self._end(running, now)
            elif event.what == "looks":
                self._look(running, now)
            elif running.coming is not None:
                self._switch(running, now, running.coming)
        assert not self._queue, "a job that never fits was submitted"
        return self.results

    def _add(self, at: float, what: str, uid: str, version: int = 0) -> None:
        heapq.heappush(self._events, _Event(at, next(self._numbers), what, uid, version))

    # Beginnings.

    def _start_jobs(self, now: float) -> None:
        """The first in the queue; with back-fill, also those behind it that do not delay it."""
        self._spare = self._free
        while self._queue and self._begun(self._queue[0], now, self._free):
            self._queue.pop(0)
        self._spare = self._free
        if not self._queue or not self._backfill:
            if self._queue:
                self._spare = 0.0
            return
        head = self._sized(self._queue[0], now).size.cores
        free, shadow = self._free, now
        for ends_at, cores in sorted((self._ends_at(each, now), each.held) for each in self._running.values()):
            free, shadow = free + cores, ends_at
            if free >= head:
                break
        beside = free - head
        for order in self._queue[1:]:
            job = self._sized(order, now)
            lasts = order.work / self._kind(order).speed(job.size, 0.5)
            most = self._free if now + lasts <= shadow else min(self._free, beside)
            if self._begun(order, now, most):
                self._queue.remove(order)
                beside -= job.size.cores if now + lasts > shadow else 0.0
        self._spare = max(0.0, min(self._free, beside))

    def _kind(self, order: Order) -> ServerKind:
        return self._scene.kinds[order.kind]

    def _sized(self, order: Order, now: float) -> ServerJob:
        """As it would begin now. A job that waits asks once."""
        if order.uid not in self._waiting:
            self._waiting[order.uid] = self._begin(order, self._kind(order), now, self._ended)
        return self._waiting[order.uid]

    def _begun(self, order: Order, now: float, most: float) -> bool:
        job = self._sized(order, now)
        if job.size.cores > most:
            return False
        del self._waiting[order.uid]
        life = self._lives.get(order.kind, 0)
        self._lives[order.kind] = life + 1
        result = Result(order.uid, order.kind, life, order.at, now)
        running = _Running(order, self._kind(order), job, result, job.size, now, now + self._given.start_delay)
        running.held = job.size.cores
        self._free -= running.held
        self._running[order.uid] = running
        self._give_memory(running)
        running.sized_at = running.works_from
        self._plan_events(running, running.works_from + FIRST_LOOK)
        return True

    def _give_memory(self, running: _Running) -> None:
        """Nodes that have too little run out of it, and come back with more."""
        size, kind = running.size, running.kind
        while size.worker_memory < kind.worker_memory:
            size = size._replace(worker_memory=_more(size.worker_memory))
            self._lose(running)
        while size.server_memory < kind.need_of_server(size.servers):
            if size.server_memory >= MOST_MEMORY:
                break  # it cannot have more; the replay does not end jobs for it
            size = size._replace(server_memory=_more(size.server_memory))
            self._lose(running)
        running.size = size
        running.job.size = running.job.size._replace(worker_memory=size.worker_memory, server_memory=size.server_memory)

    def _lose(self, running: _Running) -> None:
        running.works_from += self._given.oom_seconds
        running.result.ooms += 1

    # Progress. Between two events a job has one size; its step time grows with its progress.

    def _account(self, running: _Running, now: float) -> None:
        begin, seconds = running.at, now - running.at
        result, size = running.result, running.size
        works = max(0.0, now - max(begin, running.works_from))
        if works > 0:
            before = running.progress
            running.progress = self._progress_after(running, works)
            use = running.kind.use(size, before)
            cores = size.workers * use.worker_cores + sum(use.server_cores)
            memory = size.workers * use.worker_memory + size.servers * use.server_memory
            result.used_core_seconds += cores * works
            result.used_memory_seconds += memory * works
        result.core_seconds += running.held * seconds
        result.memory_seconds += size.memory * seconds
        running.at = now

    def _progress_after(self, running: _Running, works: float) -> float:
        drift, x = running.kind.drift, running.progress
        rate = running.kind.speed(running.size, 0.0) / running.order.work
        if drift <= 0:
            return min(1.0, x + rate * works)
        return min(1.0, (math.sqrt((1 + drift * x) ** 2 + 2 * drift * rate * works) - 1) / drift)

    def _ends_at(self, running: _Running, now: float) -> float:
        drift, x = running.kind.drift, running.progress
        rate = running.kind.speed(running.size, 0.0) / running.order.work
        return max(now, running.works_from) + ((1 - x) + drift / 2 * (1 - x * x)) / rate

    def _plan_events(self, running: _Running, look_at: float) -> None:
        running.version += 1
        ends_at = self._ends_at(running, running.at)
        uid, version = running.order.uid, running.version
        if look_at < ends_at:
            self._add(look_at, "looks", uid, version)
        else:
            self._add(ends_at, "ends", uid, version)

    # Looks and changes.

    def _look(self, running: _Running, now: float) -> None:
        before = running.job.size
        wait = running.job.look(self._seen(running, now))
        wanted = running.job.size
        if wanted == before:
            self._plan_events(running, now + wait)
            return
        running.result.changes += 1
        self._hold(running, max(running.held, wanted.cores))
        running.coming = wanted
        running.version += 1
        ends_at, ready_at = self._ends_at(running, now), now + self._given.start_delay
        self._add(
            min(ends_at, ready_at), "ends" if ends_at <= ready_at else "switches", running.order.uid, running.version
        )

    def _switch(self, running: _Running, now: float, size: Size) -> None:
        running.size, running.coming = size, None
        self._hold(running, size.cores)
        running.works_from = now + self._pause
        running.result.paused += self._pause
        self._give_memory(running)
        running.sized_at = running.works_from
        self._plan_events(running, running.works_from + FIRST_LOOK)
        self._start_jobs(now)

    def _hold(self, running: _Running, cores: float) -> None:
        self._free += running.held - cores
        self._spare += min(0.0, running.held - cores)
        running.held = cores

    def _seen(self, running: _Running, now: float) -> Seen:
        kind, size = running.kind, running.size
        seconds = now - running.sized_at
        steps = max(1.0, min(61.0, min(seconds, self._given.look) / kind.step_time(size, running.progress)))
        noise = kind.noise * 1.25 / math.sqrt(steps)  # of a median
        use = kind.use(size, running.progress)

        def seen(number: float) -> float:
            return max(1e-6, number * self._chance.gauss(1.0, noise))

        return Seen(
            now=now,
            seconds=seconds,
            step_time=seen(kind.step_time(size, running.progress)),
            done=running.progress * running.order.work,
            work=running.order.work,
            worker_cores=min(size.worker_cores, seen(use.worker_cores)),
            server_cores=tuple(
                min(most, seen(cores)) for most, cores in zip(size.server_cores, use.server_cores, strict=True)
            ),
            worker_memory=use.worker_memory,
            server_memory=min(use.server_memory, size.server_memory),
            most_cores=running.held + max(0.0, self._spare),
        )

    def _end(self, running: _Running, now: float) -> None:
        running.result.ended = now
        self.results.append(running.result)
        self._ended.append(running.job.remember(running.result.began))
        del self._running[running.order.uid]
        self._free += running.held
        self._start_jobs(now)


def _more(memory: int) -> int:
    return min(MOST_MEMORY, OOM_GROWTH * memory, memory + OOM_MORE)


def summary(results: list[Result]) -> dict[str, float]:
    """Of one policy and seed."""
    hours = [(each.ended - each.submitted) / 3600 for each in results]
    given = sum(each.core_seconds for each in results)
    memory = sum(each.memory_seconds for each in results)
    return {
        "completion": statistics.fmean(hours),
        "p95": sorted(hours)[int(0.95 * len(hours))],
        "run": statistics.fmean((each.ended - each.began) / 3600 for each in results),
        "core_hours": given / 3600,
        "cpu": sum(each.used_core_seconds for each in results) / given,
        "memory": sum(each.used_memory_seconds for each in results) / memory,
        "ooms": sum(each.ooms for each in results),
        "changes": statistics.fmean(each.changes for each in results),
        "most_changes": max(each.changes for each in results),
        "pause": sum(each.paused for each in results) / sum(each.ended - each.began for each in results),
    }
