"""
The messages of the original's protocol, as objects that scripts build and read.

They carry what `MasterClient` takes and gives. None travels on our wire: the client turns them into requests of the agent. As bytes they are JSON with the
name of their class, and only classes of this module are built from bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import socket
import typing
from dataclasses import dataclass, field
from typing import Any

from dlrover.compat.tools.serialize import JsonSerializable
from dlrover.protocol.addresses import parse_address
from dlrover.protocol.errors import ConfigError

log = logging.getLogger(__name__)

TIMEOUT_SEC = 5


@dataclass
class Message(JsonSerializable):
    def serialize(self) -> bytes:
        return serialize_message(self) or b""


def serialize_message(message: Message | None) -> bytes | None:
    """None for no message."""
    if message is None:
        return None
    fields = {"type": type(message).__name__, "fields": dataclasses.asdict(message)}
    return json.dumps(fields, default=_as_text).encode()


def deserialize_message(data: bytes) -> Any:
    """None, with a warning, for bytes that are not one of these messages."""
    if not data:
        return None
    try:
        told = json.loads(data)
        return _built(_MESSAGES[told["type"]], told["fields"])
    except (ValueError, KeyError, TypeError) as error:
        log.warning("%d bytes are not a message of dlrover.python.common.comm: %s", len(data), error)
        return None


def addr_connected(addr: str) -> bool:
    """Whether something listens at HOST:PORT."""
    try:
        address = parse_address(addr.strip(), shown=addr)
        with socket.create_connection((address.host, address.port), timeout=TIMEOUT_SEC):
            return True
    except (ConfigError, OSError) as error:
        log.warning("Nothing answers at %r: %s", addr, error)
        return False


@dataclass
class Response(Message):
    """What a report comes back with."""

    success: bool = False
    reason: str = ""
    """One sentence where `success` is not all that there is to say."""


class _Envelope(Message):
    def to_json(self, indent: int | None = None) -> dict[str, Any]:
        data: bytes = vars(self)["data"]
        return {**vars(self), "data": base64.b64encode(data).decode()}

    @classmethod
    def from_json(cls, json_data: dict[str, Any]) -> Any:
        return cls(**{**json_data, "data": base64.b64decode(json_data["data"])})


@dataclass
class BaseRequest(_Envelope):
    node_id: int = -1
    node_type: str = ""
    data: bytes = b""


@dataclass
class BaseResponse(_Envelope):
    success: bool = False
    data: bytes = b""


# Data shards.


@dataclass
class Shard(Message):
    name: str = ""
    start: int = 0
    end: int = 0
    indices: list[int] = field(default_factory=list)


@dataclass
class Task(Message):
    task_id: int = 0
    shard: Shard = field(default_factory=Shard)
    type: int = 0
    extended_config: dict[str, str] = field(default_factory=dict)


@dataclass
class TaskRequest(Message):
    dataset_name: str = ""


@dataclass
class TaskResult(Message):
    dataset_name: str = ""
    task_id: int = 0
    err_message: str = ""
    exec_counters: dict[str, int] = field(default_factory=dict)


@dataclass
class DatasetShardParams(Message):
    batch_size: int = 0
    num_epochs: int = 0
    dataset_size: int = 0
    shuffle: bool = False
    num_minibatches_per_shard: int = 0
    dataset_name: str = ""
    task_type: int = 0
    storage_type: str = ""


@dataclass
class ShardCheckpointRequest(Message):
    dataset_name: str = ""


@dataclass
class ShardCheckpoint(Message):
    content: str = ""


class TaskType:
    """As text; `dlrover.proto.elastic_training_pb2` has the numbers."""

    NONE = "NONE"
    TRAINING = "TRAINING"
    EVALUATION = "EVALUATION"
    PREDICTION = "PREDICTION"
    WAIT = "WAIT"
    TRAIN_END_CALLBACK = "TRAIN_END_CALLBACK"


# What a node and a model use, and how far training is.


@dataclass
class GPUStats(Message):
    index: int = 0
    total_memory_mb: int = 0
    used_memory_mb: int = 0
    gpu_utilization: float = 0


@dataclass
class ResourceStats(Message):
    memory: int = 0
    """MiB."""
    cpu: float = 0.0
    gpu_stats: list[GPUStats] = field(default_factory=list)


@dataclass
class TensorStats(Message):
    variable_count: int = 0
    total_variable_size: int = 0
    max_variable_size: int = 0
    kv_embedding_dims: list[int] = field(default_factory=list)
    tensor_alloc_bytes: dict[str, int] = field(default_factory=dict)


@dataclass
class OpStats(Message):
    op_count: int = 0
    update_op_count: int = 0
    read_op_count: int = 0
    input_fetch_dur: int = 0
    flops: int = 0
    op_type: int = 0
    """0: training; 1: anything else."""
    recv_op_count: int = 0


@dataclass
class ModelInfo(Message):
    tensor_stats: TensorStats = field(default_factory=TensorStats)
    op_stats: OpStats = field(default_factory=OpStats)
    instantiation_memory: int = 0
    activation_memory: int = 0


@dataclass
class GlobalStep(Message):
    timestamp: int = 0
    step: int = 1
    elapsed_time_per_step: float = 0.0


@dataclass
class TrainingStatusRequest(Message):
    """No fields."""


@dataclass
class TrainingStatus(Message):
    status: int = 0


@dataclass
class AtorchEvent(Message):
    timestamp: int = 0
    target: str = ""
    name: str = ""
    type: str = ""
    step: int = 0
    step_type: str = ""


@dataclass
class Event(Message):
    event_type: str = ""
    instance: str = ""
    action: str = ""
    msg: str = ""
    labels: dict[str, str] = field(default_factory=dict)


# Nodes and rendezvous.


@dataclass
class NodeMeta(Message):
    type: str = ""
    addr: str = ""
    memory: int = 0
    """MiB."""
    cpu: float = 0.0
    gpu: int = 0
    gpu_type: str = ""
    id: int = 0
    rank: int = 0
    status: str = ""


@dataclass
class NodeAddress(NodeMeta):
    """The same fields."""


@dataclass
class NodeEvent(Message):
    event_type: str = ""
    event_message: str = ""
    event_time: float = 0.0
    event_elapsed_time: float = 0.0
    node: NodeMeta = field(default_factory=NodeMeta)


@dataclass
class NodeFailure(Message):
    error_data: str = ""
    restart_count: int = 0
    level: str = ""


@dataclass
class RunningNodesRequest(Message):
    """No fields."""


@dataclass
class RunningNodes(Message):
    nodes: list[NodeMeta] = field(default_factory=list)


@dataclass
class RendezvousParams(Message):
    min_nodes: int = 0
    max_nodes: int = 0
    waiting_timeout: int = 0
    node_unit: int = 0
    join_timeout: int = 0


@dataclass
class RendezvousRequest(Message):
    node_id: int = 0
    local_world_size: int = 0
    rdzv_name: str = ""


@dataclass
class CommWorldRequest(RendezvousRequest):
    """The same fields."""


@dataclass
class WaitingNodeNumRequest(RendezvousRequest):
    """The same fields."""


@dataclass
class JoinRendezvousRequest(RendezvousRequest):
    node_rank: int = -1
    node_ip: str = ""


@dataclass
class RendezvousState(Message):
    world: dict[int, int] = field(default_factory=dict)
    waiting_num: int = 0
    round: int = 0
    group: int = 0


@dataclass
class RdzvBlocked(Message):
    blocked: bool = False
    reason: str = ""


@dataclass
class NetworkReadyRequest(Message):
    """No fields."""


@dataclass
class StragglerExistRequest(Message):
    """No fields."""


@dataclass
class NetworkCheckResult(Message):
    nodes: list[int] = field(default_factory=list)
    reason: str = ""


@dataclass
class SyncTrainingPort(Message):
    port: int = 0
    newport: int = 0


@dataclass
class PreCheckRequest(Message):
    timestamp: int = 0
    type: str = "INITIAL"


@dataclass
class PreCheckResponse(Message):
    status: str = ""
    reason: str = ""


@dataclass
class ElasticRunConfigRequest(Message):
    """No fields."""


@dataclass
class ElasticRunConfig(Message):
    configs: dict[str, str] = field(default_factory=dict)


# The store, sync points, checkpoints.


@dataclass
class KeyValuePair(Message):
    key: str = ""
    value: bytes = b""
    op: str = ""


@dataclass
class KeyValuePairs(Message):
    kvs: dict[str, bytes] = field(default_factory=dict)
    op: str = ""


@dataclass
class SyncJoin(Message):
    sync_name: str = ""


@dataclass
class SyncFinish(Message):
    sync_name: str = ""


@dataclass
class SyncBarrier(Message):
    barrier_name: str = ""
    notify: bool = False


@dataclass
class NodeCheckpointState(Message):
    step: int = 0


# Parameter servers.


@dataclass
class PsReady(Message):
    """No fields."""


@dataclass
class PsNodesRequest(Message):
    """No fields."""


@dataclass
class PsNodes(Message):
    nodes: list[NodeMeta] = field(default_factory=list)
    new_ps_ready: bool = False
    ps_failure: bool = False


@dataclass
class ClusterVersionRequest(Message):
    task_type: str = ""
    task_id: int = 0
    version_type: str = ""


@dataclass
class ClusterVersion(ClusterVersionRequest):
    version: int = 0


# Tuned settings.


@dataclass
class DataLoaderConfig(Message):
    version: int = 0
    dataloader_name: str = ""
    last_batch_size: int = 0
    batch_size: int = 0
    num_workers: int = 0
    pin_memory: int = 0


@dataclass
class OptimizerConfig(Message):
    version: int = 0
    optimizer_name: str = ""
    learning_rate: float = 0.0
    weight_decay: float = 0.0


@dataclass
class ParallelConfig(Message):
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    restart: bool = False


@dataclass
class ParallelConfigRequest(Message):
    """No fields."""


@dataclass
class CheckHardwareResetRequest(Message):
    """No fields."""


# Diagnosis.


@dataclass
class DiagnosisAction(Message):
    action_cls: str = ""
    action_content: str = ""


@dataclass
class HeartBeat(Message):
    timestamp: int = 0


@dataclass
class HeartbeatResponse(Message):
    action: DiagnosisAction = field(default_factory=DiagnosisAction)


@dataclass
class DiagnosisReportData(Message):
    data_cls: str = ""
    data_content: str = ""
    node_rank: int = -1


_MESSAGES: dict[str, type[Message]] = {
    name: value for name, value in globals().items() if isinstance(value, type) and issubclass(value, Message)
}


def _as_text(value: object) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} does not fit into a message")


def _built(kind: type[Message], told: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    names = {each.name for each in dataclasses.fields(kind)}
    return kind(**{name: _value(hints[name], value) for name, value in told.items() if name in names})


def _value(hint: Any, value: Any) -> Any:
    """JSON has no bytes, no keys but text, and no classes."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return [_value(arguments[0], each) for each in value]
    if typing.get_origin(hint) is dict:
        return {arguments[0](key): _value(arguments[1], each) for key, each in value.items()}
    if hint is bytes:
        return base64.b64decode(value)
    return _built(hint, value) if isinstance(hint, type) and issubclass(hint, Message) else value
