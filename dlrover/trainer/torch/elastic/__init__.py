"""
Elastic training that keeps its mathematics: sampler, data loader and trainer for a world whose size changes.

`ElasticTrainer` can be imported from here, as in early versions of the original, and from `elastic.trainer`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ElasticTrainer"]


def __getattr__(name: str) -> Any:
    if name == "ElasticTrainer":
        from dlrover.trainer.torch.elastic.trainer import ElasticTrainer

        return ElasticTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
