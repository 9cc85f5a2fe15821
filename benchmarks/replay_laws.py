"""
The jobs of the cluster replay: what they need, how fast they are with what they get, and what their users ask for.

No policy imports this module: a policy sees the runs that were measured, the cores and the memory that were used, and nothing else.
"""

from __future__ import annotations

import itertools
import math
import random
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

Range = tuple[float, float]
GIB = 1024
MOST_WORKERS, MOST_SERVERS, LEAST_CORES, MOST_CORES, LEAST_MEMORY, MOST_MEMORY = 60, 15, 4, 32, 6144, 65_536
"""What any node and any job may have, for users and for plans alike (spec 07 §2.2)."""


class ServerParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    fixed: Range
    compute: Range
    serve: Range
    contention: float
    spread: Range
    crowd: Range
    crowding: float
    knee: Range
    beyond: float
    drift: float
    noise: float
    worker_memory: Range
    server_memory: Range
    server_base: float
    hours: Range
    operations: tuple[int, int]


class WorldParameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node_cores: int
    fixed: Range
    compute: Range
    network: Range
    ring: Range
    contention: float
    drift: float
    noise: float
    hours: Range
    most: int


class Parameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cores: int
    kinds: int
    jobs: int
    seeds: list[int]
    load: float
    burst: float
    wrong: float
    right: Range
    pause: float
    start_delay: float
    oom_seconds: float
    look: float
    servers: ServerParameters
    worlds: WorldParameters


def read_parameters(path: Path) -> Parameters:
    return msgspec.convert(tomllib.loads(path.read_text()), Parameters)


class Size(NamedTuple):
    """Of a job with parameter servers. Memory in MiB."""

    workers: int
    servers: int
    worker_cores: float
    server_cores: tuple[float, ...]
    """Of each server: one may be exchanged alone."""
    worker_memory: int
    server_memory: int

    @property
    def cores(self) -> float:
        return self.workers * self.worker_cores + sum(self.server_cores)

    @property
    def memory(self) -> int:
        return self.workers * self.worker_memory + self.servers * self.server_memory


class Use(NamedTuple):
    """Cores and MiB that one node uses."""

    worker_cores: float
    server_cores: tuple[float, ...]
    worker_memory: float
    server_memory: float


@dataclass(frozen=True)
class ServerKind:
    """Jobs that are started again and again with the same program."""

    number: int
    fixed: float
    compute: float
    serve: float
    contention: float
    spread: float
    crowd: float
    crowding: float
    knee: float
    beyond: float
    drift: float
    noise: float
    worker_memory: float
    all_server_memory: float
    server_base: float
    hours: float
    operations: int

    def step_time(self, size: Size, progress: float) -> float:
        return sum(self._parts(size)) * self._drift(progress)

    def speed(self, size: Size, progress: float) -> float:
        """Batches per second of all workers."""
        return size.workers / self.step_time(size, progress)

    def use(self, size: Size, progress: float) -> Use:
        """Workers work while they compute, servers while a worker waits for them."""
        parts = self._parts(size)
        total = sum(parts)
        busy = parts[2] / total
        return Use(
            self._used(size.worker_cores) * parts[1] / total,
            tuple(self._used(cores) * busy for cores in size.server_cores),
            self.worker_memory,
            self.need_of_server(size.servers),
        )

    def need_of_server(self, servers: int) -> float:
        return self.server_base + self.all_server_memory / servers

    def _drift(self, progress: float) -> float:
        return 1.0 + self.drift * progress

    def _used(self, cores: float) -> float:
        return min(cores, self.knee) + self.beyond * max(0.0, cores - self.knee)

    def _parts(self, size: Size) -> tuple[float, float, float, float, float]:
        crowded = (size.workers / size.servers) ** self.contention
        slowest = self._used(min(size.server_cores))
        return (
            self.fixed,
            self.compute / self._used(size.worker_cores),
            self.serve * crowded / slowest,
            self.spread * size.servers,
            self.crowd * size.workers**self.crowding,
        )

    def best(self) -> Size:
        """Where a further share of cores would bring half of it in speed: the greatest speed by the root of the cores."""

        def size_of(numbers: tuple[int, ...]) -> Size:
            workers, servers, worker_cores, server_cores = numbers
            need = math.ceil(self.need_of_server(servers) / 0.85)
            memory = math.ceil(self.worker_memory / 0.85)
            return Size(workers, servers, float(worker_cores), (float(server_cores),) * servers, memory, need)

        def worth(numbers: tuple[int, ...]) -> float:
            size = size_of(numbers)
            return self.speed(size, 0.5) / math.sqrt(size.cores) if size.server_memory <= MOST_MEMORY else 0.0

        bounds = ((1, MOST_WORKERS), (1, MOST_SERVERS), (LEAST_CORES, MOST_CORES), (LEAST_CORES, MOST_CORES))
        found = max(
            (_climb(start, bounds, worth) for start in itertools.product((4, 16), (2, 6), (6,), (6,))), key=worth
        )
        return size_of(found)


