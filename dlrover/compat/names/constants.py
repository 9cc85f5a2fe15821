"""
The constants of the original, by the class names and values that its users write.

Nothing of ours reads them. Plain classes with plain values, so that `NodeType.WORKER` is a `str` wherever a script puts it.
"""

from __future__ import annotations

import enum

# The job and where it runs.


class PlatformType:
    KUBERNETES = "k8s"
    PY_KUBERNETES = "pyk8s"
    RAY = "ray"
    LOCAL = "local"


class DistributionStrategy:
    LOCAL = "Local"
    PS = "ParameterServerStrategy"
    ALLREDUCE = "AllreduceStrategy"
    CUSTOM = "CustomStrategy"


class OptimizeMode:
    MANNUAL = "manunal"
    """The published spelling."""
    SINGLE_JOB = "single-job"
    CLUSTER = "cluster"


class ResourceOptimizerName:
    BRAIN = "brain"
    LOCAL = "local"


class ReporterType:
    DLROVER_BRAIN = "brain"
    LOCAL = "local"


class JobOptStage:
    CREATE = "job_stage_create"
    PS_INITIAL = "job_stage_ps_initial"
    WORKER_INITIAL = "job_stage_worker_initial"
    PS_RUNNING = "job_stage_ps_running"
    WORKER_RUNNING = "job_stage_worker_running"


class OptimizeWorkerPhase:
    SAMPLE = "sample"
    INITIAL = "initial"
    STABLE = "stable"


class PriorityClass:
    LOW = "low"
    HIGH = "high"


class JobStage:
    JOB_INIT = "init"
    JOB_RUNNING = "running"
    JOB_STOPPING = "stopping"
    JOB_STOPPED = "stopped"
    JOB_SUSPENDED = "suspended"
    JOB_RESTARTING = "restarting"


class JobExitReason:
    SUCCEEDED = "Completed"
    CODE_ERROR = "CodeError"
    WORKER_OOM = "WorkerOOM"
    WORKER_ERROR = "WorkerError"
    PS_OOM_ERROR = "PSOOM"
    PS_ERROR = "PSError"
    EVALUATOR_OOM = "EvaluatorOOM"
    EVALUATOR_ERROR = "EvaluatorError"
    UNKNOWN_ERROR = "UnknownError"
    HANG_ERROR = "HangError"
    RDZV_TIMEOUT_ERROR = "RdzvTimeout"
    PENDING_TIMEOUT = "PendingTimeout"
    UNCOMPLETED_TIMEOUT = "UncompletedTimeout"
    NODE_CHECK_FAILED = "NodeCheckFailed"
    BY_INTERNAL_SUGGESTION = "ByInternalSuggestion"
    RESTART_OVER_LIMIT = "RestartOverLimit"


class JobConstant:
    """Seconds."""

    RDZV_JOIN_TIMEOUT_DEFAULT = 600
    INSUFFICIENT_NODE_TIMEOUT_DEFAULT_MIN = 600
    INSUFFICIENT_NODE_TIMEOUT_DEFAULT_MAX = 3600
    PENDING_NODE_TIMEOUT_DEFAULT_MIN = 600
    GROUP_PENDING_NODE_TIMEOUT_DEFAULT_MIN = 300
    NODE_CHECK_TIMEOUT = 300
    NODE_CHECK_NEXT_ROUND_TIMEOUT = 5
    SUCCEEDED_POD_TERMINATING_TIMEOUT = 1200
    MASTER_CLIENT_DEFAULT_TIMEOUT = 60
    MASTER_CLIENT_GRPC_DEFAULT_TIMEOUT = 60
    MASTER_CLIENT_CHECK_NODE_TIMEOUT = 360
    MASTER_CLIENT_CHECK_FAULT_SLEEP_TIMEOUT = 1
    MASTER_CLIENT_CHECK_STRAGGLER_SLEEP_TIMEOUT = 1
    TRAINING_AGENT_LOOP_DEFAULT_INTERVAL = 15
    RENDEZVOUS_DEFAULT_INTERVAL = 5
    SYNC_PORTS_DEFAULT_INTERVAL = 5
    PRE_CHECK_WAIT_SECS = 10


# Nodes.


