"""
Which of the survivors of a node saves the last step.

A step that one worker has finished was computed from the gradients of all, so the newest finished step is the truth, and a worker that has it may save
it for the others. Of a state that is cut into pieces each survivor saves its own, and replicas stand in for each other. Survivors can be
apart by one step: a collective may succeed for one of them and fail for another. A survivor that has all gradients of the next step
can still finish it. The newest step of which all pieces exist, or can be finished, is the one. Everything else is a doubt, and with a doubt the job
goes back to its newest snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

LIMIT = 2.0
"""Seconds for survivors to say what they have, and again for one of them to save it."""


class Offer(Struct, frozen=True):
    """What one survivor says."""

    local_rank: int
    step: int
    digest: int
    """Of everything that would be saved."""
    piece: int | None = None
    """Which piece of the state this survivor has; equal for replicas. None: it has the whole state."""
    can_finish: bool = False
    """It has all gradients of the next step, and has not changed anything with them."""


class Plan(Struct, frozen=True):
    step: int
    holders: tuple[int, ...]
    """Local ranks that have it, in the order in which they are asked to save it; empty: no rank saves."""
    doubt: str = ""
    is_cut: bool = False
    """Each of them saves its own piece. Else the first one saves for all."""
    finishers: tuple[int, ...] = ()
    """Local ranks that have to finish this step before any worker saves it: then there are no holders and no doubt yet."""


def plan_breath(offers: Sequence[Offer], num_silent: int) -> Plan:
    """`num_silent` survivors have refused or not answered in time."""
    if not offers:
        return Plan(-1, (), "no survivor has a whole step")
    newest = max(offer.step for offer in offers)
    oldest = min(offer.step for offer in offers)
    if num_silent:
        return Plan(newest, (), f"{num_silent} of the survivors did not answer")
    if newest - oldest > 1:
        return Plan(newest, (), f"survivors are at steps {oldest} to {newest}")
    offers = sorted(offers, key=lambda offer: (-offer.step, offer.local_rank))
    digests: dict[tuple[int, int | None], int] = {}
    for offer in offers:
        if digests.setdefault((offer.step, offer.piece), offer.digest) != offer.digest:
            return Plan(newest, (), f"survivors have different states of step {offer.step}")
    pieces = {offer.piece for offer in offers}
    for step in (oldest + 1, oldest):
        holders = [offer for offer in offers if offer.step == step]
        finishers = [offer for offer in offers if offer.step == step - 1 and offer.can_finish]
        if {offer.piece for offer in holders} == pieces:
            return Plan(step, _ranks(holders), is_cut=pieces != {None})
        if {offer.piece for offer in (*holders, *finishers)} == pieces:
            return Plan(step, (), finishers=_ranks(finishers))
    return Plan(newest, (), f"a piece of step {newest} is missing")


def _ranks(offers: Sequence[Offer]) -> tuple[int, ...]:
    return tuple(sorted(offer.local_rank for offer in offers))
