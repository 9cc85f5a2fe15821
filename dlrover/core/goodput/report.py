"""
What the goodput accountant answers: seconds by class, by place and by fault, and what other choices would have saved.
"""

from __future__ import annotations

from dlrover.core.goodput.accountant import LOST, BookedFault, Goodput, is_beginning
from dlrover.core.happenings import STOPPED
from dlrover.core.state import JobState
from dlrover.protocol.messages.goodput import (
    Counterfactual,
    FaultCost,
    FaultTold,
    GoodputStatus,
    NodeGoodput,
    TimeClass,
)
from dlrover.protocol.messages.identity import MICROS_PER_SECOND
from dlrover.protocol.messages.job import ExitReason, Micros, Round

STANDBY_RECOVERY = 3.0
"""Seconds in which a job with a warm standby goes on after the loss of a node: what we promise, not the best we measured."""


def goodput_status(state: JobState, now: Micros) -> GoodputStatus:
    goodput = state.goodput
    nodes = []
    whole: dict[TimeClass, int] = {}
    booked: dict[TimeClass, int] = {}
    for rank, place in sorted(goodput.places.items()):
        totals = goodput.totals(place, now)
        for class_, micros in totals.items():
            whole[class_] = whole.get(class_, 0) + micros
        for class_, micros in goodput.booked(place, now).items():
            booked[class_] = booked.get(class_, 0) + micros
        doing = None if place.opened_at is None else place.doing or TimeClass.COMPUTE
        nodes.append(
            NodeGoodput(
                node_rank=rank,
                node=place.node,
                seconds=_seconds(totals),
                lived=goodput.lived(place, now) / MICROS_PER_SECOND,
                doing=doing,
            )
        )
    compute = whole.get(TimeClass.COMPUTE, 0)
    busy = sum(whole.values()) - whole.get(TimeClass.IDLE, 0)
    beginning = _beginning(goodput, now)
    return GoodputStatus(
        now=now,
        wall=0.0 if goodput.began_at is None else (now - goodput.began_at) / MICROS_PER_SECOND,
        seconds=_seconds(whole),
        beginning=_seconds(beginning),
        goodput=compute / busy if busy else 0.0,
        goodput_since_start=compute / later if (later := busy - sum(beginning.values())) > 0 else 0.0,
        highest_step=goodput.highest_step,
        nodes=tuple(nodes),
        faults=tuple(_cost(fault) for fault in _up_to(goodput, now) if not _is_end(state, fault[0])),
        num_faults=goodput.num_faults - sum(_is_end(state, fault) for fault in goodput.faults),
        counterfactuals=_counterfactuals(state, whole),
        booked=_seconds(booked),
        is_redo_known=goodput.is_redo_known,
    )


def fault_of(state: JobState, round_: Round) -> FaultTold:
    """What ended this round. A better first failure may still be reported."""
    fault = next((fault for fault in reversed(state.goodput.faults) if fault.round == round_), None)
    if fault is None:
        return FaultTold()
    # Of a lost node the neighbours told first: their failures are its consequences.
    rank = None if fault.kind == "node" else fault.global_rank
    return FaultTold(kind=fault.kind, cause=fault.cause, node_rank=fault.node_rank, global_rank=rank)


def _is_end(state: JobState, fault: BookedFault) -> bool:
    """The first of the nodes that were stopped to end the job: nothing that it had to recover from."""
    is_over = state.end is not None and state.end.reason is ExitReason.STOPPED_BY_USER
    return is_over and fault.kind == STOPPED and fault.running_at is None


def _beginning(goodput: Goodput, now: Micros) -> dict[TimeClass, int]:
    """With what is lost right now and owed to no fault."""
    beginning = dict(goodput.beginning)
    for place in goodput.places.values():
        if place.opened_at is not None and place.doing in LOST and not place.fault and is_beginning(place):
            beginning[place.doing] = beginning.get(place.doing, 0) + now - place.since
    return beginning


