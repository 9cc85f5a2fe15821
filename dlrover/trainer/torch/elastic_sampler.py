"""The sampler under the name it had in early versions of the original."""

from __future__ import annotations

from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
