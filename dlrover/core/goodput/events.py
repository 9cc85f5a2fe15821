"""
What a command means to people: the events of a job, made from its journal.

A pure function of the command and of what it led to, so the running master, `dlrover report` on an old journal and the simulator tell the same
story. Numbers are given where events are kept.
"""

from __future__ import annotations

from collections.abc import Iterator

from dlrover.agreed.worker_failure import is_secondary
from dlrover.core.outcome import Outcome
from dlrover.core.state import JobState
from dlrover.protocol.messages.checkpoint import CheckpointCommitted, CheckpointFailed, RequestSave
from dlrover.protocol.messages.fleet import LaunchNode, RemoveNode, ScaleJob
from dlrover.protocol.messages.goodput import MAX_LABELS, AccountGoodput, JobEvent
from dlrover.protocol.messages.job import (
    Attach,
    Attached,
    Command,
    FinishJob,
    LeaveJob,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    ReportFailure,
    ReportFinished,
    Round,
    StopJob,
)
from dlrover.protocol.messages.precheck import PreCheckNoted, PreCheckStage
from dlrover.protocol.messages.scaling import RoomSeen, ScaleOutcome, SetScaling
from dlrover.protocol.messages.watch import MAX_TEXT, HangFound, NodeEvent

INFO, WARN, ERROR = "info", "warn", "error"
_SCALED = {
    ScaleOutcome.PLANNED: "scale-planned",
    ScaleOutcome.DRY: "scale-dry-run",
    ScaleOutcome.TAKEN_BACK: "scale-taken-back",
}
MAX_FAILURES = 8
"""Of one report that become events; the others are counted."""
_MAX_NAME = 64
_PRE_CHECK = {
    PreCheckStage.PASS: ("pre_check_pass", INFO),
    PreCheckStage.FAIL: ("pre_check_fail", ERROR),
}
"""By the historical names of events."""


class EventTeller:
    """Remembers only which round was told of last."""

    def __init__(self, state: JobState) -> None:
        self._round: Round = state.rendezvous.round
        self._num_decisions = state.scaling.num_decisions

    def tell(self, command: Command, outcome: Outcome, state: JobState, now: Micros) -> Iterator[JobEvent]:
        """What happened, oldest first."""
        yield from _of_command(command, outcome, state, now)
        yield from self._of_scaling(state, now)
        round_ = state.rendezvous.round
        about_round = ""
        if round_ != self._round:
            self._round = round_
            about_round = state.rendezvous.verdict
            world = state.rendezvous.world
            labels = {"round": str(round_)}
            if world is not None:
                labels |= {"nodes": str(len(world.members)), "workers": str(world.world_size)}
            yield event(now, INFO, "round-started", about_round, labels=labels)
        for verdict in outcome.verdicts:
            if state.end is not None and verdict.endswith(state.end.message):
                yield event(now, WARN if state.end.exit_code else INFO, "job-ending", verdict)
            elif verdict != about_round:
                yield event(now, INFO, "verdict", verdict)
        for effect in outcome.effects:
            match effect:
                case FinishJob(end=end):
                    labels = {"reason": end.reason.value, "exit_code": str(end.exit_code)}
                    yield event(now, ERROR if end.exit_code else INFO, "job-ended", end.message, labels=labels)
                case LaunchNode():
                    yield event(now, INFO, "node-launched", f"{effect.name} as {effect.node_type.value} {effect.rank}.")
                case RemoveNode():
                    yield event(now, INFO, "node-removed", f"{effect.name}: {effect.reason}.")

    def _of_scaling(self, state: JobState, now: Micros) -> Iterator[JobEvent]:
        """Each change of size and each taking back, with the sentence of its decision."""
        scaling = state.scaling
        for decision in scaling.decisions:
            if decision.number > self._num_decisions and decision.outcome in _SCALED:
                labels = {"from": str(decision.nodes_before), "to": str(decision.nodes_after)}
                yield event(now, INFO, _SCALED[decision.outcome], decision.sentence, labels=labels)
        self._num_decisions = scaling.num_decisions


