"""Training data from shards on demand: `ShardDataset` for workers that read at their own pace, `StepLoader` for workers that step together."""

from dlrover.trainer.torch.data.batch import Batch
from dlrover.trainer.torch.data.shard_dataset import ShardDataset
from dlrover.trainer.torch.data.step_loader import StepLoader

__all__ = ["Batch", "ShardDataset", "StepLoader"]
