"""
The server of a process, and what its session knows: all parameter servers and itself.

A server is booted as a task of a job of its own name: TensorFlow refuses a session whose cluster names the very job and task that the server
was started with. The cluster travels with the session, so servers are never told of each other.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_GRPC = "grpc://"


class TaskServer:
    """Listens on a port that the kernel chose, until the process ends."""

    def __init__(self, task_type: str, rank: int, host: str) -> None:
        job = f"dlrover_{task_type}"
        cluster = tf.train.ClusterSpec({job: {rank: f"{host}:0"}})
        self._server = tf.distribute.Server(cluster, job_name=job, task_index=rank, protocol="grpc")

    @property
    def target(self) -> str:
        return str(self._server.target)

    @property
    def address(self) -> str:
        return self.target.removeprefix(_GRPC)

    def serve(self) -> None:
        """Never returns."""
        self._server.join()


def session_config(task_type: str, rank: int, address: str, servers: tuple[str, ...], given: Any = None) -> Any:
    """A `ConfigProto` with the small cluster, on top of the one that the user gives."""
    config = tf.compat.v1.ConfigProto()
    config.allow_soft_placement = True
    config.gpu_options.allow_growth = True
    if given is not None:
        config.MergeFrom(given)
    cluster = tf.train.ClusterSpec({"ps": list(servers), task_type: {rank: address}})
    config.cluster_def.CopyFrom(cluster.as_cluster_def())
    config.experimental.share_session_state_in_clusterspec_propagation = True
    return config
