"""
`EstimatorExecutor`: trains and evaluates what a conf class describes, as the task that `TF_CONFIG` or the node's agent names.

The processes of a job use it through `process`; scripts of the original make one themselves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from dlrover.protocol.errors import ConfigError
from dlrover.trainer.tensorflow.conf import Conf, merge_confs
from dlrover.trainer.tensorflow.config import VARIABLE, TfConfig, read_tf_config


class EstimatorExecutor:
    def __init__(self, context: Any = None) -> None:
        """`context`: a conf class, or settings that were read before."""
        self.conf: Conf | None = context if context is None or isinstance(context, Conf) else merge_confs([context])
        self.tf_config: TfConfig | None = None
        self._is_told = threading.Event()
        if os.environ.get(VARIABLE):
            self.set_tf_config(os.environ[VARIABLE])

    def set_tf_config(self, tf_config: str | Mapping[str, Any]) -> None:
        """Raises `ConfigError` for one that cannot be read."""
        self.tf_config = read_tf_config(tf_config)
        os.environ[VARIABLE] = self.tf_config.to_text()
        self._is_told.set()

    def wait_for_tf_config(self, timeout: float | None = None) -> TfConfig:
        """Until `set_tf_config` was called. Raises TimeoutError."""
        if not self._is_told.wait(timeout):
            raise TimeoutError(f"{VARIABLE} was not set within {timeout} s")
        assert self.tf_config is not None, "told"
        return self.tf_config

    def prepare(self) -> None:
        """Raises `ConfigError` if there is nothing to train."""
        if self.conf is None:
            raise ConfigError("EstimatorExecutor has no conf class. Give one: EstimatorExecutor(TrainConf).")

    def train_and_evaluate(self) -> None:
        """The whole work of this process in its job. Needs an agent: outside of a job use `tf.estimator` itself."""
        self.prepare()
        from dlrover.trainer.tensorflow.process import run_conf

        assert self.conf is not None, "prepared"
        run_conf(self.conf)
