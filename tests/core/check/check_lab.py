"""
A model of what the members of a check group see, for tests of the node check without processes.

A bad node makes the collective of its whole group fail; whether it also fails alone depends on the kind of its fault. A
slow node slows its whole group.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Callable

import msgspec

from dlrover.core.check.cycle import CheckCycle, CheckVerdict, Next
from dlrover.core.check.evidence import ExitClass
from dlrover.core.check.pairing import Groups
from dlrover.protocol.messages.job import NodeRank, Round

QUICK_MS = 5_000.0
SLOW_MS = 15_000.0
MOST_STEPS = 64


class Fault(enum.Enum):
    NETWORK = enum.auto()
    """Fails with any partner, passes alone."""
    DEVICE = enum.auto()
    """Fails with any partner and alone; its computation passes."""
    COMPUTE = enum.auto()
    """Its computation fails; partners see a failed collective."""
    DEATH = enum.auto()
    """Dies in its first run."""


@dataclasses.dataclass
class Layout:
    """Which nodes are bad or slow."""

    num_nodes: int
    faults: dict[int, Fault] = dataclasses.field(default_factory=dict)
    slow: set[int] = dataclasses.field(default_factory=set)
    broken_links: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    scheduling: Callable[[int], str | None] = lambda rank: None

    def members(self) -> dict[NodeRank, str | None]:
        return {NodeRank(rank): self.scheduling(rank) for rank in range(self.num_nodes)}

    def result(self, rank: int, group: tuple[NodeRank, ...]) -> ExitClass:
        own = self.faults.get(rank)
        if own is Fault.COMPUTE:
            return ExitClass.COMPUTE
        if len(group) == 1:
            return ExitClass.COMMUNICATION if own is Fault.DEVICE else ExitClass.OK
        has_bad_link = bool(self.broken_links) and any((a, b) in self.broken_links for a in group for b in group)
        is_bad = has_bad_link or any(member in self.faults for member in group)
        return ExitClass.COMMUNICATION if is_bad else ExitClass.OK

    def time_ms(self, rank: int, group: tuple[NodeRank, ...]) -> float:
        base = SLOW_MS if any(member in self.slow for member in group) else QUICK_MS
        return base + rank % 7 * 10

    def run_phase(self, cycle: CheckCycle) -> None:
        for group in cycle.groups:
            for rank in group:
                if rank in cycle.gone or rank not in cycle.waiting:
                    continue
                if self.faults.get(rank) is Fault.DEATH:
                    cycle.lose(rank)
                else:
                    cycle.report(rank, cycle.round, self.time_ms(rank, group), self.result(rank, group))

    def run(self, cycle: CheckCycle | None = None) -> CheckVerdict:
        cycle = cycle or CheckCycle.begin(self.members(), first_round=Round(1))
        return drive(cycle, lambda: self.run_phase(cycle))


def drive(cycle: CheckCycle, run_phase: Callable[[], None]) -> CheckVerdict:
    """To the verdict, through an encoding after each phase, as a master restart would do it."""
    for _ in range(MOST_STEPS):
        check_groups(cycle.groups, set(cycle.members) - set(cycle.gone))
        run_phase()
        assert cycle.is_phase_complete()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(cycle), type=CheckCycle) == cycle
        foreseen = cycle.verdict()
        assert cycle.verdict() == foreseen
        step = cycle.go_on()
        assert step == foreseen
        assert "node status" in step.node_status
        assert "elapsed" in step.elapsed
        assert step.sentence.endswith(".")
        if isinstance(step, CheckVerdict):
            return step
        assert isinstance(step, Next)
    raise AssertionError("the check never ends")


def check_groups(groups: Groups, present: set[NodeRank]) -> None:
    """Nobody is left out, nobody is in two groups."""
    seen = [rank for group in groups for rank in group]
    assert sorted(seen) == sorted(present)
    assert all(groups)


def random_layout(seed: int, *, num_nodes: int | None = None, most_bad: float = 0.4) -> Layout:
    """Faults of all kinds, clustered or scattered, and a few slow nodes."""
    chance = random.Random(seed)
    num_nodes = num_nodes or chance.choice([chance.randint(2, 12), chance.randint(2, 64), chance.randint(65, 257)])
    num_bad = chance.choice([0, 1, 1, 2, 3, int(chance.random() * most_bad * num_nodes)])
    num_bad = min(num_bad, max(1, int(most_bad * num_nodes)), num_nodes - 1)
    if chance.random() < 0.3:
        start = chance.randrange(num_nodes)
        bad = [(start + offset) % num_nodes for offset in range(num_bad)]
    elif chance.random() < 0.2:
        bad = list(range(1, num_nodes, 2))[:num_bad]
    else:
        bad = chance.sample(range(num_nodes), num_bad)
    kinds = [Fault.DEVICE, Fault.COMPUTE, Fault.DEATH] if num_nodes <= 3 else list(Fault)
    faults = {rank: chance.choice(kinds) for rank in bad}
    healthy = [rank for rank in range(num_nodes) if rank not in faults]
    num_slow = chance.choice([0, 0, 1, 2, len(healthy) // 6])
    slow = set(chance.sample(healthy, min(num_slow, len(healthy) // 4)))
    return Layout(num_nodes, faults, slow)
