"""
`MasterClient`: the original's door to the master for scripts.

Inside `dlrover-run` every method goes over the agent's unix socket; outside, `build_master_client()` gives a `LocalMasterClient`, which answers within the
process. What the agent does by itself here (heartbeats, resources, node events) is accepted, and the answer's `reason` says so.
What belongs to a part of the software that a job here does not have is answered as the original answers it without that part, with one line in the log.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dlrover.compat.client import comm
from dlrover.compat.client.agreement import agree_on_port, agree_on_step
from dlrover.compat.client.paral_config_tuner import ParalConfigTuner
from dlrover.compat.client.tasks import TaskBook
from dlrover.compat.launch import environment as node_environment
from dlrover.compat.names.constants import (
    JobConstant,
    NetworkFailureReason,
    NodeEnv,
    NodeStatus,
    NodeType,
    TrainingExceptionLevel,
    TrainingLoopStatus,
)
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.fleet import (
    AskClusterVersion,
    AskPsNodes,
    ClusterVersion,
    ErrorLevel,
    PsNodes,
    PsReady,
    ReportNodeError,
    RestartJob,
    UpdateClusterVersion,
    VersionType,
)
from dlrover.protocol.messages.fleet import NodeType as PlatformNodeType
from dlrover.protocol.messages.job import (
    AskStatus,
    BlockRendezvous,
    Incarnation,
    JobStatus,
    NodeId,
    Reply,
    Round,
    Stage,
    StopJob,
    UnblockRendezvous,
    WorkerRequest,
)
from dlrover.protocol.messages.job import NodeStatus as NodeView
from dlrover.protocol.messages.kv import KvAdd, KvGet, KvNumber, KvSet, KvValues
from dlrover.protocol.messages.requests import RestartWorkers
from dlrover.protocol.messages.scaling import JobFacts
from dlrover.protocol.messages.sync import BarrierOpen, JoinSync, NotifyBarrier, SyncFinished, SyncJoined, SyncState
from dlrover.protocol.messages.watch import MAX_SAMPLE_TEXT, NodeEvent, SampleTaken
from dlrover.trainer import environment, phases, progress
from dlrover.trainer.agent_link import Link, current_link

if TYPE_CHECKING:
    from dlrover.agent.monitor.old_diagnosis_data import DiagnosisData
    from dlrover.master.diagnosis.old_actions import DiagnosisAction

log = logging.getLogger(__name__)

_MAX_ERROR_DATA_LEN = 2048
_DATA_PATIENCE = 600.0
"""Seconds for a task: a master that restarts is back sooner."""
_LONGEST_BLOCK = 3600.0
_NOBODY, _NO_LIFE = NodeId(-1), Incarnation(0)
"""The agent puts its own in."""
_AGENT_DOES = "The agent of this node reports this by itself. The values given here are not used."
_ALONE = "This call has no effect outside of `dlrover-run`, because there is no master."
_PHASES = {"#save": phases.CHECKPOINT, "#evaluate": phases.EVALUATION}
_EVENT_LEVELS = {"info": "info", "warn": "warn", "warning": "warn", "error": "error"}


class MasterClient:
    """For several threads. Commands raise `Rejected` or, if the master does not answer in time, `Unavailable`."""

    _instance: ClassVar[MasterClient | None] = None
    _instance_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        master_addr: str = "",
        node_id: int = 0,
        node_type: str = NodeType.WORKER,
        timeout: float = JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT,
        *,
        link: Link | None = None,
    ) -> None:
        where = environment.current()
        self._master_addr, self._node_id, self._node_type = master_addr, node_id, node_type
        self._timeout = timeout
        self._link = current_link() if link is None else link
        self._round = Round(0) if where is None else where.round
        self._tasks = TaskBook(self._link, self._round, max(timeout, _DATA_PATIENCE))
        self._generations: dict[str, int] = {}
        """Of the sync points that this process has joined."""
        self._open_phases: dict[str, int] = {}
        self._said: set[str] = set()

    @classmethod
    def singleton_instance(cls, *arguments: Any, **named: Any) -> MasterClient:
        """The process's one client; the arguments of the first call count."""
        with MasterClient._instance_lock:
            if MasterClient._instance is None:
                MasterClient._instance = build_master_client(*arguments, **named)
            return MasterClient._instance

    # Key-value store: of the whole job, so keys outlive a restart of the workers.

    def kv_store_set(self, key: str, value: bytes | str) -> bool:
        self._ask(KvSet(items={key: _bytes(value)}))
        return True

    def kv_store_get(self, key: str) -> bytes:
        """Empty: there is no such key."""
        return self.kv_store_multi_get([key]).get(key, b"")

    def kv_store_add(self, key: str, value: int) -> int:
        reply = self._ask(KvAdd(key=key, amount=int(value)))
        assert isinstance(reply, KvNumber), reply
        return reply.number

    def kv_store_multi_get(self, keys: Sequence[str]) -> dict[str, bytes]:
        """All of them, or an empty map if one is missing."""
        if not keys:
            return {}
        try:
            reply = self._ask(KvGet(keys=tuple(keys)))
        except Rejected as error:
            if error.code != ErrorCode.KV_TIMEOUT:
                raise
            return {}
        assert isinstance(reply, KvValues), reply
        return dict(zip(keys, reply.values, strict=True))

    def kv_store_multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> bool:
        """Values beyond the number of keys are ignored; fewer raise IndexError."""
        self._ask(KvSet(items={key: _bytes(values[index]) for index, key in enumerate(keys)}))
        return True

    # Data shards.

    def report_dataset_shard_params(
        self,
        batch_size: int,
        num_epochs: int | None = None,
        dataset_size: int | None = None,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 0,
        dataset_name: str | None = None,
        task_type: int = 0,
        storage_type: str = "",
    ) -> comm.Response:
        """The first registration of a name counts. One with another cut is refused."""
        try:
            self._tasks.register(
                dataset_name or "",
                batch_size=batch_size,
                num_epochs=1 if num_epochs is None else num_epochs,
                dataset_size=dataset_size or 0,
                shuffle=shuffle,
                num_minibatches_per_shard=num_minibatches_per_shard,
                task_type=task_type,
                storage_type=storage_type,
            )
        except (ConfigError, Rejected) as error:
            log.warning("Dataset %r is not registered: %s", dataset_name, error)
            return comm.Response(False, str(error))
        return comm.Response(True)

    def get_task(self, dataset_name: str) -> tuple[bool, comm.Task]:
        """
        Whether the master answered, and the task: without records at the end of the data (id -1), of type WAIT while others hold the
        rest. Never raises.
        """
        try:
            return True, self._tasks.take(dataset_name)
        except Rejected as error:
            log.warning("There is no task of dataset %r: %s", dataset_name, error)
            return True, comm.Task()
        except Unavailable as error:
            log.warning("The master gave no task of dataset %r: %s", dataset_name, error)
            return False, comm.Task()

    def report_task_result(self, dataset_name: str, task_id: int, err_msg: str = "") -> comm.Response:
        return self._tasks.finish(dataset_name, task_id, err_msg)

    def get_dataset_epoch(self, dataset_name: str) -> int:
        """How many epochs have begun."""
        return self._tasks.num_epochs_begun(dataset_name)

    def get_dataset_shard_num(self, dataset_name: str) -> int:
        """Tasks that are not done, of all epochs."""
        return self._tasks.num_shards_left(dataset_name)

    def reset_dataset(self, dataset_name: str) -> None:
        self._tasks.reset(dataset_name)

    def get_shard_checkpoint(self, dataset_name: str) -> str:
        return self._tasks.checkpoint(dataset_name)

    def report_shard_checkpoint(self, shard_checkpoint: str) -> comm.Response:
        try:
            self._tasks.restore(shard_checkpoint)
        except Rejected as error:
            log.warning("The dataset checkpoint is not restored: %s", error)
            return comm.Response(False, str(error))
        return comm.Response(True)

    # Progress.

    def report_global_step(
        self, global_step: int, timestamp: float = 0, elapsed_time_per_step: float = 0
    ) -> comm.Response:
        progress.report(int(global_step))
        return comm.Response(True)

    def report_atorch_event(
        self,
        event_ts: float,
        event_target: str,
        event_name: str,
        event_type: str,
        event_step: int,
        step_type: str = "",
    ) -> comm.Response:
        """The end of a `#step` is progress; `#save` and `#evaluate` say what the worker is doing until they end."""
        if event_name == "#step" and event_type == "END":
            progress.report_from_span(int(event_step))
        elif event_name in _PHASES and (writer := phases.current()) is not None:
            if event_type == "BEGIN":
                self._open_phases[event_name] = writer.enter(_PHASES[event_name])
            elif event_name in self._open_phases:
                writer.leave(self._open_phases.pop(event_name))
        return comm.Response(True)

    def query_training_status(self) -> int:
        is_begun = any(dataset.num_consumed for dataset in self._status().datasets)
        return TrainingLoopStatus.START if is_begun else TrainingLoopStatus.PENDING

    # Sync points and barriers: of this round of the job.

    def join_sync(self, sync_name: str) -> bool:
        try:
            reply = self._ask(JoinSync(name=sync_name, round=self._round))
        except Rejected as error:
            log.warning("Joining sync point %r failed: %s", sync_name, error)
            return False
        assert isinstance(reply, SyncJoined), reply
        self._generations[sync_name] = reply.generation
        return not reply.is_late

    def sync_finished(self, sync_name: str) -> bool:
        generation = self._generations.get(sync_name, 0)
        return self._is_reached(SyncFinished(name=sync_name, round=self._round, generation=generation))

    def barrier(self, barrier_name: str, notify: bool = False) -> bool:
        """With `notify`: open it. Otherwise whether it was ever opened; does not wait."""
        if not notify:
            return self._is_reached(BarrierOpen(name=barrier_name, round=self._round, generation=1))
        try:
            self._ask(NotifyBarrier(name=barrier_name, round=self._round))
        except Rejected as error:
            log.warning("Opening barrier %r failed: %s", barrier_name, error)
            return False
        return True

    # The nodes of the job.

    def get_running_nodes(self) -> list[comm.NodeMeta]:
        return [
            comm.NodeMeta(
                type=self._node_type, addr=node.host, id=node.node, rank=node.node_rank, status=NodeStatus.RUNNING
            )
            for node in self._nodes()
            if node.status == "alive" and node.wish == "run"
        ]

    def num_nodes_waiting(self, rdzv_name: str) -> int:
        """Nodes that would enlarge the world; standby nodes do not count. -1: the job ends. 0 if no master answers."""
        try:
            status = self._status()
        except DLRoverError as error:
            log.warning("The number of waiting nodes is unknown: %s", error)
            return 0
        is_ending = status.end is not None or status.stage in (Stage.STOPPING, Stage.STOPPED)
        return -1 if is_ending else status.num_pending

    def join_rendezvous(self, node_rank: int, local_world_size: int, rdzv_name: str = "") -> int:
        """The round that this worker runs in. The agent joins for its workers."""
        self._say_once("join_rendezvous", "This call has no effect: the agent joins the rendezvous for its workers.")
        return self._round

    def get_comm_world(self, rdzv_name: str, node_rank: int) -> tuple[int, int, dict[int, int]]:
        """Round, group (always 0) and the world: node rank to number of workers, in the order of the world."""
        members = sorted((node for node in self._nodes() if node.group_rank >= 0), key=lambda node: node.group_rank)
        return self._round, 0, {int(node.node_rank): node.local_world_size for node in members}

    def check_fault_node(self, timeout: float = 300) -> tuple[list[int], str]:
        """Ranks that the newest node check found faulty. Workers start after the check, so nothing is waited for."""
        return self._checked("faulty")

    def check_straggler(self, timeout: float = 300) -> tuple[list[int], str]:
        return self._checked("straggler")

    def network_check_success(self, timeout: float = 300) -> bool:
        return not self._checked("faulty")[0]

    def report_rdzv_params(
        self, min_nodes: int, max_nodes: int, waiting_timeout: float, node_unit: int, joint_timeout: float = 0
    ) -> bool:
        """False: the first agent has set them, from the options of the launch."""
        self._say_once(
            "report_rdzv_params", "These values have no effect: the options of `dlrover-run` set the rendezvous."
        )
        return False

    def set_rdzv_blocked(self, blocked: bool, reason: str = "") -> None:
        """No round completes while this node blocks: for an hour at most, or until it is said again or taken back."""
        if blocked:
            why = reason.strip() or "blocked by a worker"
            self._ask(BlockRendezvous(node=_NOBODY, incarnation=_NO_LIFE, reason=why, lease=_LONGEST_BLOCK))
        else:
            self._ask(UnblockRendezvous(node=_NOBODY, incarnation=_NO_LIFE))

    def get_pre_check_result(self) -> str:
        return self._status().pre_check.stage.value

    # What the agent tells by itself.

    def report_heart_beat(self, timestamp: float) -> DiagnosisAction:
        """Always `NoAction`: what the master wants goes to the agent."""
        from dlrover.master.diagnosis.old_actions import NoAction

        self._say_once("report_heart_beat", _AGENT_DOES)
        return NoAction()

    def report_used_resource(self, memory: float, cpu: float, gpu_stats: Sequence[comm.GPUStats] = ()) -> comm.Response:
        return self._left_to_agent("report_used_resource")

    def update_node_addr(self, task_type: str, task_id: int, node_addr: str) -> comm.Response:
        return self._left_to_agent("update_node_addr")

    def update_node_event(self, task_type: str, task_id: int, event: object) -> comm.Response:
        return self._left_to_agent("update_node_event")

    def report_node_event(
        self,
        event_type: str,
        event_msg: str = "",
        event_time: float | None = None,
        event_elapsed_time: float = 0,
        node_rank: int = -1,
    ) -> comm.Response:
        return self._left_to_agent("report_node_event")

    def report_network_check_status(self, node_rank: int, status: str, elapsed_time: float) -> comm.Response:
        return self.report_node_event(status, event_elapsed_time=elapsed_time, node_rank=node_rank)

    def report_network_status(self, node_rank: int, status: str, elapsed_time: float = 0) -> comm.Response:
        return self.report_network_check_status(node_rank, status, elapsed_time)

    def report_node_status(self, rank: int, status: str) -> comm.Response:
        return self.report_network_check_status(rank, status, 0)

    def report_pre_check_status(self, status: str, config_json: str = "{}") -> comm.Response:
        return self.report_node_event(status, config_json, node_rank=node_environment.get_node_rank())

    def report_failed_exited(self) -> comm.Response:
        return self._left_to_agent("report_failed_exited")

    def report_succeeded_exited(self) -> comm.Response:
        return self._left_to_agent("report_succeeded_exited")

    def report_prestop(self) -> comm.Response:
        return self._left_to_agent("report_prestop")

    # What people and the diagnosis shall know.

    def report_event(
        self,
        event_type: str = "",
        instance: str = "",
        action: str = "",
        msg: str = "",
        labels: dict[str, str] | None = None,
    ) -> None:
        """Becomes an event of the job (`dlrover events`); lost if the master is away."""
        named = {"instance": instance} if instance else {}
        self._ask(
            NodeEvent(
                node=_NOBODY,
                incarnation=_NO_LIFE,
                level=_EVENT_LEVELS.get(event_type, "info"),
                name=action or "script",
                text=msg or action,
                rank=node_environment.get_rank(),
                labels={**named, **{str(key): str(value) for key, value in (labels or {}).items()}},
            )
        )

    def report_failures(self, error_data: object, restart_count: int = -1, level: str = "") -> None:
        """Level `node_error` has this node replaced where a platform can; the others become events of the job."""
        text = str(error_data)[:_MAX_ERROR_DATA_LEN]
        if level == TrainingExceptionLevel.NODE_ERROR:
            self._ask(ReportNodeError(node=_NOBODY, incarnation=_NO_LIFE, level=ErrorLevel.NODE, message=text))
            return
        severity = {TrainingExceptionLevel.INFO: "info", TrainingExceptionLevel.WARNING: "warn"}.get(level, "error")
        labels = {"level": level, "restart_count": str(restart_count)}
        self.report_event(severity, "", "script-failure", text, labels)

    def report_diagnosis_agent_metrics(self, data: DiagnosisData) -> None:
        """A sample for the diagnosis, under the type of the data; lost if the master is away."""
        kind, text = str(data.data_type), str(data.data_content)[-MAX_SAMPLE_TEXT:]
        self._ask(SampleTaken(node=_NOBODY, incarnation=_NO_LIFE, kind=kind, text=text))

    report_diagnosis_training_log = report_diagnosis_agent_metrics
    report_diagnosis_cuda_log = report_diagnosis_agent_metrics
    report_diagnosis_chip_metrics = report_diagnosis_agent_metrics

    def report_action(self, action: DiagnosisAction) -> None:
        """`JobRestartAction` restarts all workers, `JobAbortionAction` ends the job; the others are not for a script."""
        reason = getattr(action, "reason", "") or getattr(action, "msg", "") or "a script asked for it"
        kind = type(action).__name__
        if kind == "JobAbortionAction":
            self._ask(StopJob(message=reason))
        elif kind == "JobRestartAction":
            self._restart_job(reason)
        else:
            log.warning("%s has no effect: a script may send JobRestartAction or JobAbortionAction.", kind)

    def report_model_info(self, model_info: comm.ModelInfo) -> None:
        """Kept with the job; the page and `dlrover scale --why --json` show it, scaling reads it."""
        tensors, ops = model_info.tensor_stats, model_info.op_stats
        self._ask(
            JobFacts(
                variable_count=int(tensors.variable_count),
                total_variable_size=int(tensors.total_variable_size),
                max_variable_size=int(tensors.max_variable_size),
                op_count=int(ops.op_count),
                update_op_count=int(ops.update_op_count),
                read_op_count=int(ops.read_op_count),
                flops=int(ops.flops),
            )
        )

    def report_model_metric(self, tensor_stats: comm.TensorStats, op_stats: comm.OpStats) -> None:
        self.report_model_info(comm.ModelInfo(tensor_stats, op_stats))

    # Settings that the platform tunes.

    def report_paral_config(self, config: comm.ParallelConfig) -> None:
        """Into the parallel-config file of this node, from which the trainers read it."""
        ParalConfigTuner.singleton_instance().write_paral_config(config)

    def get_paral_config(self) -> comm.ParallelConfig:
        """What the file of this node says; all zero: no suggestion."""
        return ParalConfigTuner.singleton_instance().read_paral_config() or comm.ParallelConfig()

    def need_to_restart_training(self) -> bool:
        """False: the agent restarts its workers by itself."""
        return False

    def get_elastic_run_config(self) -> dict[str, str]:
        """Empty: the platform changes no option of the launch."""
        return {}

    # Agreements between nodes.

    def sync_checkpoint(self, step: int) -> bool:
        """True once all nodes of this round have named the same step."""
        return agree_on_step(self._ask, self._round, int(step))

    def sync_training_ports(self, port: int) -> comm.SyncTrainingPort:
        """`port`: agreed. `newport`: try again from there. Both 0: not all nodes have come yet."""
        return agree_on_port(self._ask, self._round, int(port))

    # Parameter servers.

    def get_cluster_version(self, version_type: str, task_type: str, task_id: int) -> int:
        """0 in a job without parameter servers."""
        question = AskClusterVersion(
            version_type=VersionType(version_type), node_type=PlatformNodeType(task_type), rank=task_id
        )
        reply = self._ask(question)
        assert isinstance(reply, ClusterVersion), reply
        return reply.version

    def update_cluster_version(self, version_type: str, version: int, task_type: str, task_id: int) -> None:
        command = UpdateClusterVersion(
            version_type=VersionType(version_type),
            version=version,
            node_type=PlatformNodeType(task_type),
            rank=task_id,
        )
        try:
            self._ask(command)
        except Rejected as error:
            log.warning("The cluster version stays as it is: %s", error)

    def query_ps_nodes(self) -> tuple[list[comm.NodeMeta], bool]:
        """In rank order, and whether one of them has failed for good."""
        reply = self._ask(AskPsNodes())
        assert isinstance(reply, PsNodes), reply
        nodes = [
            comm.NodeMeta(
                type=NodeType.PS,
                addr=node.service_address,
                memory=node.resource.memory_mb,
                cpu=node.resource.cpu,
                id=node.id,
                rank=node.rank,
            )
            for node in reply.nodes
        ]
        return nodes, reply.has_failure

    def ready_for_ps_relaunch(self) -> comm.Response:
        try:
            self._ask(PsReady())
        except Rejected as error:
            log.warning("No parameter server is replaced: %s", error)
            return comm.Response(False, str(error))
        return comm.Response(True)

    # Inside.

    def _ask(self, request: WorkerRequest) -> Reply:
        return self._link.ask(request, timeout=self._timeout)

    def _status(self) -> JobStatus:
        reply = self._ask(AskStatus())
        assert isinstance(reply, JobStatus), reply
        return reply

    def _nodes(self) -> tuple[NodeView, ...]:
        """All of them, or Unavailable: a part of the nodes would be a wrong answer."""
        status = self._status()
        if status.left_out.nodes:
            num_missing = sum(status.left_out.nodes.values())
            raise Unavailable(
                f"The list lacks {num_missing} nodes of the job, because one message cannot carry more. `dlrover "
                "status` shows all."
            )
        return status.nodes

    def _is_reached(self, question: SyncFinished | BarrierOpen) -> bool:
        try:
            reply = self._ask(question)
        except Rejected as error:
            log.warning("Sync point %r: %s", question.name, error)
            return False
        assert isinstance(reply, SyncState), reply
        return reply.is_reached

    def _checked(self, verdict: str) -> tuple[list[int], str]:
        found = [
            int(each.node_rank) for each in self._nodes() if each.check is not None and each.check.status == verdict
        ]
        return found, NetworkFailureReason.NODE_FAILURE if found else ""

    def _restart_job(self, reason: str) -> None:
        try:
            self._ask(RestartJob(reason=reason, round=self._round))
        except Rejected as error:
            if error.code != ErrorCode.NO_PLATFORM:
                raise
            self._ask(RestartWorkers(reason=reason))  # nodes that were started by hand stay

    def _left_to_agent(self, method: str) -> comm.Response:
        self._say_once(method, _AGENT_DOES)
        return comm.Response(True, _AGENT_DOES)

    def _say_once(self, method: str, sentence: str) -> None:
        if method not in self._said:
            self._said.add(method)
            log.warning("MasterClient.%s: %s", method, sentence)