def _climb(start: tuple[int, ...], bounds: tuple[tuple[int, int], ...], worth) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """To a place that no step of one or two dimensions improves."""
    moves = [move for move in itertools.product((-1, 0, 1), repeat=len(start)) if any(move)]
    here, value = start, worth(start)
    while True:
        around = [tuple(map(sum, zip(here, move, strict=True))) for move in moves]
        nearby = [there for there in around if _is_within(there, bounds)]
        best = max(nearby, key=worth)
        if worth(best) <= value:
            return here
        here, value = best, worth(best)


def _is_within(numbers: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> bool:
    return all(low <= number <= high for number, (low, high) in zip(numbers, bounds, strict=True))


@dataclass(frozen=True)
class WorldKind:
    number: int
    fixed: float
    compute: float
    network: float
    ring: float
    contention: float
    drift: float
    noise: float
    hours: float
    most: int
    node_cores: int

    def step_time(self, nodes: int, progress: float) -> float:
        network = self.network if nodes > 1 else 0.0
        time = self.fixed + self.compute / nodes + network + self.ring * max(0, nodes - 2) ** self.contention
        return time * (1.0 + self.drift * progress)

    def best(self) -> int:
        return max(range(1, self.most + 1), key=lambda nodes: 1 / self.step_time(nodes, 0.5) / math.sqrt(nodes))


@dataclass(frozen=True)
class Order:
    """A job as its user submits it."""

    uid: str
    kind: int
    at: float
    work: float
    """Batches in a job with servers, steps in a world."""
    size: Size
    """What the user asks for."""
    nodes: int = 0
    """The same, of a world."""


@dataclass
class Scene:
    """The jobs of one seed."""

    seed: int
    given: Parameters
    kinds: list[ServerKind] = field(default_factory=list)
    worlds: list[WorldKind] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)


NO_SIZE = Size(0, 0, 0.0, (), 0, 0)


def server_scene(given: Parameters, seed: int, *, is_right: bool) -> Scene:
    chance = random.Random(f"servers {seed}")
    kinds = [_server_kind(number, given.servers, chance) for number in range(given.kinds)]
    scene = Scene(seed, given, kinds=kinds)
    best = [kind.best() for kind in kinds]
    lives = [index % given.kinds for index in range(given.jobs)]
    chance.shuffle(lives)
    hours = [kinds[kind].hours * chance.uniform(0.7, 1.3) for kind in lives]
    arrivals = _arrivals(given, chance, sum(best[kind].cores * hour for kind, hour in zip(lives, hours, strict=True)))
    asking = random.Random(f"requests {seed} {is_right}")
    for index, (kind, hour, at) in enumerate(zip(lives, hours, arrivals, strict=True)):
        work = kinds[kind].speed(best[kind], 0.5) * hour * 3600
        scene.orders.append(Order(f"job-{index}", kind, at, work, _request(best[kind], given, asking, is_right)))
    return scene


