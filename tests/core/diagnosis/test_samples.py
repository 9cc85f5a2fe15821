"""Samples against a list of all that came: bounded in age, in size and in kinds, whatever comes in whichever order."""

from __future__ import annotations

import random

import pytest

from dlrover.core.diagnosis.samples import LIFE, MAX_KINDS, Samples
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId
from dlrover.protocol.messages.watch import SampleTaken


def size_of(taken: SampleTaken) -> int:
    return 1 + len(taken.numbers) + len(taken.text) // 80


class Oracle:
    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        self.kept: list[tuple[int, SampleTaken]] = []

    def expire(self, now: int) -> None:
        self.kept = [(at, taken) for at, taken in self.kept if at > now - LIFE * 1e6]

    def add(self, taken: SampleTaken, now: int) -> None:
        self.expire(now)
        kinds = {each.kind for _, each in self.kept}
        if taken.kind not in kinds and len(kinds) >= MAX_KINDS:
            return
        self.kept.append((now, taken))
        while len(self.kept) > 1 and sum(size_of(each) for _, each in self.kept) > self.max_size:
            del self.kept[0]


def told(samples: Samples) -> list[tuple[int, SampleTaken]]:
    return [(sample.at, sample.taken) for sample in samples]


@pytest.mark.parametrize("seed", range(12))
def test_samples_are_those_that_are_young_and_fit(seed: int) -> None:
    chance = random.Random(seed)
    max_size, num_kinds = chance.choice([(5, 3), (40, 3), (400, MAX_KINDS + 5), (100_000, MAX_KINDS + 5)])
    samples, oracle, now = Samples(max_size=max_size), Oracle(max_size), 1_000_000
    for _ in range(300):
        now += chance.choice([0, 1, 1_000_000, 7_000_000, 299_999_999, 300_000_000] if chance.random() < 0.3 else [0])
        taken = SampleTaken(
            node=NodeId(chance.randrange(3)),
            incarnation=Incarnation(1),
            kind=f"kind {chance.randrange(num_kinds)}",
            numbers={str(number): 1.0 for number in range(chance.randrange(4))},
            text="x" * chance.choice([0, 79, 80, 81, 160, 200]),
        )
        samples.add(taken, Micros(now))
        oracle.add(taken, now)
        assert told(samples) == oracle.kept
        assert len(samples) == len(oracle.kept)
        newest = {(each.node, each.kind): (at, each) for at, each in oracle.kept}
        assert [(sample.at, sample.taken) for sample in samples.newest()] == list(newest.values())
        for kind in (taken.kind, "unknown"):
            expected = [(at, each) for at, each in oracle.kept if each.kind == kind]
            assert [(sample.at, sample.taken) for sample in samples.of_kind(kind)] == expected
    later = Micros(now + round(LIFE * 1e6) - 1)
    samples.expire(later)
    oracle.expire(later)
    assert told(samples) == oracle.kept
    samples.expire(Micros(later + 1))
    assert not len(samples)
    samples.add(taken, Micros(later + 1))
    assert len(samples) == 1
