"""
What evidence, people and time say about the size of the job: a function per command, and the table of them.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from dlrover.core.decision import Answers, Decision, Handlers
from dlrover.core.happenings import FleetDefined, WorkersFailed
from dlrover.core.outcome import Deadline, NotYet
from dlrover.core.scaling import acting, beginning, evidence, facts, memory, tuning
from dlrover.core.scaling.acting import TOPIC
from dlrover.core.scaling.report import status_of
from dlrover.core.scaling.servers import short_memory
from dlrover.core.state import JobState
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.fleet import NodeType, Strategy
from dlrover.protocol.messages.identity import Micros, micros
from dlrover.protocol.messages.job import DeadlineKind, Done, ExitReason, FailureKind, Reply, WorkerFailure
from dlrover.protocol.messages.requests import MAX_REASON
from dlrover.protocol.messages.scaling import (
    MAX_CUSTOM_FACTS,
    MAX_FACT_TEXT,
    MAX_SENTENCE,
    AskScaling,
    AskTuning,
    DefineScaling,
    JobFacts,
    PlanOffered,
    RoomSeen,
    RunMeasured,
    ScaleMode,
    ScaleTerms,
    ScaleTo,
    SetScaling,
)

T = TypeVar("T", ScaleTerms, RunMeasured, PlanOffered)
MOST_NODES = 1_000_000
_LARGEST = 2**53


def _define(command: DefineScaling, decision: Decision) -> Reply:
    scaling = decision.state.scaling
    if scaling.terms != command.terms:
        scaling.terms = _as_decoded(command.terms)
        scaling.mode = command.terms.mode
        on_terms_set(decision)
    return Done()


def _set(command: SetScaling, decision: Decision) -> Reply:
    state, scaling = decision.state, decision.state.scaling
    state.check_running()
    if command.mode is not ScaleMode.OFF and state.fleet is None:
        raise Rejected(
            "The nodes of this job are started by hand: it cannot scale itself. Start it with a platform (`dlrover local`).",
            code=ErrorCode.NO_PLATFORM,
        )

    if scaling.mode is not command.mode:
        scaling.mode = command.mode
        if command.mode is not ScaleMode.ON:
            scaling.probation = None  # nothing is taken back by a job that does not change itself
        decision.say(f"Scaling is {command.mode.value} now, as a person wishes.")
        acting.look(decision)
    return Done()


def _scale_to(command: ScaleTo, decision: Decision) -> Reply:
    state = decision.state
    state.check_running()
    if state.terms is None:
        raise Rejected(
            "No node has come yet, and the first one says how many there shall be.", code=ErrorCode.NOT_BEGUN
        )
    if state.terms.strategy is not Strategy.ALLREDUCE:
        raise Rejected(
            "The nodes of this job are of several types: give the type (ScaleReplicas).", code=ErrorCode.BAD_SCALE
        )
    former, limits = state.limits.max_nodes, state.terms.limits
    if not 1 <= command.nodes <= MOST_NODES or command.nodes % limits.node_unit:
        raise Rejected(
            f"Give 1 to {MOST_NODES} nodes in multiples of {limits.node_unit}, not {command.nodes}.",
            code=ErrorCode.BAD_LIMITS,
        )
    if command.nodes > former:
        decision.announce(decision.on.job_grows, command.nodes)

    if not limits.min_nodes <= command.nodes <= limits.max_nodes:
        least, most = min(limits.min_nodes, command.nodes), max(limits.max_nodes, command.nodes)
        state.terms = replace(state.terms, limits=replace(limits, min_nodes=least, max_nodes=most))
        state.limits_version += 1
    because = command.reason[:MAX_REASON].rstrip(".")
    sentence = f"A person wants {command.nodes} nodes, {former} before{f': {because}' if because else ''}."
    decision.say(sentence)
    on_person_decided(decision)
    acting.move_target(decision, command.nodes, sentence)
    return Done()


def _run_measured(command: RunMeasured, decision: Decision) -> Reply:
    evidence.check_run(command)
    newest = decision.state.scaling.newest
    if newest is not None and command.number < newest.number:
        return Done()  # told late; what it would say is known

    command = _as_decoded(command)
    evidence.keep_run(decision.state.scaling, command, decision.now)
    tuning.keep_memory(decision.state.scaling, command)
    seconds_left = facts.seconds_left(decision.state.scaling)
    memory.warn(decision.state, seconds_left)
    short_memory.warn(decision.state, seconds_left)
    acting.look(decision)
    return Done()


def _room_seen(command: RoomSeen, decision: Decision) -> Reply:
    if command.most is not None and not 0 <= command.most <= _LARGEST:
        raise malformed("A room has 0 nodes or more.")

    decision.state.scaling.room[command.node_type] = replace(command, reason=command.reason[:MAX_SENTENCE])
    if command.node_type is not NodeType.WORKER or not acting.obey_room(decision):
        acting.look(decision)
    return Done()


def _plan_offered(command: PlanOffered, decision: Decision) -> Reply:
    _check_plan(command)

    command = _as_decoded(command)
    command = replace(command, sentence=command.sentence[:MAX_SENTENCE], source=command.source[:64])
    if decision.state.fleet is None and decision.state.terms is None:
        decision.state.scaling.start = command.plan
        why = f": {command.sentence}" if command.sentence else "."
        decision.say(f"The job begins as {command.source} proposes{why}")
    else:
        acting.look(decision, command)
    return Done()


def _check_plan(offer: PlanOffered) -> None:
    plan = offer.plan
    numbers: list[float | None] = [plan.micro_batch, plan.accumulation, plan.loader_workers]
    for group in plan.groups:
        numbers += [group.count, group.cpu, group.memory_mb]
    for node in plan.nodes:
        numbers += [node.cpu, node.memory_mb]
    if len(plan.groups) > len(NodeType) or len(plan.nodes) > MOST_NODES or not 0 <= offer.expected_speed < _LARGEST:
        raise malformed("A plan names each type once and expects a speed of 0 or more.")
    if any(number is not None and not 0 < number <= _LARGEST for number in numbers):
        raise malformed("A plan has no numbers of 0 or less: leave out what shall stay.")


def _job_facts(command: JobFacts, decision: Decision) -> Reply:
    names = [name for name in JobFacts.__struct_fields__ if name != "custom"]
    values = {name: getattr(command, name) for name in names}
    texts = [*(value for value in values.values() if isinstance(value, str)), *command.custom, *command.custom.values()]
    numbers = [value for value in values.values() if isinstance(value, int)]
    if any(len(text) > MAX_FACT_TEXT for text in texts) or not all(0 <= number <= _LARGEST for number in numbers):
        raise malformed(
            f"A fact of the job is a number of at least 0, or a text of at most {MAX_FACT_TEXT} characters."
        )
    known = decision.state.scaling.facts
    custom = {**known.custom, **command.custom}
    if len(custom) > MAX_CUSTOM_FACTS:
        raise malformed(f"A job has at most {MAX_CUSTOM_FACTS} facts of its own.")

    told = {name: value for name, value in values.items() if value}
    decision.state.scaling.facts = replace(known, **told, custom=custom)
    return Done()


def _as_decoded(value: T) -> T:
    """As it comes out of a journal. The shell may give 60 where a float belongs, which is encoded otherwise."""
    return msgspec.convert(msgspec.to_builtins(value), type(value))


def on_fleet_defined(decision: Decision, defined: FleetDefined) -> None:
    """A job that scales itself begins as former jobs propose; one with servers gets first sizes for the types that have none (spec 07 §9.1)."""
    scaling = decision.state.scaling
    defined.replicas = beginning.first_replicas(scaling, defined.spec)
    defined.first_workers = beginning.first_nodes(scaling)


def on_terms_set(decision: Decision) -> None:
    """A world that finds its own size begins with the nodes that the fleet begins with."""
    state, scaling = decision.state, decision.state.scaling
    if state.terms is None or state.fleet is None or scaling.target is not None or scaling.mode is not ScaleMode.ON:
        return
    limits, start = state.terms.limits, beginning.first_nodes(scaling)
    is_changeable = limits.min_nodes < limits.max_nodes and NodeType.WORKER in scaling.terms.types
    if start and is_changeable and state.rendezvous.world is None and facts.is_world(state):
        start -= start % limits.node_unit
        scaling.target = min(max(limits.min_nodes, start), limits.max_nodes)
        if scaling.target > start:
            decision.announce(decision.on.job_scaled, scaling.target)


def on_bounds_moved(decision: Decision) -> None:
    """A person gave a new minimum and maximum, and wants a world of the maximum."""
    state = decision.state
    if state.scaling.target is not None and state.terms is not None:
        state.scaling.target = state.terms.limits.max_nodes


def on_person_decided(decision: Decision) -> None:
    """A person's numbers stay for a while, and nothing of ours is judged under them."""
    scaling = decision.state.scaling
    scaling.held_until = Micros(decision.now + micros(scaling.terms.manual_hold))
    scaling.probation = None
    scaling.look_at = scaling.held_until if scaling.mode is not ScaleMode.OFF else None
    acting.note_change(scaling, decision.now)