class NodeType:
    MASTER = "master"
    """TensorFlow's chief by its other name."""
    PS = "ps"
    WORKER = "worker"
    EVALUATOR = "evaluator"
    CHIEF = "chief"
    DLROVER_MASTER = "dlrover-master"


class NodeStatus:
    INITIAL = "Initial"
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FINISHED = "Finished"
    DELETED = "Deleted"
    BREAKDOWN = "Breakdown"
    UNKNOWN = "Unknown"

    @classmethod
    def is_terminal_status(cls, status: str) -> bool:
        return status in (cls.SUCCEEDED, cls.FAILED, cls.FINISHED, cls.DELETED)


class NodeEventType:
    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    ERROR = "ERROR"
    FINISHED = "FINISHED"
    SUCCEEDED_EXITED = "SUCCEEDED_EXITED"
    FAILED_EXITED = "FAILED_EXITED"
    NODE_CHECK_SUCCEEDED = "NODE_CHECK_SUCCEEDED"
    NODE_CHECK_FAILED = "NODE_CHECK_FAILED"
    MASTER_CONNECTION_FAILED = "MASTER_CONNECTION_FAILED"
    WAIT_PRE_CHECK = "WAIT_PRE_CHECK"


class NodeExitReason:
    Succeeded = "Succeeded"
    KILLED = "Deleted"
    OOM = "OOMKilled"
    FATAL_ERROR = "Error"
    UNKNOWN_ERROR = "UnknownError"
    HARDWARE_ERROR = "HardwareError"
    NO_HEARTBEAT = "NoHeartBeat"
    DIAG_FAIL = "DiagnosticFailure"
    RELAUNCHED = "Relaunched"
    CHECK_FAIL = "CheckFailure"


class NodeExitDescription:
    GPU_INVALID_MSG = "The basic check of the node's GPU failed."
    NODE_STRAGGLE_MSG = "The node is a straggler and leaves."
    NODE_FAILED_MSG = "The node failed the node check before training."


class NodeErrorMessage:
    NETWORKER_ERROR = "Network is breakdown"
    SOCKET_GAIERROR = "Name or service not known"


class ExitCode:
    FATAL_ERROR_CODE = 1
    KILLED_CODE = 137
    TERMED_CODE = 143
    CORE_DUMP_ERROR_CODE = 134
    OOM_CODE = 247
    GPU_DRIVER_ERROR = 201
    GPU_POD_RESIDUE = 202
    GPU_INFOROM_CORRUPTED = 14
    CONTAINER_FAILED_OR_UNKNOWN_DEVICE = 128


class NodeResourceLimit:
    """Memory in MiB, times in seconds."""

    MAX_CPU_CORES = 32
    MIN_CPU_CORES = 4
    MIN_MEMORY = 6144
    MAX_MEMORY = 65536
    MAX_WORKER_NUM = 60
    MAX_PS_NUM = 15
    INCREMENTAL_MEMORY_FACTOR = 2
    MAX_INCREMENTAL_MEMORY = 8192
    HUGE_MEMORY_THRESHOLD = 102400
    HUGE_CPU_THRESHOLD = 100
    WAIT_CHIEF_TIMEOUT_SECS = 1800
    WAIT_DATA_SHARD_SERVICE_CREATION_SECS = 600
    PS_CPU_GROWTH_RATE = 1.2
    PS_CPU_DECREASED_RATE = 0.5
    MIN_VALID_MEMORY = 1024
    MIN_VALID_CPU = 2
    MAX_HANG_TIMEOUT_SECS = 7200


class DefaultNodeResource:
    PS_NUM = 1
    PS_MEMORY = 8000
    PS_CPU = 1
    WORKER_NUM = 2
    WORKER_CPU = 1
    WORKER_MEMORY = 8000


class DefaultResourceLimits:
    CPU_LIMIT = 100
    MEMORY_LIMIT = "102400Mi"
    GPU_LIMIT = 4


class MemoryUnit:
    MB = 1 << 20


class PendingTimeoutStrategyType:
    SKIP = 0
    NECESSARY = 1
    ALL = 2


class PSClusterVersionType:
    GLOBAL = "GLOBAL"
    LOCAL = "LOCAL"
    RESTORED = "RESTORED"


# Devices.


