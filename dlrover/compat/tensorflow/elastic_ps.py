"""
`ElasticPsClient`: versions and addresses of parameter servers, as scripts of the original ask for them.

Every write is accepted. The local version is what was told; the global and the restored one are taken as a maximum and change nothing in the course of
the cluster, which the master alone directs.
"""

from __future__ import annotations

from dlrover.compat.client import comm
from dlrover.compat.client.master_client import MasterClient, build_master_client
from dlrover.protocol.messages.fleet import VersionType
from dlrover.trainer.tensorflow.config import WORKER, own_task


class ElasticPsClient:
    def __init__(
        self, task_type: str | None = None, task_id: int | None = None, client: MasterClient | None = None
    ) -> None:
        """Without arguments the task that `TF_CONFIG` names."""
        own = own_task()
        self._task_type = task_type if task_type is not None else (own.type if own is not None else WORKER)
        self._task_id = task_id if task_id is not None else (own.index if own is not None else 0)
        self._client = build_master_client() if client is None else client

    def get_global_cluster_version(self) -> int:
        return self._get(VersionType.GLOBAL)

    def update_global_cluster_version(self, version: int) -> None:
        self._update(VersionType.GLOBAL, version)

    def get_local_cluster_version(self) -> int:
        return self._get(VersionType.LOCAL)

    def update_local_cluster_version(self, version: int) -> None:
        self._update(VersionType.LOCAL, version)

    def get_restored_cluster_version(self) -> int:
        return self._get(VersionType.RESTORED)

    def update_restored_cluster_version(self, version: int) -> None:
        self._update(VersionType.RESTORED, version)

    def get_all_ps_nodes(self) -> tuple[list[comm.NodeMeta], bool]:
        """The servers in rank order, and whether one of them did not come in time."""
        return self._client.query_ps_nodes()

    def ready_for_ps_relaunch(self) -> None:
        """The master knows by itself when all have moved."""
        self._client.ready_for_ps_relaunch()

    def _get(self, kind: VersionType) -> int:
        return self._client.get_cluster_version(kind.value, self._task_type, self._task_id)

    def _update(self, kind: VersionType, version: int) -> None:
        self._client.update_cluster_version(kind.value, version, self._task_type, self._task_id)