def on_world_taken_up(decision: Decision, size: int) -> None:
    """It ran with so many nodes before the journal was lost, so it had found that size."""
    state = decision.state
    if state.scaling.target is not None and state.terms is not None and size > state.scaling.target:
        state.scaling.target = min(size, state.terms.limits.max_nodes)


def on_workers_failed(decision: Decision, failed: WorkersFailed) -> None:
    """Memory of the machine is answered with more of it, memory of a device with a smaller batch."""
    state = decision.state
    if state.end is not None or decision.ending is not None:
        return
    if any(failure.kind is FailureKind.OUT_OF_MEMORY for failure in failed.failures) and state.fleet is not None:
        on_memory_ran_out(decision)
    elif any(map(_is_device_oom, failed.failures)):
        acting.shrink_batch(decision, failed.shape)


def _is_device_oom(failure: WorkerFailure) -> bool:
    """By the name of the exception: torch's, and those of libraries that follow it."""
    names = (*failure.exceptions, failure.message.split(":")[0])
    return failure.kind is FailureKind.MEMORY_ERROR and any("OutOfMemoryError" in name for name in names)


def on_memory_ran_out(decision: Decision) -> None:
    """All workers of a world get more, once. The second time the job ends."""
    state, scaling = decision.state, decision.state.scaling
    grown = memory.grown_workers(state)
    if grown is not None:
        scaling.memory_grown = True
        scaling.memory_before = 0 if state.fleet is None else state.fleet.workers.spec.resource.memory_mb
        scaling.probation = None
        acting.note_change(scaling, decision.now)
        decision.announce(decision.on.workers_grown, grown)
        decision.is_unsettled = True
    elif scaling.memory_grown and scaling.mode is ScaleMode.ON and decision.ending is None:
        decision.ending = (ExitReason.WORKER_OOM, memory.why_no_more(state))
        decision.is_unsettled = True


def look_again(decision: Decision, _: int) -> None:
    """A brake has opened, or a probation is over."""
    at = decision.state.scaling.look_at
    if at is not None and at <= decision.now:
        acting.look(decision)


def deadlines(state: JobState) -> list[Deadline]:
    at = state.scaling.look_at
    return [] if at is None else [Deadline(at, DeadlineKind.SCALING, state.scaling.num_decisions)]


def _answer_scaling(query: AskScaling, state: JobState) -> Reply | NotYet:
    return status_of(state)


def _answer_tuning(query: AskTuning, state: JobState) -> Reply | NotYet:
    offered = state.scaling.tuning
    if query.seen == offered.version and query.wait > 0 and state.end is None:
        return NotYet((TOPIC,), offered)
    return offered


HANDLERS: Handlers = {
    DefineScaling: _define,
    SetScaling: _set,
    ScaleTo: _scale_to,
    RunMeasured: _run_measured,
    RoomSeen: _room_seen,
    PlanOffered: _plan_offered,
    JobFacts: _job_facts,
}
ANSWERS: Answers = {AskScaling: _answer_scaling, AskTuning: _answer_tuning}
