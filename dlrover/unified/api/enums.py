"""Names of states and kinds in the historical interface."""

from __future__ import annotations

import enum


class RLRoleType(enum.Enum):
    TRAINER = "TRAINER"
    ACTOR = "ACTOR"
    ROLLOUT = "ROLLOUT"
    REFERENCE = "REFERENCE"
    REWARD = "REWARD"
    CRITIC = "CRITIC"


class ACCELERATOR_TYPE(enum.StrEnum):  # noqa: N801  # the name in scripts
    CPU = "CPU"
    GPU = "GPU"
    TPU = "TPU"


class MasterStage(enum.StrEnum):
    INIT = "INIT"
    READY = "READY"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    STOPPED = "STOPPED"


class MasterStateBackendType(enum.StrEnum):
    """Accepted for old configurations. The state of a job is always in its cluster's key-value store."""

    RAY_INTERNAL = "RAY_INTERNAL"
    IN_MEMORY = "IN_MEMORY"
    HDFS = "HDFS"


class DLStreamType(enum.StrEnum):
    TASK_STREAM = "TASK_STREAM"
    DATA_STREAM = "DATA_STREAM"


class ExecutionResultType(enum.StrEnum):
    SUCCESS = "SUCCESS"
    FAIL = "FAIL"


class DiagnosticInfoType(enum.StrEnum):
    NORMAL = "NORMAL"
    FATAL = "FATAL"
    ERROR = "ERROR"
    WARNING = "WARNING"


class DiagnosticResponsibility(enum.StrEnum):
    ROOT_CAUSE = "ROOT_CAUSE"
    RELATED = "RELATED"
    BE_AFFECTED = "BE_AFFECTED"
    UNKNOWN = "UNKNOWN"


class WorkloadEntrypointType(enum.StrEnum):
    MODULE_FUNC = "MODULE_FUNC"
    PY_CMD = "PY_CMD"
