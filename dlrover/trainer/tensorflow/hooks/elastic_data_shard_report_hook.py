"""`ElasticDataShardReportHook`: tells the master after each step that a batch of the script's shards is done."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from dlrover.trainer.sharding_client import ShardingClient


class ElasticDataShardReportHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    def __init__(self, sharding_client: ShardingClient) -> None:
        self._sharding_client = sharding_client

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self._sharding_client.report_batch_done()
