"""
Relaunch: what the end of a platform's node means, and whether another one takes its place.

Pure rules, first match wins, each with a sentence. A node that failed costs its rank one of its relaunches; a node that
was taken away (evicted, preempted, deleted) costs nothing, because no user can write a job that is never evicted. So the
budget says how often a rank may fail, and nothing else uses it up.
"""

from __future__ import annotations

import math
import re

from msgspec import Struct
from msgspec.structs import replace

from dlrover.protocol.messages.fleet import NodeEventKind, NodeExit, NodePhase, NodeType, Resource, Strategy
from dlrover.protocol.messages.job import ExitReason

MAX_BUDGET = 5
"""No rank is relaunched more often after failures, whatever the user asked for: then the node is not what is wrong."""
MAX_MEMORY_MB = 65_536
OOM_FACTOR = 2
OOM_MOST_MB = 8192
MIN_CPU = 4.0
MIN_MEMORY_MB = 6144
"""A node that waits for resources is not made smaller than these two."""

LIVE = (NodePhase.INITIAL, NodePhase.PENDING, NodePhase.RUNNING)
"""In these phases a node does, or will do, what it was launched for."""
ENDED = (NodePhase.SUCCEEDED, NodePhase.FAILED, NodePhase.DELETED)

_REACHABLE = {
    NodePhase.INITIAL: (NodePhase.PENDING, NodePhase.RUNNING, *ENDED),
    NodePhase.PENDING: (NodePhase.RUNNING, *ENDED),
    NodePhase.RUNNING: ENDED,
    NodePhase.SUCCEEDED: (NodePhase.DELETED,),
    NodePhase.FAILED: (NodePhase.DELETED,),
}
_FREE = (NodeExit.NONE, NodeExit.SUCCEEDED, NodeExit.KILLED, NodeExit.RELAUNCHED)
"""Ends that say nothing against the node."""
_CRITICAL = re.compile(r"\d+:\d+(,\d+:\d+)*")
_NUMBER = re.compile(r"0*(\d+)")


def next_phase(current: NodePhase, kind: NodeEventKind, shown: NodePhase) -> NodePhase | None:
    """What a node becomes by this event; None: nothing. A deletion is one whatever phase the platform last saw."""
    phase = NodePhase.DELETED if kind is NodeEventKind.DELETED else shown
    return phase if phase in _REACHABLE.get(current, ()) else None


def is_failure(exit_reason: NodeExit) -> bool:
    """Whether such an end costs its rank a relaunch."""
    return exit_reason not in _FREE


class NodeEnd(Struct, frozen=True, kw_only=True):
    """A node that ended without having done its work, and what its rank has used up."""

    label: str
    exit_reason: NodeExit
    resource: Resource = Resource()
    num_relaunches: int = 0
    """Of its rank, after failures."""
    max_relaunches: int = 0
    most_memory_mb: int | None = None
    """That the job's limits leave to it; None: they leave any."""
    is_serving: bool = False
    """Others that still train need it, so it cannot have done its work, whatever its exit code says."""


class Terms(Struct, frozen=True, kw_only=True):
    """What the job says about relaunches at this moment."""

    strategy: Strategy = Strategy.ALLREDUCE
    relaunch_always: bool = True
    is_stopping: bool = False
    is_restarting: bool = False
    most_memory_mb: int = MAX_MEMORY_MB
    """That is asked for after a lack of memory."""


class Relaunch(Struct, frozen=True, kw_only=True):
    sentence: str
    is_relaunched: bool = False
    is_charged: bool = False
    """The replacement costs the rank one of its relaunches."""
    resource: Resource = Resource()
    """What the replacement gets."""


