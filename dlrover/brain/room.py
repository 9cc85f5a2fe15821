"""
How a cluster's room is divided between the jobs of one tenant that ask for their share.

Room comes from the setting `cluster.room.nodes`, or from what a monitor told of the cluster. Without either Brain limits no job. Shares are advice, kept in memory alone: a job asks each minute,
and one that has not asked for five minutes has no share any more.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrover.brain.sanity import sane_points
from dlrover.core.scaling.history.allotting import CurvePoint, JobCurve, allot
from dlrover.protocol.messages.brain import Allowance, AllowanceAsked, MachinesSeen
from dlrover.protocol.messages.fleet import Resource
from dlrover.protocol.messages.scaling import SpeedPoint

ROOM_KEY = "cluster.room.nodes"
"""Setting: nodes that the jobs of a tenant may have together in a cluster."""
LASTS = 300.0
MOST_SIZES = 64
"""Sizes of one job that are compared."""
UNKNOWN_SECONDS = 3600.0
"""For which a job is taken to last at its minimum if it does not say."""
MOST_JOBS = 4096


@dataclass(frozen=True)
class _RoomWish:
    asked: AllowanceAsked
    at: float
    first_at: float


class Rooms:
    """Of all clusters. For one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._wishes: dict[tuple[str, str], dict[str, _RoomWish]] = {}

    def share(self, tenant: str, cluster: str, asked: AllowanceAsked, room: int | None) -> Allowance:
        """What the asking job may have now. `room` None: nothing limits it."""
        wishes = self._renewed(tenant, cluster, asked)
        if room is None:
            return Allowance(sentence="Brain does not know how many nodes this cluster has room for.")
        ordered = sorted(wishes.values(), key=lambda wish: (wish.first_at, wish.asked.job.uid))[:MOST_JOBS]
        shares = divide([wish.asked for wish in ordered], room)
        index = next(at for at, wish in enumerate(ordered) if wish.asked.job.uid == asked.job.uid)
        nodes, sentence = shares[index]
        return Allowance(nodes=nodes, lasts=LASTS, sentence=sentence[:1024])

    def free_room(
        self, tenant: str, cluster: str, asked: AllowanceAsked, machines: MachinesSeen, node: Resource
    ) -> int:
        """The nodes that the jobs have, and those that still fit into what is unclaimed."""
        has = sum(wish.asked.nodes for wish in self._renewed(tenant, cluster, asked).values())
        pairs = (
            (machines.cpu - machines.claimed_cpu, node.cpu),
            (machines.memory_mb - machines.claimed_memory_mb, float(node.memory_mb)),
            (float(machines.gpus - machines.claimed_gpus), float(node.gpus)),
        )
        fits = [max(0, math.floor(free / need)) for free, need in pairs if need > 0]
        return has + min(fits, default=machines.count)

    def forget(self, tenant: str, uid: str) -> None:
        """The job is over."""
        for (owner, _), wishes in self._wishes.items():
            if owner == tenant:
                wishes.pop(uid, None)

    def _renewed(self, tenant: str, cluster: str, asked: AllowanceAsked) -> dict[str, _RoomWish]:
        now = self._clock()
        known = self._wishes.get((tenant, cluster), {})
        wishes = {uid: wish for uid, wish in known.items() if now - wish.at <= LASTS}
        former = wishes.get(asked.job.uid)
        wishes[asked.job.uid] = _RoomWish(asked, now, now if former is None else former.first_at)
        self._wishes[tenant, cluster] = wishes
        return wishes


def divide(jobs: Sequence[AllowanceAsked], room: int) -> list[tuple[int, str]]:
    """Nodes and a sentence for each job. What no job gains from goes round, because free room helps no job."""
    shares = allot([_curve(job) for job in jobs], room)
    nodes, sentences = [each.units for each in shares], [each.sentence for each in shares]
    free = room - sum(nodes)
    is_moving = True
    while free > 0 and is_moving:
        is_moving = False
        for index in sorted(range(len(jobs)), key=lambda at: nodes[at]):
            step = _unit(jobs[index])
            if nodes[index] and nodes[index] + step <= jobs[index].max_nodes and step <= free:
                nodes[index], free, is_moving = nodes[index] + step, free - step, True
                sentences[index] = f"{nodes[index]} of {room} nodes: no other job would gain more from them."
    return list(zip(nodes, sentences, strict=True))


def _curve(job: AllowanceAsked) -> JobCurve:
    points = sane_points(job)
    unit = _unit(job)
    least = -(-job.min_nodes // unit) * unit
    most = max(least, job.max_nodes // unit * unit)
    step = unit * max(1, -(-(most - least) // (unit * MOST_SIZES)))
    now = job.nodes // unit * unit  # a share has whole units, also of a job that lost a node just now
    if not points:
        return JobCurve(uid=job.job.uid, points=(CurvePoint(least, 0.0),), work=0.0, now=now)
    sizes = [*range(least, most + 1, step)]
    curve = tuple(CurvePoint(nodes, _speed(points, nodes)) for nodes in sizes)
    work = job.remaining or UNKNOWN_SECONDS * curve[0].speed
    return JobCurve(uid=job.job.uid, points=curve, work=work, now=now, cost=job.change_cost)


def _speed(points: Sequence[SpeedPoint], nodes: int) -> float:
    """Between two told points a straight line; below the first in proportion, beyond the last no more than that."""
    if nodes <= points[0].nodes:
        return points[0].speed * nodes / points[0].nodes
    for low, high in itertools.pairwise(points):
        if nodes <= high.nodes:
            share = (nodes - low.nodes) / (high.nodes - low.nodes)
            return low.speed + share * (high.speed - low.speed)
    return points[-1].speed


def _unit(job: AllowanceAsked) -> int:
    return job.node_unit if job.node_unit <= job.max_nodes else 1
