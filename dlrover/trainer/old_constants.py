"""
Constants, the logger and the questions to the environment that scripts of the original import.

Nothing of ours uses them; they answer as they always did, but for `get_group_rank`, which said 1 where nobody had set it.
"""

from __future__ import annotations

import logging
import os

from dlrover.protocol.data_messages import TaskType as TaskType

default_logger = logging.getLogger("dlrover")

NONE, TRAINING, EVALUATION, PREDICTION, WAIT, TRAIN_END_CALLBACK = TaskType


class CheckpointConstant:
    TRACER_FILE_NAME = "dlrover_latest.txt"
    MODEL_STATES_NAME = "model_states"
    OPTIM_STATES_NAME = "optim_states"
    SAVE_TIMEOUT = 600


def get_env(env_key: str) -> str | None:
    return os.environ.get(env_key) or None


def get_node_rank() -> int:
    return _number("NODE_RANK", "WORKER_RANK")


def get_node_id() -> int:
    return _number("NODE_ID", "WORKER_ID")


def get_node_type() -> str:
    return os.environ.get("NODE_TYPE") or os.environ.get("WORKER_TYPE") or "worker"


def get_node_num() -> int:
    return _number("NODE_NUM", "WORKER_NUM", default=1)


def get_local_rank() -> int:
    return _number("LOCAL_RANK")


def get_local_world_size() -> int:
    return _number("LOCAL_WORLD_SIZE", default=1)


def get_group_rank() -> int:
    return _number("GROUP_RANK")


def get_group_world_size() -> int:
    return _number("GROUP_WORLD_SIZE", default=1)


def get_torch_restart_count() -> int:
    return _number("TORCHELASTIC_RESTART_COUNT")


def _number(*names: str, default: int = 0) -> int:
    """The first of the variables that is set."""
    return next((int(os.environ[name]) for name in names if os.environ.get(name)), default)
