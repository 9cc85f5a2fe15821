"""What the ranks of the tests have in common, imported once before they are forked."""

import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor

import dlrover.trainer.torch.checkpointer
import dlrover.trainer.torch.flash_checkpoint.dcp
import dlrover.trainer.torch.flash_checkpoint.fsdp

__all__ = ["dlrover", "torch"]