class ResourceType(enum.Enum):
    CPU = "CPU"
    GPU = "GPU"


class Accelerators:
    NVIDIA_GPU = "nvidia.com/gpu"
    ASCEND_NPU = "ascend-npu"
    MTHREADS_GPU = "mthreads.com/gpu"
    METAX_GPU = "metax-tech.com/gpu"
    GENERIC_CPU = "cpu"


class BackendType:
    GLOO = "gloo"
    NCCL = "nccl"
    HCCL = "hccl"


class AscendConstants:
    NPU_PER_NODE = 16
    HCCL_PORT_START = "HCCL_IF_BASE_PORT"
    HCCL_PORT_START_DEFAULT = 64000


class GpuMetricEnum:
    GPU_FREE_MEM = "DCGM_FI_DEV_FB_FREE"
    GPU_USED_MEM = "DCGM_FI_DEV_FB_USED"
    GPU_UTIL = "DCGM_FI_DEV_GPU_UTIL"
    GPU_TEMP = "DCGM_FI_DEV_GPU_TEMP"
    GPU_SM_UTIL = "DCGM_FI_PROF_SM_OCCUPANCY"
    GPU_SM_ACTIVE = "DCGM_FI_PROF_SM_ACTIVE"
    GPU_TENSOR_UTIL = "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"


class MthreadsGPUMetricEnum:
    GPU_FREE_MEM = GpuMetricEnum.GPU_FREE_MEM
    GPU_USED_MEM = GpuMetricEnum.GPU_USED_MEM
    GPU_UTIL = GpuMetricEnum.GPU_UTIL
    GPU_TEMP = GpuMetricEnum.GPU_TEMP
    GPU_SM_UTIL = "DCGM_FI_PROF_MP_OCCUPANCY"
    GPU_TENSOR_UTIL = "DCGM_FI_PROF_PIPE_MT_TENSOR_ACTIVE"


class NpuMetricEnum:
    NPU_TOTAL_MEM = "npu_chip_info_total_memory"
    NPU_USED_MEM = "npu_chip_info_used_memory"
    NPU_UTIL = "npu_chip_info_utilization"
    NPU_TEMP = "npu_chip_info_temperature"
    NPU_HEALTH_STATE = "npu_chip_info_health_status"
    NPU_LINK_STATE = "npu_chip_info_link_status"
    NPU_OPTICAL_STATE = "npu_chip_optical_state"
    NPU_NETWORK_STATE = "npu_chip_info_network_status"
    NPU_RDMA_RX = "npu_chip_info_bandwidth_rx"
    NPU_RDMA_TX = "npu_chip_info_bandwidth_tx"


# Rendezvous, checks, failures.


class RendezvousName:
    TRAINING = "elastic-training"
    NETWORK_CHECK = "network-check"
    ELASTIC_TRAINING = TRAINING
    """As the first releases called it."""


class RendezvousErrorType:
    PEND_TIMEOUT = "pend-timeout"
    JOIN_TIMEOUT = "join-timeout"


class NetworkFailureReason:
    NO_INIT = "Not Initialized"
    NODE_FAILURE = "Node Failure"
    WAITING_NODE = "Waiting node"
    NEXT_PHASE = "Next Phase"


class GroupNodeCheckPhase:
    INTRA_INITIAL = "intra_initial"
    INTRA_DIAGNOSTIC = "intra_diagnostic"
    INTER_INITIAL = "inter_initial"
    INTER_DIAGNOSTIC = "inter_diagnostic"


class TrainingExceptionLevel:
    RDZV_ERROR = "rdzv_error"
    PROCESS_ERROR = "process_error"
    NODE_ERROR = "node_error"
    WARNING = "warning"
    INFO = "info"
    ERROR = "error"


class PreCheckStatus:
    CHECKING = "CHECKING"
    FAIL = "FAIL"
    PASS = "PASS"
    DISABLED = "DISABLED"


class HangDetectionStrategy:
    LOG_ONLY = 0
    DO_NOTIFY = 1
    DO_FAILOVER = 2


class TrainingLoopStatus:
    START = 1
    END = 2
    PENDING = 3


class CustomMetricKeys:
    RDZV_ROUND = "rdzv_round"
    TRAINING_ERROR_LEVEL = "error_level"
    ERROR_CONTENT = "error_content"


