"""
The master client without a master: a script runs unchanged on a laptop.

Store, sync points and data live in the process, in the same rooms of the core that a job has. The rendezvous knows its own join and no other.
Reports are accepted and have no effect.
"""

from __future__ import annotations

import itertools
from typing import Any

from dlrover.compat.client import comm
from dlrover.compat.client.master_client import MasterClient
from dlrover.compat.client.tasks import TaskBook
from dlrover.compat.launch import environment
from dlrover.compat.names.constants import JobConstant, NodeStatus, NodeType
from dlrover.protocol.messages.data import TaskType
from dlrover.protocol.messages.job import Round
from dlrover.trainer.agent_link import current_link
from dlrover.trainer.environment import current
from dlrover.trainer.stand_in import StandIn

_ALONE = "Outside of `dlrover-run` no master hears this."


class LocalMasterClient(MasterClient):
    def __init__(
        self,
        node_id: int = 0,
        *,
        node_type: str = NodeType.WORKER,
        timeout: float = JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT,
    ) -> None:
        # In a worker of a job there is an agent, and who asks for this class wants to be alone all the same.
        super().__init__("", node_id, node_type, timeout, link=current_link() if current() is None else StandIn())
        self._world: dict[int, int] = {}

    def join_rendezvous(self, node_rank: int, local_world_size: int, rdzv_name: str = "") -> int:
        self._world[node_rank] = local_world_size
        return 0

    def get_comm_world(self, rdzv_name: str, node_rank: int) -> tuple[int, int, dict[int, int]]:
        return 0, 0, dict(self._world)

    def get_running_nodes(self) -> list[comm.NodeMeta]:
        host, _ = environment.get_hostname_and_ip()
        rank = environment.get_node_rank()
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


class LocalDataset:
    """The shards of one dataset for one process: (start, end) one after the other, (-1, -1) at the end."""

    _names = itertools.count()

    def __init__(
        self,
        batch_size: int,
        num_epochs: int,
        dataset_size: int,
        shuffle: bool = False,
        num_minibatches_per_shard: int = 10,
        task_type: int = TaskType.TRAINING,
    ) -> None:
        if batch_size * num_minibatches_per_shard <= 0:
            raise ValueError(
                f"batch_size {batch_size} x num_minibatches_per_shard {num_minibatches_per_shard} must be at least 1"
            )
        self._tasks = TaskBook(StandIn(), Round(0), JobConstant.MASTER_CLIENT_DEFAULT_TIMEOUT)
        self._name = f"local-{next(self._names)}"
        self._tasks.register(
            self._name,
            batch_size=batch_size,
            num_epochs=num_epochs,
            dataset_size=dataset_size,
            shuffle=shuffle,
            num_minibatches_per_shard=num_minibatches_per_shard,
            task_type=task_type,
            storage_type="",
        )

    def get_task(self) -> tuple[int, int]:
        """A shard that is taken counts as read: one process has no other process to give it back to."""
        task = self._tasks.take(self._name)
        if task.task_id >= 0:
            self._tasks.finish(self._name, task.task_id)
        return task.shard.start, task.shard.end

    def get_current_epoch(self) -> int:
        """How many epochs have begun."""
        return self._tasks.num_epochs_begun(self._name)

    def reset(self) -> None:
        self._tasks.reset(self._name)