def _of_command(command: Command, outcome: Outcome, state: JobState, now: Micros) -> Iterator[JobEvent]:
    match command:
        case AccountGoodput():
            return
        case MasterStarted():
            yield event(now, INFO, "master-started", f"The master serves in epoch {command.master_epoch}.")
        case Attach() if isinstance(outcome.reply, Attached):
            name, again = ("node-attached", "") if not command.incarnation else ("node-back", " again")
            text = f"Node rank {outcome.reply.node_rank} ({command.host}) attached{again}."
            yield event(now, INFO, name, text, node=outcome.reply.node)
        case ReportFailure():
            yield from _of_failures(command, state, now)
        case ReportFinished():
            text = f"The workers of {_label(state, command.node)} ended well in round {command.round}."
            yield event(now, INFO, "node-finished", text, node=command.node, labels=_step(command.step))
        case LeaveJob():
            why = f": {command.message}" if command.message else "."
            text = f"{_label(state, command.node)} left ({command.reason.value}){why}"
            yield event(now, INFO, "node-left", text, node=command.node)
        case NodeDisconnected():
            yield event(
                now, WARN, "node-disconnected", f"{_label(state, command.node)} has no stream.", node=command.node
            )
        case NodeSilent():
            silence = (now - command.last_seen_at) / 1e6
            text = f"Nothing was heard of {_label(state, command.node)} for {silence:.0f} s."
            yield event(now, ERROR, "node-silent", text, node=command.node)
        case HangFound():
            verdict = command.verdict
            first = verdict.culprits[0] if verdict.culprits else None
            text = " ".join(
                (f"Round {command.round} hung for {command.stalled_for:.1f} s.", *verdict.evidence, verdict.reasoning)
            )
            labels = {
                "fault": verdict.fault.value,
                "confidence": f"{verdict.confidence:.2f}",
                "action": verdict.action.value,
            }
            node, rank = (None, None) if first is None else (first.node, first.global_rank)
            yield event(now, ERROR, "hang-found", text, node=node, rank=rank, labels=labels)
        case CheckpointCommitted():
            text = f"The checkpoint of step {command.step} counts: {command.directory}."
            yield event(now, INFO, "checkpoint-committed", text, node=command.node, labels=_step(command.step))
        case CheckpointFailed():
            text = f"Step {command.step} could not be saved to {command.directory}: {command.reason}"
            yield event(now, ERROR, "checkpoint-failed", text, node=command.node, labels=_step(command.step))
        case ScaleJob():
            text = f"The job shall have {command.min_nodes} to {command.max_nodes} nodes."
            yield event(now, INFO, "job-scaled", text)
        case SetScaling():
            yield event(now, INFO, "scaling-set", f"Scaling by itself is {command.mode.value} from now on.")
        case RoomSeen():
            room = "an unknown number of nodes" if command.most is None else f"{command.most} nodes"
            why = f": {command.reason}" if command.reason else ""
            yield event(now, INFO, "room-seen", f"The platform has room for {room} ({command.node_type.value}){why}.")
        case PreCheckNoted() if command.stage in _PRE_CHECK:
            name, level = _PRE_CHECK[command.stage]
            labels = {each.name: each.state.value for each in command.results[:MAX_LABELS]}
            yield event(now, level, name, command.message, labels=labels)
        case StopJob():
            yield event(now, WARN, "job-stopped", command.message or "A user stopped the job.")
        case RequestSave():
            yield event(now, INFO, "save-asked", command.reason or "A user asked for a checkpoint.")


def _of_failures(command: ReportFailure, state: JobState, now: Micros) -> Iterator[JobEvent]:
    for failure in command.failures[:MAX_FAILURES]:
        labels = {"kind": failure.kind.value, "round": str(command.round), **_step(command.step)}
        if failure.signal is not None:
            labels["signal"] = str(failure.signal)
        if failure.exit_code is not None:
            labels["exit_code"] = str(failure.exit_code)
        text = f"Global rank {failure.global_rank} on {_label(state, command.node)} failed ({failure.kind.value}): "
        text += failure.message or "it left no message"
        level = WARN if is_secondary(failure) else ERROR
        yield event(now, level, "worker-failed", text, node=command.node, rank=failure.global_rank, labels=labels)
    if (num_more := len(command.failures) - MAX_FAILURES) > 0:
        yield event(now, ERROR, "worker-failed", f"{num_more} more workers of the same node failed.", node=command.node)


def of_node(told: NodeEvent, now: Micros) -> JobEvent:
    """What a node tells may be anything: it is cut and cleaned."""
    level = told.level if told.level in (INFO, WARN, ERROR) else INFO
    labels = {clean(key, _MAX_NAME): clean(told.labels[key], MAX_TEXT) for key in list(told.labels)[:MAX_LABELS]}
    return event(now, level, told.name or "node-event", told.text, node=told.node, rank=told.rank, labels=labels)


def event(
    at: Micros,
    level: str,
    name: str,
    text: str,
    *,
    node: NodeId | None = None,
    rank: int | None = None,
    labels: dict[str, str] | None = None,
) -> JobEvent:
    return JobEvent(
        number=0,
        at=at,
        level=level,
        name=clean(name, _MAX_NAME),
        text=clean(text, MAX_TEXT),
        node=node,
        rank=rank,
        labels=labels or {},
    )


def clean(text: str, limit: int) -> str:
    """Something that terminals, pages and files can bear: no control characters but line ends, no lone surrogates."""
    cut = text if len(text) <= limit else f"{text[: limit - 1]}…"
    if cut.isprintable():
        return cut
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in cut)


def _label(state: JobState, node: NodeId) -> str:
    found = state.nodes.live.get(node) or next((each for each in state.nodes.former.values() if each.id == node), None)
    return f"node {node}" if found is None else found.label


def _step(step: int | None) -> dict[str, str]:
    return {} if step is None else {"step": str(step)}
