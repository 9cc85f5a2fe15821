"""
Rules of thumb for jobs with parameter servers (spec 07 §2.2, §8 to §10): numbers in, numbers out.

They decide while too few configurations were seen for a fit, or always with `--optimizer rules`. Memory is in MiB throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from dlrover.protocol.messages.fleet import NodeType, Resource
from dlrover.protocol.messages.scaling import ScaleTerms

ASSUMED_NODES = 5
MOST_FIRST_CPU = 16
MOST_FIRST_MEMORY = 8192
LEAST_WORKER_CPU = 1.0
LEAST_WORKER_MEMORY = 1024
OVERLOAD = 0.9
HOT = 0.9
SATURATED = 0.95
SERVER_MARGIN = 0.2
WORKER_MARGIN = 0.5
NODE_MOST_CPU = 32.0
LEAST_SPEED_RATIO = 0.2
OOM_FACTOR = 2
OOM_MOST_MORE = 8192
LEAST_VALID_CPU = 2.0
LEAST_VALID_MEMORY = 1024
GROWTH_BAND = 1.2
DECREASE_BAND = 0.5
DEFAULT_COUNTS = {NodeType.WORKER: 2, NodeType.PS: 1}
DEFAULT_SIZE = Resource(cpu=1.0, memory_mb=8000)


class NodeSample(Struct, frozen=True):
    """One node in one sample."""

    id: int
    cpu_used: float
    cpu: float
    memory_used: float
    memory: int = 0


class UseSample(Struct, frozen=True):
    servers: tuple[NodeSample, ...]
    workers: tuple[NodeSample, ...]
    """Chief included."""
    speed: float = 0.0
    num_chiefs: int = 0


class Sized(Struct, frozen=True):
    """A type of nodes as a rule wants it. 0: not said."""

    count: int = 0
    cpu: float = 0.0
    memory_mb: int = 0


def matching_servers(samples: Sequence[UseSample]) -> list[tuple[NodeSample, ...]]:
    """Of samples, newest first, those with the newest set of servers."""
    newest = [node.id for node in samples[0].servers] if samples else []
    return [sample.servers for sample in samples if sample.servers and [each.id for each in sample.servers] == newest]


def matching_workers(samples: Sequence[UseSample]) -> list[tuple[NodeSample, ...]]:
    number = len(samples[0].workers) if samples else 0
    return [sample.workers for sample in samples if sample.workers and len(sample.workers) == number]


def create(limits: Resource) -> Sized:
    """§8.1: one worker and one server of this size."""
    cpu = min(math.ceil(limits.cpu / ASSUMED_NODES), MOST_FIRST_CPU)
    memory = min(math.ceil(limits.memory_mb / ASSUMED_NODES), MOST_FIRST_MEMORY)
    return Sized(1, float(cpu), memory)


def _demands(samples: Sequence[UseSample]) -> tuple[float, float, int] | None:
    """Cores of all servers for one worker, cores of a worker, and workers now."""
    servers, workers = matching_servers(samples), matching_workers(samples)
    if not servers or not workers:
        return None
    used = sum(sum(node.cpu_used for node in each) for each in servers) / len(servers)
    count = len(workers[0])
    all_workers = [node.cpu_used for each in workers for node in each]
    return used / count, sum(all_workers) / len(all_workers), count


def first_servers(samples: Sequence[UseSample], limit_cpu: float) -> Sized | None:
    """§8.2: as many as the most workers that the limit allows will need."""
    demands = _demands(samples)
    if demands is None:
        return None
    per_worker, worker_cpu, _ = demands
    if per_worker + worker_cpu <= 0:
        return None
    most_workers = limit_cpu / (per_worker + worker_cpu)
    total = limit_cpu - most_workers * worker_cpu
    newest = samples[0].servers
    cpu = max(node.cpu for node in newest)
    if cpu <= 0:
        return None
    memory = max(node.memory_used for node in newest) * (1 + SERVER_MARGIN)
    return Sized(math.ceil(total / cpu), cpu, int(memory))


def speed_ratio(samples: Sequence[UseSample]) -> float:
    """§8.3: what the last added workers brought, as a share of what the others bring. Samples newest first."""
    runs: list[list[UseSample]] = []
    for sample in samples:
        size = len(sample.servers) + len(sample.workers)
        if runs and len(runs[-1][0].servers) + len(runs[-1][0].workers) == size:
            runs[-1].append(sample)
        elif len(runs) < 2:
            runs.append([sample])
        else:
            break
    if len(runs) < 2:
        return 1.0
    post, pre = runs
    post_speed, pre_speed = (sum(sample.speed for sample in run) / len(run) for run in (post, pre))
    post_workers, pre_workers = (len(run[-1].workers) - run[-1].num_chiefs for run in (post, pre))
    if post_workers == pre_workers or not pre_workers or not pre_speed:
        return 1.0
    return ((post_speed - pre_speed) / (post_workers - pre_workers)) / (pre_speed / pre_workers)


def workers(samples: Sequence[UseSample], limits: Resource) -> Sized | None:
    """§8.3: as many as the servers bear, within the limits."""
    servers, trained = matching_servers(samples), matching_workers(samples)
    rates = [node.cpu_used / node.cpu for each in servers for node in each if node.cpu > 0]
    use = max(rates, default=0.0)
    if use > SATURATED or use == 0 or not trained or speed_ratio(samples) < LEAST_SPEED_RATIO:
        return None
    count = len(trained[0])
    if OVERLOAD / use > 1:
        count = int(count * OVERLOAD / use)
    used = [node.cpu_used for each in trained for node in each]
    cpu = max(LEAST_WORKER_CPU, sum(used) / len(used))
    memory = max(LEAST_WORKER_MEMORY, (1 + WORKER_MARGIN) * max(node.memory_used for each in trained for node in each))
    newest = servers[0] if servers else ()
    if limits.cpu:
        count = min(count, int((limits.cpu - sum(node.cpu for node in newest)) / cpu))
    if limits.memory_mb:
        count = min(count, int((limits.memory_mb - sum(node.memory for node in newest)) / memory))
    return Sized(max(0, count), cpu, int(memory))


def hot_servers(samples: Sequence[UseSample], limit_cpu: float) -> dict[int, float]:
    """§8.4: server to the cores that it shall have; memory stays. Empty: none is hot."""
    demands, servers = _demands(samples), matching_servers(samples)
    if demands is None:
        return {}
    means = {
        node.id: sum(each.cpu_used for sample in servers for each in sample if each.id == node.id) / len(servers)
        for node in servers[0]
    }
    hot = [node for node in servers[0] if node.cpu > 0 and means[node.id] / node.cpu >= HOT]
    if not hot:
        return {}
    per_worker, worker_cpu, count = demands
    most = int(limit_cpu / (per_worker + worker_cpu))
    factor = max(1.0, most / count)
    for node in hot:
        factor = min(factor, NODE_MOST_CPU / means[node.id])
    wanted = {node.id: round(means[node.id] * factor, 1) for node in servers[0]}
    return {node.id: wanted[node.id] for node in servers[0] if node.cpu < wanted[node.id]}


def after_oom(memory_mb: int, group_mb: int = 0, user_mb: int = 0, most: int = 65_536) -> int:
    """§8.5, §9.4: twice as much, at most 8 GiB more, never less than its type or its user asks for."""
    grown = min(memory_mb * OOM_FACTOR, memory_mb + OOM_MOST_MORE, most)
    return max(group_mb, grown, user_mb)


def clamped(kind: NodeType, wanted: Sized, terms: ScaleTerms) -> Sized:
    """§2.2: within what a node and a type may have. 0 stays 0, except that nodes to be added have some size."""
    most = {NodeType.WORKER: terms.most_workers, NodeType.PS: terms.most_servers}.get(kind, wanted.count)
    cpu, memory = wanted.cpu, wanted.memory_mb
    if wanted.count and kind in DEFAULT_COUNTS:
        cpu, memory = cpu or DEFAULT_SIZE.cpu, memory or DEFAULT_SIZE.memory_mb
    return Sized(
        min(wanted.count, most),
        min(max(cpu, terms.smallest.cpu), terms.largest.cpu) if cpu else 0.0,
        min(max(memory, terms.smallest.memory_mb), terms.largest.memory_mb) if memory else 0,
    )


def overridden(kind: NodeType, plan: Sized, user: Sized) -> Sized:
    """§9.2: whose word counts. The user's count always does; the size of servers does where it is one."""
    count = user.count or plan.count
    if kind is NodeType.PS:
        cpu = user.cpu if user.cpu >= LEAST_VALID_CPU else plan.cpu
        memory = user.memory_mb if user.memory_mb >= LEAST_VALID_MEMORY else plan.memory_mb
        return Sized(count, cpu, memory)
    return Sized(count, plan.cpu or user.cpu, plan.memory_mb or user.memory_mb)


