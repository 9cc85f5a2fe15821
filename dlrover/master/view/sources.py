"""What others than the job itself have to show: each is asked at every look, and puts its part on the board."""

from __future__ import annotations

import hashlib

import msgspec

from dlrover.master.view.gatherer import Gatherer
from dlrover.protocol.messages.goodput import AskEvents, AskGoodput, Events, GoodputStatus
from dlrover.protocol.messages.job import JobStatus
from dlrover.protocol.messages.scaling import AskScaling, ScaleOutcome, ScalingStatus
from dlrover.protocol.messages.watch import AskDiagnosis, Culprit, Diagnosis, PastVerdict

MAX_DATASETS = 64
NUM_EVENTS = 400
"""On the timeline; the page drops older ones by the same number."""
MAX_SAVINGS = 8
MAX_VERDICTS = 30
MAX_EVIDENCE = 20
MAX_SENTENCE = 500
MAX_NAME = 100
MAX_AUTOPSY = 64 * 1024


async def gather_data(gatherer: Gatherer) -> None:
    status = gatherer.status
    assert isinstance(status, JobStatus), "asked before the first look"
    sets = status.datasets[:MAX_DATASETS]
    for each in sets:
        gatherer.board.put(
            "data",
            each.spec.name,
            {
                "name": each.spec.name,
                "epoch": each.epoch,
                "todo": each.num_todo,
                "doing": each.num_doing,
                "consumed": each.num_consumed,
                "committed": each.num_committed,
                "total": each.num_total,
                "share": each.num_consumed / each.num_total if each.num_total > 0 else None,
                "set_aside": each.num_set_aside,
                "speed": float(f"{each.speed:.3g}"),
                "remaining": None if each.remaining is None else round(each.remaining),
                "is_complete": each.is_complete,
            },
        )
    gatherer.board.keep("data", {each.spec.name for each in sets})


async def gather_events(gatherer: Gatherer) -> None:
    """Only new ones are asked for; from a flood the newest are shown."""
    board, known = gatherer.board, gatherer.newest_event
    found = await gatherer.ask(AskEvents(after=known, limit=NUM_EVENTS))
    assert isinstance(found, Events), f"asked for events the master answered {type(found).__name__}"
    if known and found.newest > known + NUM_EVENTS:
        found = await gatherer.ask(AskEvents(limit=NUM_EVENTS))
        assert isinstance(found, Events), "as before"
    for each in found.events:
        gatherer.newest_event = each.number
        board.put(
            "timeline",
            str(each.number),
            {
                "number": each.number,
                "at": each.at,
                "level": each.level,
                "name": each.name[:MAX_NAME],
                "text": each.text[:MAX_SENTENCE],
                "node": each.node,
                "rank": each.rank,
            },
        )
    kept = {str(number) for number in range(gatherer.newest_event - NUM_EVENTS + 1, gatherer.newest_event + 1)}
    board.keep("timeline", kept, is_told=False)


async def gather_goodput(gatherer: Gatherer) -> None:
    found = await gatherer.ask(AskGoodput())
    assert isinstance(found, GoodputStatus), f"asked for goodput the master answered {type(found).__name__}"
    gatherer.goodput = found
    if not found.wall:
        return
    gatherer.board.put(
        "goodput",
        "",
        {
            "share": round(found.goodput, 4),
            "since_start": None if found.highest_step is None else round(found.goodput_since_start, 4),
            "seconds": {each.value: round(seconds, 1) for each, seconds in found.seconds.items()},
            "num_faults": found.num_faults,
            "is_redo_known": found.is_redo_known,
            "counterfactuals": [each.text[:MAX_SENTENCE] for each in found.counterfactuals[:MAX_SAVINGS]],
        },
    )


async def gather_scaling(gatherer: Gatherer) -> None:
    status = gatherer.status
    if status is None or not status.fleet:
        return  # people start the nodes: there is nothing to scale
    found = await gatherer.ask(AskScaling())
    assert isinstance(found, ScalingStatus), f"asked for its size the master answered {type(found).__name__}"
    gatherer.scaling = found
    gatherer.board.put(
        "scaling",
        "",
        {
            "mode": found.mode.value,
            "sentence": found.sentence[:MAX_SENTENCE],
            "brake": found.brake.value,
            "target": found.target,
            "unit": found.unit,
            "speed": float(f"{found.speed:.4g}"),
            "fit_error": None if found.fit is None else round(found.fit.error, 4),
            "points": [
                {"nodes": each.nodes, "speed": float(f"{each.speed:.4g}"), "is_predicted": each.is_predicted}
                for each in found.points
            ],
            "decisions": [
                {
                    "at": each.at,
                    "outcome": each.outcome.value,
                    "sentence": each.sentence[:MAX_SENTENCE],
                    "nodes_after": each.nodes_after,
                    "is_change": each.outcome in (ScaleOutcome.PLANNED, ScaleOutcome.TAKEN_BACK),
                }
                for each in found.decisions
            ],
        },
    )


async def gather_diagnosis(gatherer: Gatherer) -> None:
    found = await gatherer.ask(AskDiagnosis(last=MAX_VERDICTS))
    assert isinstance(found, Diagnosis), f"asked for its diagnosis the master answered {type(found).__name__}"
    gatherer.verdicts = found.verdicts
    board = gatherer.board
    board.put("diagnosis", "", {"count": len(found.verdicts)})
    for past in found.verdicts:
        board.put("verdicts", _key(past), _verdict(past))
    board.keep("verdicts", {_key(past) for past in found.verdicts})
    if found.autopsy is not None:
        autopsy = found.autopsy
        board.put("autopsy", "", {"at": autopsy.at, "round": autopsy.round, "text": autopsy.text[:MAX_AUTOPSY]})


def _key(past: PastVerdict) -> str:
    """One diagnostician may find the same on many nodes at once, and each finding has its place."""
    verdict = past.verdict
    about = hashlib.sha256(msgspec.json.encode((past.round, verdict.fault, verdict.culprits))).hexdigest()
    return f"{past.at} {verdict.diagnostician} {about[:16]}"


def _verdict(past: PastVerdict) -> dict[str, object]:
    verdict = past.verdict
    return {
        "at": past.at,
        "round": past.round,
        "count": past.count,
        "has_acted": past.has_acted,
        "fault": verdict.fault.value,
        "diagnostician": verdict.diagnostician,
        "culprits": ", ".join(_name(culprit) for culprit in verdict.culprits[:8]),
        "evidence": [sentence[:MAX_SENTENCE] for sentence in verdict.evidence[:MAX_EVIDENCE]],
        "confidence": round(verdict.confidence, 2),
        "action": verdict.action.value,
        "reasoning": verdict.reasoning[:MAX_SENTENCE],
    }


def _name(culprit: Culprit) -> str:
    return f"node {culprit.node}" if culprit.global_rank < 0 else f"rank {culprit.global_rank} on node {culprit.node}"
