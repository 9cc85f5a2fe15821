"""
The server of a process in a cluster, whatever runs there.

It is booted as a task of a job of its own name: TensorFlow refuses a session whose cluster names the very job and task that the server was started
with. The cluster travels with the session or with the coordinator's context, so servers are never told of each other.
"""

from __future__ import annotations

import tensorflow as tf

_GRPC = "grpc://"


class TaskServer:
    """Listens until the process ends, on a port that the kernel chose unless one is given."""

    def __init__(self, task_type: str, rank: int, host: str, port: int = 0) -> None:
        """`port`: of a process that takes the place of another one; 0: any."""
        job = f"dlrover_{task_type}"
        cluster = tf.train.ClusterSpec({job: {rank: f"{host}:{port}"}})
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
