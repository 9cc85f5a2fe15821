"""
The events of a training process by the original's names: `training_event.event`, `.emitter` and `.predefined`.

Spans and processes are ours (`dlrover.trainer.events`); here are the constructors, constants and methods that scripts write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, ClassVar, Protocol

from dlrover.compat.tools.singleton import Singleton
from dlrover.trainer.events import event as our_event
from dlrover.trainer.events import predefined
from dlrover.trainer.events.event import EventType, new_id
from dlrover.trainer.events.process import OUTLET, Nothing, Outlet, safe
from dlrover.trainer.events.process import Process as OurProcess


class Exporting(Protocol):
    """An `EventExporter`, as far as a process of events needs it."""

    def export(self, event: Any) -> None: ...


# training_event.event


class EventTargetName:
    TRAINER = "AtorchTrainerV2"
    SAVER = "AsyncSaver"


class EventTypeName:
    BEGIN = EventType.BEGIN.value
    END = EventType.END.value
    INSTANT = EventType.INSTANT.value


@dataclass(frozen=True)
class Event(our_event.Event):
    def __str__(self) -> str:
        return self.as_line()

    def to_dict(self) -> dict[str, Any]:
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**told, "event_time": self.event_time.isoformat(), "event_type": self.event_type.name}

    def to_json(self) -> str:
        return self.as_json()

    @classmethod
    def instant(cls, event_id: str, target: str, name: Any, content: dict[str, object] | None = None) -> Event:
        return cls(event_id, target, name, EventType.INSTANT, content or {})

    @classmethod
    def begin(cls, event_id: str, target: str, name: str, content: dict[str, object]) -> Event:
        return cls(event_id, target, name, EventType.BEGIN, content)

    @classmethod
    def end(cls, event_id: str, target: str, name: str, content: dict[str, object]) -> Event:
        return cls(event_id, target, name, EventType.END, content)


# training_event.emitter


def generate_event_id() -> str:
    return new_id()


SafeCallable = Nothing


def safe_call(func: Callable[..., Any]) -> Callable[..., Any]:
    return safe(func)


class SafeAttribute:
    def __getattr__(self, item: str) -> Nothing:
        if item.startswith("__"):
            raise AttributeError(item)
        return Nothing()


class _To(Outlet):
    """An exporter of the script's own."""

    def __init__(self, exporter: Exporting) -> None:
        super().__init__()
        self._own = exporter

    def send(self, event: our_event.Event) -> None:
        self._own.export(Event(**{each.name: getattr(event, each.name) for each in fields(event)}))


class Process(OurProcess):
    def __init__(self, target: str, exporter: Exporting | None = None) -> None:
        super().__init__(target, OUTLET if exporter is None else _To(exporter))


class EventEmitter:
    """What a span is made of: `DurationSpan(EventEmitter(target, exporter), name, content)`."""

    def __init__(self, target: str, exporter: Exporting) -> None:
        self.target, self.exporter = target, exporter
        self._process = Process(target, exporter)

    def instant(self, name: str, content: dict[str, object] | None = None) -> None:
        self.emit(new_id(), name, EventType.INSTANT, content or {})

    def begin(self, event_id: str, name: str, content: dict[str, object]) -> None:
        self.emit(event_id, name, EventType.BEGIN, content)

    def end(self, event_id: str, name: str, content: dict[str, object]) -> None:
        self.emit(event_id, name, EventType.END, content)

    def emit(self, event_id: str, name: str, kind: EventType, content: dict[str, object]) -> None:
        self._process.emit(event_id, name, kind, content)


# training_event.predefined


class CommonEventName:
    WARNING = "#warning"
    EXCEPTION = "#exception"


class WarningType:
    """The original's one, and ours."""

    DEPRECATED = "deprecated"
    DATA = predefined.WarningType.DATA
    DEVICE = predefined.WarningType.DEVICE
    LOSS = predefined.WarningType.LOSS
    MEMORY = predefined.WarningType.MEMORY
    NETWORK = predefined.WarningType.NETWORK
    NUMERICS = predefined.WarningType.NUMERICS
    STORAGE = predefined.WarningType.STORAGE
    OTHER = predefined.WarningType.OTHER


class TrainerEventName(Enum):
    TRAIN_START = "#start"
    TRAIN_INIT = "#init"
    TRAIN_LOAD_DATASET = "#load_dataset"
    TRAIN_LOAD_CKPT = "#load_ckpt"
    TRAIN_PERSIST_CKPT = "#persist_ckpt"
    TRAIN_FINISH = "#finish"
    TRAIN_INIT_END = "#init_end"
    TRAIN = "#train"
    EPOCH = "#epoch"
    TRAIN_STEP = "#step"
    TRAIN_SUBSTEP = "#substep"
    EVALUATE = "#evaluate"
    PREDICT = "#predict"
    PREDICT_STEP = "#predict_step"
    SAVE = "#save"
    LOG = "#log"


TrainInitSpan = predefined.InitSpan


class CommonPredefined(OurProcess):
    def __init__(self, target: str) -> None:
        super().__init__(target)

    @safe
    def warning(self, warning_type: str, msg: str, **content: object) -> None:
        self.instant(CommonEventName.WARNING, {"warning_type": str(warning_type), "msg": msg, **content})


