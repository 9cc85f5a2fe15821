"""
Which of the survivors of a node saves the last step.

A step that one worker has finished was computed from the gradients of all, so the newest finished step is the truth, and whoever has it may save it
for the others. Of a state that is cut into pieces each survivor saves its own, and replicas stand in for each other; the newest step of which all pieces are there is the one. Survivors can be apart by one step: a collective may end well for one of them and fail for another. Everything else is a doubt, and with
a doubt the job goes back to its newest snapshot.
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


class Plan(Struct, frozen=True):
    step: int
    holders: tuple[int, ...]
    """Local ranks that have it, in the order in which they are asked to save it; empty: nobody saves."""
    doubt: str = ""
    is_cut: bool = False
    """Each of them saves its own piece. Else the first one saves for all."""


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
    digests: dict[tuple[int, int | None], int] = {}
    for offer in sorted(offers, key=lambda offer: (-offer.step, offer.local_rank)):
        if digests.setdefault((offer.step, offer.piece), offer.digest) != offer.digest:
            return Plan(newest, (), f"survivors have different states of step {offer.step}")
    pieces = {offer.piece for offer in offers}
    for step in dict.fromkeys((newest, oldest)):
        if all((step, piece) in digests for piece in pieces):
            holders = sorted(offer.local_rank for offer in offers if offer.step == step)
            return Plan(step, tuple(holders), is_cut=pieces != {None})
    return Plan(newest, (), f"a piece of step {newest} is missing")
