"""
What may hold a plan back: ten rules in order, each with its sentence. The first that holds is named.

The first six are about the job, whatever the plan is. The others are about one plan. A brake that time alone opens says when, and the job looks again then.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from dlrover.core.scaling.allreduce import LEAST_GAIN, LEAST_SAVING
from dlrover.core.scaling.facts import LONGEST_HORIZON, ScaleFacts
from dlrover.core.scaling.state import OwnChange, RefusedPlan, Scaling
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros, micros
from dlrover.protocol.messages.scaling import Brake, SizePlan

WORKERS, SERVERS, TUNING = "workers", "servers", "tuning"
COSTS_PER_PAUSE = 20
"""A change costs at most a twentieth of the time until the next one."""
MOST_PAUSE = 0.01
"""Of the last hour, for changes of our own."""
HOUR = 3600.0
QUICK_CHANGES = 3
"""Of servers. After each further one the job waits twice as long for the next: a job that still moves after so many does not converge, and each change may be wrong."""
MOST_DOUBLINGS = 8
"""With the default pause a change in 21 hours."""
FREE_CHANGES = 3
"""In an hour, whatever they cost."""
PAYS = 2
"""A change has to bring so many times what it costs."""
REFUSED_FOR = 1800.0
"""Seconds; doubled each time."""
LONGEST_REFUSAL = 10**7
REVERSAL_WINDOW = 1800.0
MOST_REVERSALS = 2


class HeldBack(NamedTuple):
    brake: Brake
    why: str
    """As a part of a sentence."""
    opens_at: Micros | None = None
    """None: time alone does not open it."""


class Promise(NamedTuple):
    """What a plan would bring, as the brakes see it."""

    plan: SizePlan
    kind: str
    direction: int
    """1: more, -1: less, 0: neither."""
    gain: float
    """Share of more speed; what a try can bring at most."""
    saving: float = 0.0
    """Share of fewer resources."""
    bound: str = ""
    """Which bound it breaks; empty: none."""
    objective: str = ""
    """Why it does not fit the objective; empty: it does."""


def of_job(scaling: Scaling, facts: ScaleFacts, kind: str) -> HeldBack | None:
    """Brakes 1 to 6."""
    now = facts.now
    if facts.off:
        return HeldBack(Brake.OFF, facts.off)
    if facts.under_way:
        return HeldBack(Brake.UNDER_WAY, facts.under_way)
    if scaling.held_until is not None and now < scaling.held_until:
        left = (scaling.held_until - now) / MICROS_PER_SECOND
        return HeldBack(
            Brake.MANUAL_HOLD, f"a person set the size; it is held for {left:.0f} s more", scaling.held_until
        )
    if scaling.probation is not None:
        return HeldBack(Brake.UNSEEN, "the last change is still being watched")
    if facts.configuration is None:
        return HeldBack(Brake.UNSEEN, facts.unseen)
    return _cool_down(scaling, facts, kind) or _pauses(scaling, facts)


def _cool_down(scaling: Scaling, facts: ScaleFacts, kind: str) -> HeldBack | None:
    last = scaling.changed_kinds.get(kind)
    if last is None:
        return None
    least = scaling.terms.server_pause if kind == SERVERS else scaling.terms.worker_pause
    if kind == SERVERS:
        least *= 2 ** min(MOST_DOUBLINGS, max(0, scaling.num_changes.get(kind, 0) - QUICK_CHANGES))
    ends_at = Micros(last + micros(max(least, COSTS_PER_PAUSE * facts.cost)))
    if facts.now >= ends_at:
        return None
    left = (ends_at - facts.now) / MICROS_PER_SECOND
    return HeldBack(Brake.COOL_DOWN, f"the last change of {kind} was made too recently; {left:.0f} s are left", ends_at)


def _pauses(scaling: Scaling, facts: ScaleFacts) -> HeldBack | None:
    pausing = [change.at for change in scaling.own_changes if change.kind != TUNING]
    recent = [at for at in pausing if at > facts.now - micros(HOUR)]
    if len(recent) < FREE_CHANGES or (len(recent) + 1) * facts.cost <= MOST_PAUSE * HOUR:
        return None
    why = (
        f"{len(recent)} changes of {facts.cost:.1f} s each in the last hour are enough: they may pause training for 1 %"
    )
    return HeldBack(Brake.PAUSES, why, Micros(recent[0] + micros(HOUR)))


def of_plan(scaling: Scaling, facts: ScaleFacts, promise: Promise) -> HeldBack | None:
    """Brakes 7 to 10."""
    if promise.bound:
        return HeldBack(Brake.BOUND, promise.bound)
    if promise.objective:
        return HeldBack(Brake.SMALL_GAIN, promise.objective)
    if promise.gain < LEAST_GAIN and promise.saving < LEAST_SAVING:
        why = f"it promises {promise.gain:+.1%} speed and {promise.saving:.0%} fewer resources, which is too little"
        return HeldBack(Brake.SMALL_GAIN, why)
    return _cost(scaling, facts, promise) or _taken_back(scaling, facts, promise)


def _cost(scaling: Scaling, facts: ScaleFacts, promise: Promise) -> HeldBack | None:
    gain = max(promise.gain, promise.saving)
    if gain * facts.horizon > PAYS * facts.cost:
        return None
    needed = PAYS * facts.cost / gain
    why = f"a pause of {facts.cost:.1f} s pays after {needed:.0f} s, and {facts.horizon:.0f} s count"
    since = scaling.changed_at
    opens_at = None if since is None or needed > LONGEST_HORIZON else Micros(since + micros(needed) + 1)
    return HeldBack(Brake.COST, why, opens_at if opens_at is not None and opens_at > facts.now else None)


def _taken_back(scaling: Scaling, facts: ScaleFacts, promise: Promise) -> HeldBack | None:
    refused = refusal_of(scaling, promise.plan)
    if refused is not None and facts.now < refused.until:
        left = (refused.until - facts.now) / MICROS_PER_SECOND / 60
        often = "once" if refused.times == 1 else f"{refused.times} times"
        why = f"it was taken back {often}; it is not tried again for {left:.0f} min"
        return HeldBack(Brake.TAKEN_BACK, why, refused.until)
    opens_at = reversals_allow_at(scaling.own_changes, promise.kind, promise.direction, facts.now)
    if opens_at > facts.now:
        left = (opens_at - facts.now) / MICROS_PER_SECOND / 60
        why = f"the last change was taken back: the direction changes again in {left:.0f} min at the earliest"
        return HeldBack(Brake.TAKEN_BACK, why, opens_at)
    return None


def refusal_of(scaling: Scaling, plan: SizePlan) -> RefusedPlan | None:
    return next((refused for refused in scaling.refused if refused.plan == plan), None)


def refuse(scaling: Scaling, plan: SizePlan, nodes: int, now: Micros) -> None:
    """The plan did not pay."""
    former = refusal_of(scaling, plan)
    times = 1 if former is None else former.times + 1
    seconds = min(LONGEST_REFUSAL, REFUSED_FOR * 2 ** min(times - 1, 20))
    others = [each for each in scaling.refused if each.plan != plan]
    scaling.refused = [*others, RefusedPlan(plan=plan, nodes=nodes, until=Micros(now + micros(seconds)), times=times)][
        -32:
    ]


def reversals_allow_at(changes: list[OwnChange], kind: str, direction: int, now: Micros) -> Micros:
    """
    From when on a change in this direction may be made and taken back at once without a third reversal within the window.

    Both count in advance, because a change that does not pay must be taken back in any case.
    """
    past = [(change.at, change.direction) for change in changes if change.kind == kind and change.direction]
    if not direction or not past:
        return now
    reversals = [at for (_, former), (at, later) in itertools.pairwise(past) if former != later]
    ahead = 1 + (past[-1][1] != direction)
    recent = [at for at in reversals if at > now - micros(REVERSAL_WINDOW)]
    num_too_many = len(recent) + ahead - MOST_REVERSALS
    return now if num_too_many <= 0 else Micros(recent[num_too_many - 1] + micros(REVERSAL_WINDOW))
