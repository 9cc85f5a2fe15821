"""
What people ask of a running job: start the workers again, exchange a node.

As everywhere, each function checks first and raises `Rejected`; below the empty line it only changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlrover.core.fleet import targets
from dlrover.core.fleet.fleet import FleetNode
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Command, Done, NodeId, PlatformId, Reply
from dlrover.protocol.messages.requests import RelaunchNode, RestartWorkers

if TYPE_CHECKING:
    from dlrover.core.decision import Course


def _restart_workers(command: RestartWorkers, course: Course) -> Reply:
    state, rdzv = course.state, course.state.rendezvous
    _check_running(course)
    if not rdzv.is_active:
        raise Rejected("No workers run now: the next round is open already.", code="bad-stage")
    if rdzv.is_held:
        raise Rejected("The rendezvous is blocked: workers that stop now could not start again.", code="blocked")
    if rdzv.finished:
        raise Rejected(
            f"{len(rdzv.finished)} nodes have finished their work and are not started again; the others end by themselves.",
            code="finished",
        )

    because = command.reason[: targets.LONGEST_REASON].rstrip(".")
    course.restart_workers(f"somebody asked for a restart of the workers{f': {because}' if because else ''}")
    assert state.end is None, "a restart ends no job"
    course.advance()
    return Done()


def _relaunch_node(command: RelaunchNode, course: Course) -> Reply:
    _check_running(course)
    node = _node_of_platform(command, course)

    because = command.reason[: targets.LONGEST_REASON].rstrip(".")
    why = f"somebody asked for it{f' ({because})' if because else ''}"
    cordoned = node.host if command.is_cordoned else ""
    machine = f"; its machine {cordoned} is avoided from now on" if cordoned else ""
    course.say(f"{node.label[:1].upper()}{node.label[1:]} is exchanged, because {why}{machine}.")
    targets.relaunch_node(course, node, why, cordoned)
    course.advance()
    return Done()


def _node_of_platform(command: RelaunchNode, course: Course) -> FleetNode:
    state = course.state
    node = _of_agent(command.node, course) if command.node >= 0 else _of_platform(command.platform_node, course)
    assert state.fleet is not None, "a node of a platform"
    if state.fleet.is_suspended:
        raise Rejected("The job is suspended and launches no node: resume it first.", code="bad-stage")
    is_leaving = node.id in state.fleet.migrations or node.id in state.fleet.servers.dropped
    if not node.is_live or node.is_finished or is_leaving:
        raise Rejected(f"{node.label} is about to go already.", code="bad-stage")
    return node


def _of_agent(id_: NodeId, course: Course) -> FleetNode:
    state = course.state
    agent = state.nodes.live.get(id_)
    if agent is None:
        raise Rejected(f"Node {id_} is not part of the job any more.", code="unknown-node")
    node = None if state.fleet is None else state.fleet.of_agent(agent.id)
    if node is None:
        raise Rejected(
            f"{agent.label[:1].upper()}{agent.label[1:]} was started by hand: no platform could start another in its place. Stop it "
            "there; the job goes on with the others, or with one that you start instead.",
            code="no-platform",
        )
    return node


def _of_platform(id_: PlatformId, course: Course) -> FleetNode:
    fleet = course.state.fleet
    node = None if fleet is None else fleet.nodes.get(id_)
    if node is None:
        raise Rejected(f"The platform has no node {id_} of this job.", code="unknown-node")
    return node


def _check_running(course: Course) -> None:
    if course.state.end is not None:
        raise Rejected(f"The job has ended: {course.state.end.message}", code="job-ended")


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {
    RestartWorkers: _restart_workers,
    RelaunchNode: _relaunch_node,
}
