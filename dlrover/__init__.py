"""
Unattended distributed training: what training scripts use, by one import.

    import dlrover

    checkpointer = dlrover.Checkpointer("/shared/run7", model=model, optimizer=optimizer)

Each name is imported when it is used first, so `import dlrover` costs nothing and needs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.cli.launch.programmatic import launch
    from dlrover.trainer.progress import report
    from dlrover.trainer.sync import barrier
    from dlrover.trainer.torch.checkpointer import Checkpointer
    from dlrover.trainer.torch.data.shard_dataset import ShardDataset
    from dlrover.trainer.torch.data.step_loader import StepLoader
    from dlrover.trainer.torch.elastic.trainer import ElasticTrainer
    from dlrover.trainer.torch.kv_store import MasterKVStore as KVStore
    from dlrover.trainer.torch.resilience.guard import resilient, steps

__all__ = [
    "Checkpointer",
    "ElasticTrainer",
    "KVStore",
    "ShardDataset",
    "StepLoader",
    "barrier",
    "launch",
    "report",
    "resilient",
    "steps",
]

_HOMES = {
    "Checkpointer": "dlrover.trainer.torch.checkpointer",
    "ElasticTrainer": "dlrover.trainer.torch.elastic.trainer",
    "KVStore": "dlrover.trainer.torch.kv_store:MasterKVStore",
    "ShardDataset": "dlrover.trainer.torch.data.shard_dataset",
    "StepLoader": "dlrover.trainer.torch.data.step_loader",
    "barrier": "dlrover.trainer.sync",
    "launch": "dlrover.cli.launch.programmatic",
    "report": "dlrover.trainer.progress",
    "resilient": "dlrover.trainer.torch.resilience.guard",
    "steps": "dlrover.trainer.torch.resilience.guard",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("dlrover")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, other = _HOMES[name].partition(":")
    return getattr(importlib.import_module(home), other or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
