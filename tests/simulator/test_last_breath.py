"""
A last breath at each point of a loss, by trying all of them: every survivor may be a step behind, have another state, refuse, stay silent, or die before its
offer, after it or while it saves. Nodes decide alone; a restart takes the newest step that all nodes have under one name, else the snapshot.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from dlrover.agreed.last_breath import Offer, Plan, plan_breath

SNAPSHOT, OLDER, NEWEST = 50, 56, 57
RIGHT, WRONG = 1, 2


class Conduct(enum.Enum):
    GOOD = enum.auto()
    DIES_AT_THE_ORDER = enum.auto()
    DIES_AFTER_ITS_OFFER = enum.auto()
    DIES_WHILE_IT_SAVES = enum.auto()
    REFUSES = enum.auto()
    SILENT = enum.auto()


class Mind(NamedTuple):
    """One survivor: what it has and what becomes of it."""

    step: int
    digest: int
    conduct: Conduct


Saved = tuple[int, int] | None
Decide = Callable[[Sequence[Offer], int], Plan]
MINDS = [Mind(*each) for each in itertools.product((OLDER, NEWEST), (RIGHT, WRONG), Conduct)]
GONE = (Conduct.DIES_AT_THE_ORDER, Conduct.DIES_AFTER_ITS_OFFER)
MUTE = (Conduct.REFUSES, Conduct.SILENT)


def breathe(node: Sequence[Mind], decide: Decide) -> Saved:
    """What a node has in memory afterwards: as `dlrover.agent.workers.last_breath` does it, without time."""
    offers = [
        Offer(rank, mind.step, mind.digest) for rank, mind in enumerate(node) if mind.conduct not in (*GONE, *MUTE)
    ]
    plan = decide(offers, sum(mind.conduct in MUTE for mind in node))
    for rank in plan.holders:
        if node[rank].conduct is not Conduct.DIES_WHILE_IT_SAVES:
            return node[rank].step, node[rank].digest
    return None


def restore(nodes: Sequence[Sequence[Mind]], decide: Decide) -> tuple[int, int]:
    saved = {breathe(node, decide) for node in nodes}
    [only] = saved if len(saved) == 1 else [None]
    return only or (SNAPSHOT, RIGHT)


def broken_rules(nodes: Sequence[Sequence[Mind]], decide: Decide) -> list[str]:
    """What must never be; empty: all is well."""
    step, digest = restore(nodes, decide)
    living = [mind for node in nodes for mind in node if mind.conduct not in GONE]
    told = [mind for mind in living if mind.conduct not in MUTE]
    found = []
    if step != SNAPSHOT:
        if any(mind.conduct in MUTE for mind in living):
            found.append("a survivor that did not agree was passed over")
        if any((mind.step, mind.digest) == (step, WRONG if digest == RIGHT else RIGHT) for mind in told):
            found.append("ranks went on with a state that another rank contradicts")
        if any(mind.step > step for mind in told):
            found.append("a newer step was given up")
    can_save = [mind for mind in told if mind.conduct is Conduct.GOOD and mind.step == NEWEST]
    is_clear = len(nodes) == 1 and bool(can_save) and all(mind.digest == RIGHT for mind in living)
    if is_clear and len(told) == len(living) and step != NEWEST:
        found.append("a step was lost without a doubt")
    return found


def jobs() -> list[list[tuple[Mind, ...]]]:
    alone = [[node] for size in (1, 2, 3) for node in itertools.product(MINDS, repeat=size)]
    pairs = [
        [first, second]
        for first in itertools.product(MINDS, repeat=2)
        for second in itertools.product(
            [mind for mind in MINDS if mind.conduct in (Conduct.GOOD, Conduct.SILENT)], repeat=1
        )
    ]
    return alone + pairs


def test_no_loss_at_any_point_breaks_a_rule() -> None:
    wrong = [(nodes, rules) for nodes in jobs() if (rules := broken_rules(nodes, plan_breath))]
    assert wrong == []


def _without_digests(offers: Sequence[Offer], num_silent: int) -> Plan:
    return plan_breath([Offer(offer.local_rank, offer.step, 0) for offer in offers], num_silent)


def _without_silence(offers: Sequence[Offer], _num_silent: int) -> Plan:
    return plan_breath(offers, 0)


def _oldest(offers: Sequence[Offer], num_silent: int) -> Plan:
    plan = plan_breath(offers, num_silent)
    oldest = min((offer.step for offer in offers), default=-1)
    holders = tuple(offer.local_rank for offer in offers if offer.step == oldest)
    return Plan(oldest, holders) if plan.holders else plan


def _anybody(offers: Sequence[Offer], num_silent: int) -> Plan:
    plan = plan_breath(offers, num_silent)
    return Plan(plan.step, tuple(offer.local_rank for offer in offers)) if plan.holders else plan


def _first_only(offers: Sequence[Offer], num_silent: int) -> Plan:
    plan = plan_breath(offers, num_silent)
    return Plan(plan.step, plan.holders[:1], plan.doubt)


def _never(offers: Sequence[Offer], num_silent: int) -> Plan:
    return Plan(-1, (), "never")


@pytest.mark.parametrize("mutant", [_without_digests, _without_silence, _oldest, _anybody, _first_only, _never])
def test_every_mutation_of_the_decision_is_noticed(mutant: Decide) -> None:
    assert any(broken_rules(nodes, mutant) for nodes in jobs())
