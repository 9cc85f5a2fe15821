"""
`TF_CONFIG`, typed: who is in the cluster, and which task this process is.

TensorFlow's own programs read it from the environment; we write it there for the process that runs one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.protocol.errors import ConfigError

VARIABLE = "TF_CONFIG"
CHIEF, EVALUATOR, PS, WORKER = "chief", "evaluator", "ps", "worker"


class TfTask(Struct, frozen=True, kw_only=True):
    type: str
    index: int = 0


class TfConfig(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields and their names are TensorFlow's."""

    cluster: dict[str, list[str]]
    task: TfTask
    environment: str = ""
    """`google`: the Estimator starts no server of its own, because there is one."""
    session_master: str = ""
    """`grpc://host:port` of that server."""

    def to_text(self) -> str:
        return msgspec.json.encode(self).decode()


_DECODER = msgspec.json.Decoder(TfConfig)


def read_tf_config(text: str | Mapping[str, Any]) -> TfConfig:
    """Raises `ConfigError`."""
    try:
        if isinstance(text, str):
            return _DECODER.decode(text)
        return msgspec.convert(text, type=TfConfig)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f'{VARIABLE} cannot be read: {error}. Its form is {{"cluster": {{"ps": [...], ...}}, "task": {{"type": ..., "index": ...}}}}.'
        ) from error


def own_task() -> TfTask | None:
    """Which task `TF_CONFIG` says this process is; None: it does not say."""
    text = os.environ.get(VARIABLE, "")
    return read_tf_config(text).task if text else None


def task_config(task_type: str, rank: int, servers: tuple[str, ...], *, own_address: str, target: str) -> TfConfig:
    """
    For one process: all parameter servers and itself. Workers do not know each other, so that each of them may come and go.

    TensorFlow derives numbers of replicas from the lists and insists on a chief; the other entries are placeholders.
    """
    cluster = {PS: list(servers), CHIEF: [own_address]}
    if task_type == WORKER:
        cluster[WORKER] = [own_address] * (rank + 1)
    return TfConfig(
        cluster=cluster,
        task=TfTask(type=task_type, index=rank),
        environment="google",
        session_master=target,
    )