def first_plan(limits: Resource) -> dict[NodeType, Sized]:
    """§9.1: what a job begins with that says nothing itself."""
    if not limits.cpu or not limits.memory_mb:
        return {kind: Sized(count, DEFAULT_SIZE.cpu, DEFAULT_SIZE.memory_mb) for kind, count in DEFAULT_COUNTS.items()}
    size = create(limits)
    return {NodeType.WORKER: size, NodeType.PS: size}


def evaluator_size(evaluator: Sized, worker: Sized) -> Sized:
    """§9.1: the workers' where it has none of its own."""
    cpu = evaluator.cpu if evaluator.cpu >= LEAST_VALID_CPU else worker.cpu
    memory = evaluator.memory_mb if evaluator.memory_mb >= LEAST_VALID_MEMORY else worker.memory_mb
    return Sized(evaluator.count, cpu, memory)


def is_in_dead_band(wanted_cpu: float, current_cpu: float) -> bool:
    """§8.6: a total that is so near to the present one is not worth a change of servers."""
    return DECREASE_BAND * current_cpu < wanted_cpu < GROWTH_BAND * current_cpu


def world_size(wanted: int, alive: int, free: int, unit: int) -> int:
    """§10: as many nodes as are free, in whole units."""
    return alive + min(free - free % unit, max(0, wanted - alive))