def _up_to(goodput: Goodput, now: Micros) -> list[tuple[BookedFault, dict[TimeClass, int]]]:
    """The faults, each with what it costs right now."""
    costs = {fault.number: dict(fault.micros) for fault in goodput.faults}
    for place in goodput.places.values():
        if place.opened_at is not None and place.doing in LOST and (cost := costs.get(place.fault)) is not None:
            cost[place.doing] = cost.get(place.doing, 0) + now - place.since
    return [(fault, costs[fault.number]) for fault in goodput.faults]


def _cost(known: tuple[BookedFault, dict[TimeClass, int]]) -> FaultCost:
    fault, micros = known
    return FaultCost(
        number=fault.number,
        at=fault.at,
        kind=fault.kind,
        cause=fault.cause,
        round=fault.round,
        node_rank=fault.node_rank,
        global_rank=fault.global_rank,
        seconds=_seconds(micros),
        stood_still=None if fault.running_at is None else (fault.running_at - fault.at) / MICROS_PER_SECOND,
        recovered_after=None if fault.recovered_at is None else (fault.recovered_at - fault.at) / MICROS_PER_SECOND,
        is_redo_known=fault.is_redo_known,
    )


def _counterfactuals(state: JobState, whole: dict[TimeClass, int]) -> tuple[Counterfactual, ...]:
    """Only what would have saved anything, the greatest first."""
    found = []
    if (seconds := _saved_by_standby(state)) > 0:
        found.append(
            Counterfactual(
                choice="standby",
                seconds=seconds,
                text=f"A warm standby node (--standby 1) would have saved about {seconds:.1f} node-seconds after lost nodes.",
            )
        )
    for class_, choice, text in _CHOICES:
        if class_ is TimeClass.REDO and not state.goodput.is_redo_known:
            continue  # what is booked is a part of it: advice by a part could be wrong
        if seconds := whole.get(class_, 0) / MICROS_PER_SECOND:
            found.append(Counterfactual(choice=choice, seconds=seconds, text=text.format(seconds=seconds)))
    return tuple(sorted(found, key=lambda each: -each.seconds))


_CHOICES = (
    (
        TimeClass.REDO,
        "save-every-step",
        "Saving to memory after every step would have saved {seconds:.1f} node-seconds of repeated steps.",
    ),
    (
        TimeClass.CHECKPOINT,
        "free-checkpoints",
        "Saves that do not block training (lazy saves, fewer storage saves) would have saved up to {seconds:.1f} node-seconds.",
    ),
    (
        TimeClass.DATA_WAIT,
        "faster-data",
        "Data that is there in time (more loader processes, prefetching) would have saved up to {seconds:.1f} node-seconds.",
    ),
    (
        TimeClass.STRAGGLER_WAIT,
        "no-stragglers",
        "Nodes of equal speed would have saved up to {seconds:.1f} node-seconds of waiting for the slowest.",
    ),
    (TimeClass.HANG, "no-hangs", "Without hangs the job would have saved {seconds:.1f} node-seconds."),
)


def _saved_by_standby(state: JobState) -> float:
    """For each lost node: what all places lost beyond the time that the promise for a standby allows."""
    if state.terms is not None and state.terms.standby:
        return 0.0
    saved = 0.0
    for fault in state.goodput.faults:
        if fault.kind != "node":
            continue
        waits = (TimeClass.DOWN, TimeClass.RENDEZVOUS, TimeClass.STOPPING)
        lost = sum(fault.micros.get(class_, 0) for class_ in waits) / MICROS_PER_SECOND
        num_places = sum(1 for place in state.goodput.places.values() if place.opened_at is not None) or 1
        saved += max(0.0, lost - STANDBY_RECOVERY * num_places)
    return saved


def _seconds(micros: dict[TimeClass, int]) -> dict[TimeClass, float]:
    return {class_: micros[class_] / MICROS_PER_SECOND for class_ in TimeClass if micros.get(class_)}
