"""What the session of a process knows: all parameter servers and itself."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


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