class TrainerProcess(predefined.TrainerProcess):
    @safe
    def start(self, params: dict[str, object] | None = None, **content: object) -> None:
        if params is None:
            self.instant("#start", {"params": content})
        else:
            self.instant("#start", {"params": params, **content})


class DLRoverCommonEventName(Enum):
    DLROVER_RENDEZVOUS = "#rendezvous"
    DLROVER_PROCESS_RESTART = "#process_restart"
    DLROVER_PROCESS_RESTART_MEMBERSHIP = "#process_restart_membership"
    DLROVER_PROCESS_SUCCEEDED = "#process_succeeded"
    DLROVER_PROCESS_FAIL = "#process_fail"
    DLROVER_FAULT_DETECT = "#fault_detect"
    DLROVER_FAULT_TOLERANCE = "#fault_tolerance"
    DLROVER_PRE_CHECK = "#pre_check"
    DLROVER_NETWORK_CHECK = "#network_check"
    DLROVER_JOB_ABORTION = "#job_abortion"
    DLROVER_JOB_RESTART = "#job_restart"


class DLRoverMasterEventName(Enum):
    DLROVER_MASTER_START = "#master_start"
    DLROVER_MASTER_EXIT = "#master_exit"
    DLROVER_WORKER_CREATE = "#worker_create"
    DLROVER_WORKER_RELAUNCH = "#worker_relaunch"
    DLROVER_WORKER_NO_HEARTBEAT = "#worker_no_heartbeat"
    DLROVER_WORKER_EVENT = "#worker_event"
    DLROVER_JOB_TRAIN = "#job_train"
    DLROVER_NODE_JOIN = "#node_join"


class DLRoverAgentEventName(Enum):
    DLROVER_AGENT_START = "#agent_start"
    DLROVER_AGENT_EXIT = "#agent_exit"


class _Signature:
    """One method of the original: what it emits, and under which keys its arguments stand in the content."""

    def __init__(self, event: str, *arguments: str, is_span: bool = False, **renamed: str) -> None:
        """`renamed`: arguments that stand under another key, after the others."""
        self.event, self.is_span = event, is_span
        self.keys = {**dict(zip(arguments, arguments, strict=True)), **renamed}

    def content(self, values: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
        given = {**dict(zip(self.keys, values, strict=False)), **named}
        return {self.keys.get(name, name): value for name, value in given.items()}


class _Published(predefined.NamedProcess, Singleton):
    """The methods of the table, by position or by name; the other names as `dlrover.trainer.events` has them."""

    METHODS: ClassVar[dict[str, _Signature]] = {}

    def __getattr__(self, name: str) -> Any:
        method = self.METHODS.get(name)
        if method is None:
            return super().__getattr__(name)
        emit = self.duration if method.is_span else self.instant
        return safe(lambda *values, **named: emit(method.event, method.content(values, named)))

    @safe
    def warning(self, warning_type: str, msg: str, **content: object) -> None:
        self.instant(CommonEventName.WARNING, {"warning_type": str(warning_type), "msg": msg, **content})


class DLRoverMasterEvent(_Published, predefined.DLRoverMasterEvent):
    METHODS: ClassVar[dict[str, _Signature]] = {
        "start": _Signature("#master_start", args="params"),
        "exit": _Signature("#master_exit", "exit_code"),
        "node_join": _Signature("#node_join", "node_id", "node_rank", "node_ip", "rdzv_round"),
        "rendezvous": _Signature(
            "#rendezvous", "rendezvous_type", "round_num", "timeout_sec", "max_nodes", "min_nodes", is_span=True
        ),
        "network_check": _Signature("#network_check", "round", is_span=True),
        "worker_event": _Signature("#worker_event", "pod_name", "from_state", "to_state", reason="exit_reason"),
        "worker_relaunch": _Signature("#worker_relaunch", "pod_name", "relaunch_pod_name"),
        "worker_create": _Signature("#worker_create", "pod_name", success="ok"),
        "worker_no_heartbeat": _Signature("#worker_no_heartbeat", "pod_name", "timeout"),
        "fault_detect": _Signature("#fault_detect", "reason"),
        "train_job": _Signature("#job_train", "job_name", args="params", is_span=True),
        "process_restart": _Signature("#process_restart", "pod_name"),
    }


class DLRoverAgentEvent(_Published, predefined.DLRoverAgentEvent):
    METHODS: ClassVar[dict[str, _Signature]] = {
        "start": _Signature("#agent_start", args="params"),
        "exit": _Signature("#agent_exit", "success"),
        "rendezvous": _Signature("#rendezvous", "rendezvous_type", "node_name", "node_rank", "timeout", is_span=True),
        "network_check": _Signature("#network_check", "round", "node_rank", is_span=True),
        "process_succeeded": _Signature("#process_succeeded", "node_rank"),
        "process_restart": _Signature("#process_restart", "node_rank"),
        "process_fail": _Signature("#process_fail", "node_rank"),
        "process_restart_membership": _Signature("#process_restart_membership", "node_rank"),
        "job_abortion": _Signature("#job_abortion", node_rank="caused_node_rank", reason="reason"),
        "job_restart": _Signature("#job_restart", node_rank="caused_node_rank", reason="reason"),
    }


DLRoverCommonEvent = _Published
