"""
Diagnosticians that were written for the original: `observe` finds something, `resolve` says which actions follow.

`Translated` makes one of them look like ours: what it observed is the evidence, its most important action is that of the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dlrover.master.diagnosis.old_actions import (
    DiagnosisAction,
    DiagnosisActionType,
    EventAction,
    JobAbortionAction,
    JobRestartAction,
    NodeAction,
)
from dlrover.protocol.messages.job import NodeId
from dlrover.protocol.messages.watch import ActionKind, Culprit, FaultClass, Verdict

CONFIDENCE = 0.6
"""They do not say how sure they are."""
_NODE_ACTIONS = {
    DiagnosisActionType.RESTART_WORKER: ActionKind.RESTART_WORKERS,
    DiagnosisActionType.RELAUNCH_WORKER: ActionKind.RELAUNCH_NODE,
    DiagnosisActionType.MASTER_RELAUNCH_WORKER: ActionKind.RELAUNCH_NODE,
}


@dataclass(frozen=True)
class DiagnosisObservation:
    observation: str = ""
    """Empty: all is well."""
    extra_infos: dict[str, str] = field(default_factory=dict)


class OldDiagnostician:
    """To be derived from."""

    def observe(self, **kwargs: Any) -> DiagnosisObservation | None:
        """Called with `portrait`, what is known of the job."""
        raise NotImplementedError(f"{type(self).__name__} must define observe()")

    def resolve(self, problem: DiagnosisObservation, **kwargs: Any) -> list[DiagnosisAction]:
        return []


class Translated:
    def __init__(self, name: str, diagnostician: OldDiagnostician) -> None:
        self.interval = getattr(diagnostician, "interval", 60.0)
        self._name = name
        self._diagnostician = diagnostician

    def diagnose(self, portrait: object) -> Verdict | None:
        problem = self._diagnostician.observe(portrait=portrait)
        if problem is None or not problem.observation:
            return None
        answer = self._diagnostician.resolve(problem, portrait=portrait)
        actions = [action for action in answer or () if isinstance(action, DiagnosisAction) and action.is_needed()]
        return _verdict(self._name, problem, max(actions, key=lambda action: action.priority, default=None))


def _verdict(name: str, problem: DiagnosisObservation, action: DiagnosisAction | None) -> Verdict:
    kind, why = ActionKind.NOTIFY, ""
    culprits: tuple[Culprit, ...] = ()
    match action:
        case NodeAction():
            kind = _NODE_ACTIONS.get(action.action_type, ActionKind.NOTIFY)
            culprits = (Culprit(node=NodeId(int(action.node_id)), global_rank=-1),) if action.node_id >= 0 else ()
            why = action.reason
        case JobAbortionAction():
            kind, why = ActionKind.STOP_JOB, f"{action.reason}: {action.msg}"
        case JobRestartAction():
            kind, why = ActionKind.RESTART_WORKERS, f"{action.reason}: {action.msg}"
        case EventAction():
            why = action.event_msg
    evidence = (problem.observation, *(f"{key}: {value}" for key, value in problem.extra_infos.items()))
    return Verdict(
        fault=FaultClass.UNKNOWN,
        diagnostician=name,
        culprits=culprits,
        evidence=evidence,
        confidence=CONFIDENCE,
        action=kind,
        reasoning=why or f"The diagnostician {name} found this and gave no reason.",
    )
