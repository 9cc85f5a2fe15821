"""
The events that trainers, masters and agents have by name, so that tools need not guess.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from dlrover.trainer.events.phase_span import PhaseSpan
from dlrover.trainer.events.process import OUTLET, DurationSpan, Nothing, Outlet, Process, safe


class WarningType(StrEnum):
    DATA = "data"
    DEVICE = "device"
    LOSS = "loss"
    MEMORY = "memory"
    NETWORK = "network"
    NUMERICS = "numerics"
    STORAGE = "storage"
    OTHER = "other"


class InitSpan(DurationSpan):
    """`#init`, with the stages that nearly every trainer has."""

    @safe
    def load_ckpt(self, content: dict[str, object] | None = None) -> DurationSpan | Nothing:
        return self.stage("load_ckpt", content, PhaseSpan)

    def load_dataset(self, content: dict[str, object] | None = None) -> DurationSpan | Nothing:
        return self.stage("load_dataset", content)


class TrainerProcess(Process):
    def __init__(self, target: str = "Trainer", outlet: Outlet = OUTLET) -> None:
        super().__init__(target, outlet)

    @safe
    def start(self, **params: object) -> None:
        self.instant("#start", {"params": params})

    @safe
    def init_end(self, **content: object) -> None:
        self.instant("#init_end", content)

    @safe
    def substep(self, global_step: int, **content: object) -> None:
        self.instant("#substep", {"global_step": global_step, **content})

    @safe
    def predict_step(self, global_step: int, **content: object) -> None:
        self.instant("#predict_step", {"global_step": global_step, **content})

    @safe
    def log(self, global_step: int, logs: object = None, **content: object) -> None:
        self.instant("#log", {"global_step": global_step, "logs": logs, **content})

    @safe
    def finish(self, **content: object) -> None:
        self.instant("#finish", content)

    @safe
    def warning(self, warning_type: WarningType | str, msg: str, **content: object) -> None:
        kind = warning_type.value if isinstance(warning_type, WarningType) else str(warning_type)
        self.instant("#warning", {"warning_type": kind, "msg": msg, **content})

    @safe
    def init(self, **content: object) -> Any:
        return InitSpan(self, "#init", content)

    @safe
    def train(self, **content: object) -> Any:
        return self.duration("#train", content)

    @safe
    def epoch(self, **content: object) -> Any:
        return self.duration("#epoch", content)

    @safe
    def step(self, global_step: int, **content: object) -> Any:
        return PhaseSpan(self, "#step", {"global_step": global_step, **content})

    @safe
    def evaluate(self, global_step: int = 0, **content: object) -> Any:
        return PhaseSpan(self, "#evaluate", {"global_step": global_step, **content})

    @safe
    def predict(self, global_step: int = 0, **content: object) -> Any:
        return PhaseSpan(self, "#predict", {"global_step": global_step, **content})

    @safe
    def save(self, global_step: int, **content: object) -> Any:
        return PhaseSpan(self, "#save", {"global_step": global_step, **content})

    @safe
    def persist_ckpt(self, global_step: int, path: str = "", size: int = 0, **content: object) -> Any:
        return self.duration("#persist_ckpt", {"global_step": global_step, "path": path, "size": size, **content})


class NamedProcess(Process):
    """Instants and spans by method name: `joined(a=1)` is `#joined{a: 1}`. Names that are not in the tables do nothing."""

    TARGET = ""
    INSTANTS: tuple[str, ...] = ()
    SPANS: tuple[str, ...] = ()

    def __init__(self, target: str = "", outlet: Outlet = OUTLET) -> None:
        super().__init__(target or self.TARGET, outlet)

    def __getattr__(self, name: str) -> Any:
        if name in self.INSTANTS:
            return safe(lambda **content: self.instant(f"#{name}", content))
        if name in self.SPANS:
            return safe(lambda **content: self.duration(f"#{name}", content))
        return super().__getattr__(name)


class DLRoverMasterEvent(NamedProcess):
    TARGET = "dlrover-master"
    INSTANTS = (
        "master_start",
        "master_exit",
        "worker_create",
        "worker_relaunch",
        "worker_no_heartbeat",
        "worker_event",
        "node_join",
        "fault_detect",
        "process_restart",
    )
    SPANS = ("job_train", "rendezvous", "network_check", "fault_tolerance", "pre_check")


class DLRoverAgentEvent(NamedProcess):
    TARGET = "dlrover-agent"
    INSTANTS = (
        "agent_start",
        "agent_exit",
        "process_succeeded",
        "process_fail",
        "process_restart",
        "process_restart_membership",
        "job_abortion",
        "job_restart",
    )
    SPANS = ("rendezvous", "network_check", "fault_tolerance", "pre_check")