def decide(end: NodeEnd, terms: Terms) -> Relaunch:
    """Whether the rank gets another node."""
    how = f"{end.label} ended ({end.exit_reason.value or 'for no known reason'})"
    if terms.is_stopping:
        return Relaunch(sentence=f"{how}; the job stops.")
    if terms.is_restarting:
        return Relaunch(sentence=f"{how}; all workers are being replaced.")
    if end.exit_reason is NodeExit.SUCCEEDED:
        if not end.is_serving:
            return Relaunch(sentence=f"{how}; its work is done.")
        how = f"{how} although others still train with it"
    if end.exit_reason is NodeExit.FATAL and not terms.relaunch_always:
        return Relaunch(sentence=f"{how}; errors of user code are not relaunched in this job.")
    if end.exit_reason is NodeExit.RELAUNCHED:
        return Relaunch(sentence=f"{how}; a newer node has its rank.")
    grows = end.exit_reason is NodeExit.OOM and terms.strategy is not Strategy.ALLREDUCE
    if grows and end.resource.memory_mb >= terms.most_memory_mb:
        refusal = f"it had {end.resource.memory_mb} MiB, and more than {terms.most_memory_mb} MiB are not asked for"
        return Relaunch(sentence=f"{how}; {refusal}.")
    if end.exit_reason is NodeExit.KILLED:
        return Relaunch(sentence=f"{how}; it is replaced at no cost.", is_relaunched=True, resource=end.resource)
    if end.num_relaunches >= end.max_relaunches:
        return Relaunch(sentence=f"{how}; all {end.max_relaunches} relaunches of its rank are used up.")
    # Workers of an all-reduce job are alike. One of them that ran out of memory may have had a leak or a greedy
    # neighbour, so it is tried again as it was, within its budget.
    resource = more_memory(end.resource, end.most_memory_mb, terms.most_memory_mb) if grows else end.resource
    grown = f" with {resource.memory_mb} MiB" if resource != end.resource else ""
    if grows and not grown and end.most_memory_mb is not None:
        grown = f" as it was: the job's limits leave it {end.most_memory_mb} MiB"
    return Relaunch(
        sentence=f"{how}; relaunch {end.num_relaunches + 1} of at most {end.max_relaunches} of its rank{grown}.",
        is_relaunched=True,
        is_charged=True,
        resource=resource,
    )


def more_memory(resource: Resource, most: int | None = None, ceiling: int = MAX_MEMORY_MB) -> Resource:
    """
    After a lack of memory, `most` and `ceiling` at most. What the platform gives by default (0) is unknown, so it cannot be doubled.
    """
    memory = resource.memory_mb
    grown = min(memory * OOM_FACTOR, memory + OOM_MOST_MB, ceiling)
    return replace(resource, memory_mb=grown if most is None else max(memory, min(grown, most)))


def smaller(resource: Resource, described: Resource) -> Resource | None:
    """
    What a node that waits for too long may ask for instead; None: it cannot ask for less. GPUs are never given up.

    `described`: by the user, for all nodes of its type. What stands there is what the job needs, and is kept.
    """
    if resource.gpus:
        return None
    cpu, memory = float(math.ceil(resource.cpu / 2)), math.ceil(resource.memory_mb / 2)
    less = replace(
        resource,
        cpu=cpu if cpu > MIN_CPU and not described.cpu else resource.cpu,
        memory_mb=memory if memory > MIN_MEMORY_MB and not described.memory_mb else resource.memory_mb,
    )
    return None if less == resource else less


def reason_to_stop(node_type: NodeType, exit_reason: NodeExit, *, has_training_begun: bool) -> ExitReason:
    """Why the job ends when it cannot do without this node."""
    is_oom = exit_reason is NodeExit.OOM
    if node_type is NodeType.PS and is_oom:
        return ExitReason.PS_OOM
    if exit_reason is NodeExit.CHECK_FAILED:
        return ExitReason.NODE_CHECK_FAILED  # no code has run on it
    if not has_training_begun:
        return ExitReason.CODE_ERROR
    match node_type:
        case NodeType.WORKER | NodeType.CHIEF:
            return ExitReason.WORKER_OOM if is_oom else ExitReason.WORKER_ERROR
        case NodeType.PS:
            return ExitReason.PS_ERROR
        case NodeType.EVALUATOR:
            return ExitReason.EVALUATOR_OOM if is_oom else ExitReason.EVALUATOR_ERROR


def critical_ranks(text: str, count: int, budget: int, strategy: Strategy) -> dict[int, int] | None:
    """Rank to budget of the nodes whose final failure ends the job; None: the text says nothing we understand."""
    match text.strip():
        case "":
            return {0: budget} if strategy is Strategy.PS and count else {}
        case "all":
            return dict.fromkeys(range(count), budget)
        case "none":
            return {}
        case listed if _CRITICAL.fullmatch(listed):
            pairs = [part.split(":") for part in listed.split(",")]
            return {int(rank): min(int(relaunches), MAX_BUDGET) for rank, relaunches in pairs}
        case _:
            return None


def has_only_numbers_up_to(most: int, text: str) -> bool:
    """Of a text about critical ranks. A number may be too long to be read at all."""
    return all(len(number) <= len(str(most)) and int(number) <= most for number in _NUMBER.findall(text))


def priorities(text: str, count: int) -> list[str] | None:
    """One for each rank; None: the text says nothing we understand."""
    if text in ("", "high", "low"):
        return [text] * count
    try:
        fraction = float(text)
    except ValueError:
        return None
    if not 0 < fraction <= 1:
        return None
    num_high = round(count * fraction)
    return ["high"] * num_high + ["low"] * (count - num_high)