def world_scene(given: Parameters, seed: int) -> Scene:
    chance = random.Random(f"worlds {seed}")
    worlds = [_world_kind(number, given.worlds, chance) for number in range(given.kinds)]
    scene = Scene(seed, given, worlds=worlds)
    best = [kind.best() for kind in worlds]
    lives = [index % given.kinds for index in range(given.jobs)]
    chance.shuffle(lives)
    hours = [worlds[kind].hours * chance.uniform(0.7, 1.3) for kind in lives]
    each = given.worlds.node_cores
    core_hours = sum(best[kind] * each * hour for kind, hour in zip(lives, hours, strict=True))
    arrivals = _arrivals(given, chance, core_hours)
    for index, (kind, hour, at) in enumerate(zip(lives, hours, arrivals, strict=True)):
        work = hour * 3600 / worlds[kind].step_time(best[kind], 0.5)
        factor = _factor(given, chance, is_right=False)
        nodes = min(given.worlds.most, max(1, round(best[kind] * factor)))
        scene.orders.append(Order(f"world-{index}", kind, at, work, NO_SIZE, nodes))
    return scene


def _arrivals(given: Parameters, chance: random.Random, core_hours: float) -> list[float]:
    """Moments in seconds, spread so that the cluster would be busy by `load`."""
    span = core_hours / (given.cores * given.load) * 3600
    at_once = round(given.burst * given.jobs)
    return [0.0] * at_once + sorted(chance.uniform(0, span) for _ in range(given.jobs - at_once))


def _factor(given: Parameters, chance: random.Random, *, is_right: bool) -> float:
    return chance.uniform(*given.right) if is_right else chance.lognormvariate(0.0, given.wrong)


def _request(best: Size, given: Parameters, chance: random.Random, is_right: bool) -> Size:
    def about(number: float, least: float, most: float) -> float:
        return min(most, max(least, number * _factor(given, chance, is_right=is_right)))

    servers = round(about(best.servers, 1, MOST_SERVERS))
    return Size(
        round(about(best.workers, 1, MOST_WORKERS)),
        servers,
        float(round(about(best.worker_cores, 1, MOST_CORES))),
        (float(round(about(best.server_cores[0], 1, MOST_CORES))),) * servers,
        round(about(best.worker_memory, 1024, MOST_MEMORY)),
        round(about(best.server_memory, 1024, MOST_MEMORY)),
    )


def _server_kind(number: int, given: ServerParameters, chance: random.Random) -> ServerKind:
    return ServerKind(
        number=number,
        fixed=chance.uniform(*given.fixed),
        compute=chance.uniform(*given.compute),
        serve=chance.uniform(*given.serve),
        contention=given.contention,
        spread=chance.uniform(*given.spread),
        crowd=chance.uniform(*given.crowd),
        crowding=given.crowding,
        knee=chance.uniform(*given.knee),
        beyond=given.beyond,
        drift=given.drift,
        noise=given.noise,
        worker_memory=GIB * chance.uniform(*given.worker_memory),
        all_server_memory=GIB * chance.uniform(*given.server_memory),
        server_base=GIB * given.server_base,
        hours=chance.uniform(*given.hours),
        operations=chance.randint(*given.operations),
    )


def _world_kind(number: int, given: WorldParameters, chance: random.Random) -> WorldKind:
    return WorldKind(
        number=number,
        fixed=chance.uniform(*given.fixed),
        compute=chance.uniform(*given.compute),
        network=chance.uniform(*given.network),
        ring=chance.uniform(*given.ring),
        contention=given.contention,
        drift=given.drift,
        noise=given.noise,
        hours=chance.uniform(*given.hours),
        most=given.most,
        node_cores=given.node_cores,
    )
