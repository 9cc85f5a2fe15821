"""
Operators that look at a job before it begins: those that any job may want, and what users' own are derived from.

`check` is asked in a thread, with a time limit, and answers at once: passed, failed, or not yet (`is_pending`), which is asked again when something
has changed or the retry interval is over. What shall be done after a failure is a list of actions.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from dlrover.core.fleet.early_stop import MIN_PENDING_TIMEOUT
from dlrover.core.outcome import MICROS_PER_SECOND
from dlrover.core.state import JobState
from dlrover.host.extensions import UnusableExtension, build
from dlrover.master.diagnosis.old_actions import (
    DiagnosisAction,
    DiagnosisActionType,
    JobAbortionAction,
    NodeAction,
)
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodePhase, NodeType, Strategy
from dlrover.protocol.messages.job import Micros, NodeStatus

log = logging.getLogger(__name__)

PENDING_TIMEOUT = "PRE_CHECK_PENDING_TIMEOUT"
CONNECTION_FAILED = "CONNECTION_CHECK_FAILED"
CONNECTION_PATIENCE = 300.0
"""Seconds that a node may run before its agent has come."""
_YES = ("true", "yes", "t", "y", "1")


class PlatformNodeView(Struct, frozen=True, kw_only=True):
    """A node of the platform that the job wants, as an operator sees it."""

    id: int
    node_type: str
    rank: int
    name: str
    is_running: bool
    is_attached: bool
    """Its agent has come."""
    waited: float
    """Seconds since it was asked for, or since it runs; 0: it was not asked for yet."""
    host: str = ""
    message: str = ""


class JobView(Struct, frozen=True, kw_only=True):
    """The job at one moment. Operators of the original get it as `job_args`."""

    job_name: str
    nodes: tuple[NodeStatus, ...] = ()
    """Whose agents have come."""
    platform_nodes: tuple[PlatformNodeView, ...] = ()
    """Empty where people start the nodes."""
    distribution_strategy: str = Strategy.ALLREDUCE.value
    pending_timeout: float = 0.0
    """Seconds that a node may wait for its resources; 0: for ever."""
    pending_fail_strategy: int = 1


@dataclass
class PreCheckResult:
    result: int = 0
    """0: passed."""
    result_msg: str = ""
    abnormal_nodes: list[Any] = field(default_factory=list)
    """Ids of the nodes that it is about, as the platform counts them, or objects with an `id`."""
    is_pending: bool = False
    """Neither passed nor failed yet: asked again later, and nothing is done meanwhile."""

    def is_success(self) -> bool:
        return self.result == 0 and not self.is_pending


class PreCheckOperator:
    """To be derived from."""

    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 5.0

    def check(self, *args: Any, **kwargs: Any) -> PreCheckResult:
        """Called with `job_args`, a `JobView`."""
        raise NotImplementedError(f"{type(self).__name__} must define check()")

    def failed_actions(self, *args: Any, **kwargs: Any) -> list[DiagnosisAction]:
        """Called with `result_msg` and `abnormal_nodes` of the result."""
        return []


class NoPreCheckOperator(PreCheckOperator):
    def check(self, *args: Any, **kwargs: Any) -> PreCheckResult:
        return PreCheckResult()


class SchedulingPreCheckOperator(PreCheckOperator):
    """The platform has given the nodes that the job cannot do without."""

    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 15.0

    def check(self, *args: Any, **kwargs: Any) -> PreCheckResult:
        job: JobView = kwargs["job_args"]
        if not job.platform_nodes:
            return PreCheckResult(result_msg="people start the nodes")
        if job.pending_timeout <= 0 or job.pending_fail_strategy <= 0:
            return PreCheckResult(result_msg="nodes may wait for ever")
        waiting = [node for node in _needed(job) if not node.is_running]
        late = max((node for node in waiting if node.waited > job.pending_timeout), key=_waited, default=None)
        if late is not None:
            said = f" The platform says: {late.message}." if late.message else ""
            message = f"{PENDING_TIMEOUT}: {late.name} has waited for {late.waited:.0f} s.{said}"
            return PreCheckResult(result=1, result_msg=message, abnormal_nodes=[late.id])
        if waiting:
            return PreCheckResult(is_pending=True, result_msg=f"{len(waiting)} nodes wait for their resources")
        return PreCheckResult()

    def failed_actions(self, *args: Any, **kwargs: Any) -> list[DiagnosisAction]:
        return [JobAbortionAction(reason=PENDING_TIMEOUT, msg=str(kwargs.get("result_msg", "")))]


class ConnectionPreCheckOperator(PreCheckOperator):
    """From every node that runs an agent has come."""

    @classmethod
    def get_retry_interval_secs(cls) -> float:
        return 60.0

    def check(self, *args: Any, **kwargs: Any) -> PreCheckResult:
        job: JobView = kwargs["job_args"]
        missing = [
            node
            for node in job.platform_nodes
            if node.node_type == NodeType.WORKER.value and node.is_running and not node.is_attached
        ]
        late = [node for node in missing if node.waited > CONNECTION_PATIENCE]
        if late:
            names = ", ".join(node.name for node in late[:8])
            message = f"{CONNECTION_FAILED}: no agent has connected from {names} within {CONNECTION_PATIENCE:g} s."
            return PreCheckResult(result=1, result_msg=message, abnormal_nodes=[node.id for node in late])
        if missing:
            return PreCheckResult(
                is_pending=True, result_msg=f"{len(missing)} nodes run, and their agents have not connected yet"
            )
        return PreCheckResult()

    def failed_actions(self, *args: Any, **kwargs: Any) -> list[DiagnosisAction]:
        return [
            NodeAction(
                node_id=node,
                node_status="Pre-check failed",
                reason=CONNECTION_FAILED,
                action_type=DiagnosisActionType.MASTER_RELAUNCH_WORKER,
            )
            for node in kwargs.get("abnormal_nodes") or ()
        ]


def _needed(job: JobView) -> list[PlatformNodeView]:
    """In a job with parameter servers strategy 1 needs these and the first worker; else all nodes are needed."""
    if job.distribution_strategy != Strategy.PS.value or job.pending_fail_strategy > 1:
        return list(job.platform_nodes)
    is_chief = {node.node_type for node in job.platform_nodes} & {NodeType.CHIEF.value}
    first = NodeType.CHIEF.value if is_chief else NodeType.WORKER.value
    return [
        node
        for node in job.platform_nodes
        if node.node_type == NodeType.PS.value or (node.node_type == first and node.rank == 0)
    ]


def _waited(node: PlatformNodeView) -> float:
    return node.waited


def view_of(state: JobState, nodes: tuple[NodeStatus, ...], now: Micros) -> JobView:
    fleet = state.fleet
    if fleet is None:
        return JobView(job_name=state.job_name, nodes=nodes)
    timeout = fleet.spec.pending_timeout
    wanted = []
    for node_type in fleet.replicas:
        for node in fleet.live_nodes(node_type):
            since = node.asked_at if node.phase is not NodePhase.RUNNING else node.running_since
            wanted.append(
                PlatformNodeView(
                    id=node.id,
                    node_type=node.node_type.value,
                    rank=node.rank,
                    name=node.name,
                    is_running=node.phase is NodePhase.RUNNING,
                    is_attached=node.agent is not None,
                    waited=0.0 if since is None else (now - since) / MICROS_PER_SECOND,
                    host=node.host,
                    message=node.message,
                )
            )
    return JobView(
        job_name=state.job_name,
        nodes=nodes,
        platform_nodes=tuple(wanted),
        distribution_strategy=fleet.spec.strategy.value,
        pending_timeout=max(timeout, MIN_PENDING_TIMEOUT) if timeout > 0 else 0.0,
        pending_fail_strategy=fleet.spec.pending_strategy,
    )


# How users name them.


class WantedCheck(NamedTuple):
    module: str
    class_name: str
    is_bypassed: bool = False
    """Whether a failure is only told."""


def parse_operators(text: str, option: str = "--pre-check-ops") -> tuple[WantedCheck, ...]:
    """
    The historical list of tuples, `[("module", "Class", False)]`, or `module::Class` and `module::Class?` (a failure is only told), separated by
    commas. Empty: none. Raises ConfigError.
    """
    text = text.strip()
    if not text:
        return ()
    try:
        return _parse_tuples(text) if text.startswith(("[", "(")) else tuple(map(_parse_name, text.split(",")))
    except (ValueError, SyntaxError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{option} {text[:200]}: {error}. Give names such as my_checks::Disks,my_checks::Network?, or a list such as "
            '[("my_checks", "Disks", False)]. With ? or True, a failure of the check is ignored.'
        ) from error


def _parse_tuples(text: str) -> tuple[WantedCheck, ...]:
    said = ast.literal_eval(text)
    if not isinstance(said, list | tuple):
        raise ValueError("it is not a list")
    entries = [said] if said and all(isinstance(each, str) for each in said[:2]) else list(said)
    wanted = []
    for entry in entries:
        if not isinstance(entry, list | tuple) or not 2 <= len(entry) <= 3:
            raise ValueError(f"{entry!r} is not a tuple of module, class and bypass")
        name = _parse_name(f"{entry[0]}::{entry[1]}")
        is_bypassed = len(entry) == 3 and str(entry[2]).strip().lower() in _YES
        wanted.append(name._replace(is_bypassed=is_bypassed))
    return tuple(wanted)


def _parse_name(name: str) -> WantedCheck:
    module, separator, class_name = name.strip().rstrip("?").partition("::")
    is_module = all(piece.isidentifier() for piece in module.split("."))
    if not (separator and is_module and class_name.isidentifier()):
        raise ValueError(f"{name.strip()!r} does not have the form module::Class")
    return WantedCheck(module, class_name, name.strip().endswith("?"))


class Operator(NamedTuple):
    name: str
    plugin: PreCheckOperator
    is_bypassed: bool


def load_operators(wanted: Sequence[WantedCheck]) -> list[Operator]:
    """One that cannot be loaded costs a warning, and no other."""
    loaded = []
    for module, class_name, is_bypassed in wanted:
        try:
            plugin = build(f"{module}::{class_name}", method="check")
        except UnusableExtension as error:
            log.warning("the pre-check %s::%s is not used: %s", module, class_name, error)
            continue
        loaded.append(Operator(class_name, plugin, is_bypassed))
    return loaded