class LocalMasterClient(MasterClient):
    """
    The master client without a master: a script runs unchanged on a laptop.

    Store, sync points and data live in the process, in the same rooms of the core that a job has. The rendezvous has one
    member, this process. Reports are accepted and have no effect.
    """

    def __init__(
        self,
        node_id: int = 0,
        *,
        node_type: str = NodeType.WORKER,
        timeout: float = JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__("", node_id, node_type, timeout, link=_link_of_one())
        self._world: dict[int, int] = {}

    def join_rendezvous(self, node_rank: int, local_world_size: int, rdzv_name: str = "") -> int:
        self._world[node_rank] = local_world_size
        return 0

    def get_comm_world(self, rdzv_name: str, node_rank: int) -> tuple[int, int, dict[int, int]]:
        return 0, 0, dict(self._world)

    def get_running_nodes(self) -> list[comm.NodeMeta]:
        host, _ = node_environment.get_hostname_and_ip()
        rank = node_environment.get_node_rank()
        return [comm.NodeMeta(type=self._node_type, addr=host, id=self._node_id, rank=rank, status=NodeStatus.RUNNING)]

    def num_nodes_waiting(self, rdzv_name: str) -> int:
        return 0

    def report_rdzv_params(self, *arguments: Any, **named: Any) -> bool:
        return True

    def set_rdzv_blocked(self, blocked: bool, reason: str = "") -> None:
        self._say_once("set_rdzv_blocked", _ALONE)

    def report_event(self, *arguments: Any, **named: Any) -> None:
        self._say_once("report_event", _ALONE)

    def report_failures(self, *arguments: Any, **named: Any) -> None:
        self._say_once("report_failures", _ALONE)

    def report_diagnosis_agent_metrics(self, data: object) -> None:
        self._say_once("report_diagnosis_agent_metrics", _ALONE)

    report_diagnosis_training_log = report_diagnosis_agent_metrics
    report_diagnosis_cuda_log = report_diagnosis_agent_metrics
    report_diagnosis_chip_metrics = report_diagnosis_agent_metrics

    def report_action(self, action: object) -> None:
        self._say_once("report_action", _ALONE)

    def ready_for_ps_relaunch(self) -> comm.Response:
        return self._left_to_agent("ready_for_ps_relaunch")

    def _left_to_agent(self, method: str) -> comm.Response:
        self._say_once(method, _ALONE)
        return comm.Response(True, _ALONE)


def _link_of_one() -> Link:
    """In a worker of a job there is an agent, but a script that makes a `LocalMasterClient` wants to be alone."""
    if environment.current() is None:
        return current_link()
    from dlrover.trainer.stand_in import StandIn  # the whole core: workers of a job start without it

    return StandIn()


def build_master_client(master_addr: str | None = None, timeout: float | None = None) -> MasterClient:
    """
    The client of this process. Where there is neither an agent nor an address it works alone (`LocalMasterClient`).

    `timeout`: seconds for one request, by default 60; the variable MASTER_CLIENT_TIMEOUT wins.
    """
    seconds = JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT if timeout is None else timeout
    told = os.environ.get(NodeEnv.MASTER_CLIENT_TIMEOUT, "")
    if told.isdigit() and int(told):
        seconds = int(told)
    elif told:
        log.warning("MASTER_CLIENT_TIMEOUT=%s is ignored: give whole seconds of at least 1.", told)
    address = os.environ.get(NodeEnv.DLROVER_MASTER_ADDR, "") if master_addr is None else str(master_addr)
    node_id, node_type = node_environment.get_node_id(), node_environment.get_node_type()
    if environment.current() is None and not address:
        return LocalMasterClient(node_id, node_type=node_type, timeout=seconds)
    link = None if environment.current() is not None else _NoAgent(address)
    return MasterClient(address, node_id, node_type, seconds, link=link)


class _NoAgent:
    """Implements `Link` where an address is given and no agent is there: every request says what is missing."""

    def __init__(self, address: str) -> None:
        self._address = address

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        raise Unavailable(
            f"This process runs outside a job, so it cannot reach the master at {self._address}. Start the "
            "script with `dlrover-run`; to run without a master, unset DLROVER_MASTER_ADDR."
        )


class _Lazy(type):
    @property
    def MASTER_CLIENT(cls) -> MasterClient:  # noqa: N802  the published name
        return MasterClient.singleton_instance()


class GlobalMasterClient(metaclass=_Lazy):
    """`GlobalMasterClient.MASTER_CLIENT`: the process's client, built at first use."""


def _bytes(value: bytes | str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"a value must be bytes or str, not {type(value).__name__}")
    return bytes(value)