class EventReportConstants:
    TYPE_INFO = "info"
    TYPE_WARN = "warn"
    TYPE_ERROR = "error"
    JOB_INSTANCE = "job"
    ACTION_MASTER_START = "master_start"
    ACTION_MASTER_END = "master_end"
    ACTION_JOB_START = "job_start"
    ACTION_JOB_SUCCESS = "job_success"
    ACTION_JOB_FAIL = "job_fail"
    ACTION_WORKER_CREATE = "worker_create"
    ACTION_WORKER_PENDING = "worker_pending"
    ACTION_WORKER_NO_HEARTBEAT = "worker_no_heartbeat"
    ACTION_STATUS_UPDATE = "status_update"
    ACTION_EARLY_STOP = "early_stop"
    ACTION_STOP = "stop"
    ACTION_RESTART = "restart"
    ACTION_RELAUNCH = "relaunch_worker"
    ACTION_NOT_RELAUNCH = "not_relaunch_worker"
    ACTION_GLOBAL_STEP = "global_step"
    ACTION_RDZV_JOIN = "join_rendezvous"
    ACTION_RDZV_COMPLETE = "rendezvous_complete"
    ACTION_RDZV_TIMEOUT = "rendezvous_timeout"
    ACTION_TRAINING_START = "training_start"
    ACTION_RESTART_TRAINING = "restart_training"
    ACTION_SAVE_SHARD_START = "save_shard_start"
    ACTION_SAVE_SHARD_COMPLETE = "save_shard_complete"
    ACTION_SAVE_SHARD_ERROR = "save_shard_error"
    ACTION_MEM_CKPT_START = "mem_ckpt_start"
    ACTION_MEM_CKPT_COMPLETE = "mem_ckpt_complete"
    ACTION_RESUME_MEM_CKPT_START = "resume_mem_ckpt_start"
    ACTION_RESUME_MEM_CKPT_COMPLETE = "resume_mem_ckpt_complete"
    ACTION_HANG_WARN = "hang_warning"
    ACTION_DEVICE_WARNING = "device_warning"
    ACTION_PRE_CHECK_DISABLE = "pre_check_disable"
    ACTION_PRE_CHECK_TIMEOUT = "pre_check_timeout"
    ACTION_PRE_CHECK_ERROR = "pre_check_error"
    ACTION_PRE_CHECK_PASS = "pre_check_pass"
    ACTION_PRE_CHECK_FAIL = "pre_check_fail"


# Data and checkpoints.


class DatasetType:
    TEXT = "text"
    MAXCOMPUTE_TABLE = "maxcompute_table"


class TaskType:
    TRAINING = "training"
    EVALUATION = "evaluation"
    PREDICTION = "prediction"


class CheckpointConstant:
    TRACER_FILE_NAME = "dlrover_latest.txt"
    MODEL_STATES_NAME = "model_states"
    OPTIM_STATES_NAME = "optim_states"
    SAVE_TIMEOUT = 600


class ConfigPath:
    ENV_PARAL_CONFIG = "DLROVER_PARAL_CONFIG_PATH"
    PARAL_CONFIG = "/tmp/dlrover/auto_paral_config.json"
    ENV_RUNTIME_METRICS = "RUNTIME_METRICS_PATH"
    RUNTIME_METRICS = "/tmp/dlrover/runtime_metrics.json"
    NETWORK_CHECK_DATA_DIR = "/tmp/dlrover/network_check/"


class ScriptPath:
    RUN_AFFINITY_SCRIPT = "dlrover_run_affinity.sh"


# Names of environment variables.


