"""`RunConfig`: where a model lives, when it is saved, and which task of `TF_CONFIG` this process is."""

from __future__ import annotations

import copy
import os
import tempfile
from typing import Any

import tensorflow as tf

from dlrover.trainer.tensorflow.config import CHIEF, EVALUATOR, PS, VARIABLE, WORKER, read_tf_config

_CHANGEABLE = frozenset(
    {
        "model_dir", "tf_random_seed", "save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs", "session_config",
        "keep_checkpoint_max", "keep_checkpoint_every_n_hours", "log_step_count_steps", "device_fn", "train_distribute",
        "eval_distribute", "protocol", "session_creation_timeout_secs", "experimental_distribute",
    }
)  # fmt: skip
_NOT_SAID = object()
_SAVE_SECS = 600
_MASTER = "master"
"""What TensorFlow once called a chief."""
_PLACED_ON_SERVERS = (
    "Variable", "VariableV2", "AutoReloadVariable", "VarHandleOp", "MutableHashTable", "MutableHashTableV2",
    "MutableHashTableOfTensors", "MutableHashTableOfTensorsV2", "MutableDenseHashTable", "MutableDenseHashTableV2",
)  # fmt: skip


class RunConfig:
    """Read-only attributes under the historical names. `replace` gives another one."""

    global_id_in_cluster: int | None
    """None: of an evaluator."""

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: Any = _NOT_SAID,
        save_checkpoints_secs: Any = _NOT_SAID,
        session_config: Any = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10_000,
        log_step_count_steps: int | None = 100,
        train_distribute: Any = None,
        device_fn: Any = None,
        protocol: str | None = None,
        eval_distribute: Any = None,
        experimental_distribute: Any = None,
        experimental_max_worker_delay_secs: float | None = None,
        session_creation_timeout_secs: float = 7200,
        checkpoint_save_graph_def: bool = True,
    ) -> None:
        """Raises ValueError."""
        has_steps = save_checkpoints_steps not in (_NOT_SAID, None)
        has_secs = save_checkpoints_secs not in (_NOT_SAID, None)
        if has_steps and has_secs:
            raise ValueError("Give either save_checkpoints_steps or save_checkpoints_secs, not both.")
        if train_distribute is not None or eval_distribute is not None or experimental_distribute is not None:
            raise ValueError(
                "Estimators support distribution strategies only up to TensorFlow 2.15. Train with a custom "
                "loop or Keras, or without a strategy."
            )
        if save_checkpoints_steps is _NOT_SAID and save_checkpoints_secs is _NOT_SAID:
            save_checkpoints_secs = _SAVE_SECS
        self.tf_random_seed = tf_random_seed
        self.save_summary_steps = save_summary_steps
        self.save_checkpoints_steps = save_checkpoints_steps if has_steps else None
        self.save_checkpoints_secs = None if save_checkpoints_secs is _NOT_SAID else save_checkpoints_secs
        self.keep_checkpoint_max = keep_checkpoint_max
        self.keep_checkpoint_every_n_hours = keep_checkpoint_every_n_hours
        self.log_step_count_steps = log_step_count_steps
        self.device_fn = device_fn
        self.protocol = protocol
        self.train_distribute = self.eval_distribute = None
        self.experimental_max_worker_delay_secs = experimental_max_worker_delay_secs
        self.session_creation_timeout_secs = session_creation_timeout_secs
        self.checkpoint_save_graph_def = checkpoint_save_graph_def
        self._read_task()
        self.session_config = session_config if session_config is not None else self._usual_session_config()
        self.model_dir = os.fspath(model_dir) if model_dir else None

    def replace(self, **changes: Any) -> RunConfig:
        """Raises ValueError for what cannot be changed."""
        wrong = sorted(set(changes) - _CHANGEABLE)
        if wrong:
            raise ValueError(
                f"RunConfig.replace cannot change {wrong[0]!r}; it changes {', '.join(sorted(_CHANGEABLE))}."
            )
        if changes.get("save_checkpoints_steps") and changes.get("save_checkpoints_secs"):
            raise ValueError("Give either save_checkpoints_steps or save_checkpoints_secs, not both.")
        other = copy.copy(self)
        for name, value in changes.items():
            setattr(other, name, value)
        if changes.get("save_checkpoints_steps"):
            other.save_checkpoints_secs = None
        if changes.get("save_checkpoints_secs"):
            other.save_checkpoints_steps = None
        return other

    def device_setter(self) -> Any:
        """Variables on parameter servers in turn, all else on this task; None without servers."""
        if self.device_fn is not None or self.num_ps_replicas == 0:
            return self.device_fn
        task = f"/job:{self.task_type}/task:{self.task_id}" if self.task_type else "/job:worker"
        return tf.compat.v1.train.replica_device_setter(
            ps_tasks=self.num_ps_replicas,
            worker_device=task,
            merge_devices=True,
            ps_ops=list(_PLACED_ON_SERVERS),
            cluster=self.cluster_spec,
        )

    def _read_task(self) -> None:
        text = os.environ.get(VARIABLE, "")
        config = read_tf_config(text) if text else None
        cluster = {} if config is None else config.cluster
        self.cluster_spec = tf.train.ClusterSpec(cluster)
        self.num_ps_replicas = len(cluster.get(PS, []))
        if config is None or not cluster:
            self.task_type, self.task_id = WORKER, 0
            self.is_chief, self.master, self.evaluation_master = True, "", ""
            self.num_worker_replicas, self.global_id_in_cluster = 1, 0
            return
        self.task_type, self.task_id = config.task.type, config.task.index
        self.is_chief = self.task_type in (CHIEF, _MASTER)
        is_evaluator = self.task_type == EVALUATOR
        self.master = "" if is_evaluator else config.session_master or self._own_target(cluster)
        self.evaluation_master = ""
        if is_evaluator:  # it knows nobody, and nobody counts on it
            self.cluster_spec = tf.train.ClusterSpec({})
            self.num_ps_replicas = self.num_worker_replicas = 0
            self.global_id_in_cluster = None
            return
        num_chiefs = len(cluster.get(CHIEF, [])) + len(cluster.get(_MASTER, []))
        self.num_worker_replicas = len(cluster.get(WORKER, [])) + num_chiefs
        self.global_id_in_cluster = self.task_id if self.is_chief else self.task_id + num_chiefs

    def _own_target(self, cluster: dict[str, list[str]]) -> str:
        return "grpc://" + cluster[self.task_type][self.task_id]

    def _usual_session_config(self) -> Any:
        """Without a wait for other workers: a step needs the servers and its own task."""
        filters = ["/job:ps", f"/job:{self.task_type}/task:{self.task_id}"] if self.num_ps_replicas else []
        config = tf.compat.v1.ConfigProto(allow_soft_placement=True, device_filters=filters)
        config.graph_options.rewrite_options.meta_optimizer_iterations = 1
        return config


def with_model_dir(config: RunConfig | None, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    """Raises ValueError if both name one and they differ."""
    config = RunConfig() if config is None else copy.copy(config)
    given = os.fspath(model_dir) if model_dir else None
    if given and config.model_dir and given != config.model_dir:
        raise ValueError(
            f"model_dir is {given} for the Estimator and {config.model_dir} in RunConfig. Give only one of them."
        )
    found = given or config.model_dir
    if found is None:
        found = tempfile.mkdtemp()
        tf.compat.v1.logging.warning("No model_dir is given. The model is written to %s.", found)
    return config.replace(model_dir=found)