class NodeEnv:
    DLROVER_MASTER_ADDR = "DLROVER_MASTER_ADDR"
    DLROVER_MASTER_SERVICE_TYPE = "DLROVER_MASTER_SERVICE_TYPE"
    MASTER_CLIENT_TIMEOUT = "MASTER_CLIENT_TIMEOUT"
    DLROVER_TRAINING_ELASTIC_MODE = "DLROVER_TRAINING_ELASTIC_MODE"
    DLROVER_EXTENSION_DYNAMIC_FAILOVER = "DLROVER_EXTENSION_DYNAMIC_FAILOVER"
    JOB_NAME = "ELASTIC_JOB_NAME"
    JOB_UID = "JOB_UID"
    POD_NAME = "POD_NAME"
    RELAUNCHED_POD = "RELAUNCHED_POD"
    MONITOR_ENABLED = "MONITOR_ENABLED"
    AUTO_MONITOR_WORKLOAD = "AUTO_MONITOR_WORKLOAD"
    """What `MONITOR_ENABLED` was called at first."""
    NODE_TYPE = "NODE_TYPE"
    NODE_ID = "NODE_ID"
    NODE_NUM = "NODE_NUM"
    NODE_RANK = "NODE_RANK"
    WORKER_TYPE = "WORKER_TYPE"
    WORKER_ID = "WORKER_ID"
    WORKER_NUM = "WORKER_NUM"
    WORKER_RANK = "WORKER_RANK"
    RANK = "RANK"
    WORLD_SIZE = "WORLD_SIZE"
    TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
    MASTER_ADDR = "MASTER_ADDR"
    MASTER_PORT = "MASTER_PORT"
    TRAINING_LOG_FILE = "TRAINING_LOG_FILE"
    FAILURE_NODE_ERRORS = "FAILURE_NODE_ERRORS"
    GRPC_ENABLE_FORK = "GRPC_ENABLE_FORK_SUPPORT"
    GRPC_POLL_STRATEGY = "GRPC_POLL_STRATEGY"


class UserEnv:
    USER_ID = "USER_ID"


class BasicClass:
    LOG_LEVEL_ENV = "DLROVER_LOG_LEVEL"
    LOG_ROOT_DIR_ENV = "DLROVER_LOG_ROOT_DIR"
    LOG_ROTATE_MAX_BYTES_ENV = "DLROVER_LOG_ROTATE_MAX_BYTES"
    LOG_ROTATE_BACKUP_COUNT_ENV = "DLROVER_LOG_ROTATE_BACKUP_COUNT"
    LOG_AGENT_DIR_ENV = "DLROVER_LOG_AGENT_DIR"


# The wire.


class CommunicationType:
    COMM_SERVICE_GRPC = "grpc"
    COMM_SERVICE_HTTP = "http"
    COMM_SERVICE_RAY = "ray"


class CommunicationReqType:
    COMM_REQ_TYPE_GET = "get"
    COMM_REQ_TYPE_REPORT = "report"


class CommunicationReqMeta:
    COMM_META_JOB_UID = "job_uid"
    COMM_META_JOB_UID_INVALID_MSG = "Job uid is invalid"


class GRPC:
    MAX_SEND_MESSAGE_LENGTH = 256 << 20
    MAX_RECEIVE_MESSAGE_LENGTH = 256 << 20


class KeyValueOps:
    ADD = "add"
    APPEND = "append"
    GET = "get"
    SET = "set"
    DELETE = "delete"


class DictKey:
    LOGS = "logs"


# Kubernetes.


class ElasticJobApi:
    GROUP = "elastic.iml.github.io"
    VERION = "v1alpha1"
    """The published spelling."""
    VERSION = VERION
    SCALEPLAN_KIND = "ScalePlan"
    SCALEPLAN_PLURAL = "scaleplans"
    ELASTICJOB_KIND = "elasticjob"
    ELASTICJOB_PLURAL = "elasticjobs"


class ElasticJobLabel:
    APP_NAME = "dlrover"
    JOB_KEY = "elasticjob.dlrover/name"
    REPLICA_TYPE_KEY = "elasticjob.dlrover/replica-type"
    REPLICA_INDEX_KEY = "elasticjob.dlrover/replica-index"
    RANK_INDEX_KEY = "elasticjob.dlrover/rank-index"
    RELAUNCH_COUNT = "elasticjob.dlrover/relaunch-count"


class SchedulingLabel:
    NODE_GROUP = "scheduling/rack-group"
    NODE_GROUP_SIZE = "scheduling/rack-group-num"
    NODE_GROUP_ID = "scheduling/rack-id"


class ScalePlanLabel:
    SCALE_TYPE_KEY = "scale-type"
    MANUAL_SCALE = "manual"
    AUTO_SCALE = "auto"


class k8sAPIExceptionReason:  # noqa: N801
    NOT_FOUND = "Not Found"
