"""
Training with Lightning that survives: each step goes to memory, and workers that start again go on from there.

    dlrover-run --standalone --nproc-per-node=2 examples/lightning/train.py FOLDER
"""

import hashlib
import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from dlrover.trainer.torch.lightning_callback import FlashLightningCallback


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[0].sum(1, keepdim=True))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[dict[str, object]]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_start(self) -> None:
        self.print(f"begins after step {self.global_step}", flush=True)

    def on_train_end(self) -> None:
        weights = b"".join(each.detach().numpy().tobytes() for each in self.parameters())
        self.print(f"ends with weights {hashlib.sha256(weights).hexdigest()}", flush=True)


records = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(1)))
nodes, workers = int(os.environ["GROUP_WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
sampler = DistributedSampler(records, nodes * workers, int(os.environ["RANK"]), shuffle=False)
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    num_nodes=nodes,
    devices=workers,
    max_epochs=2,
    # In memory after each step. Without the option it chooses how often, and when to storage, by itself.
    callbacks=[FlashLightningCallback(sys.argv[1], checkpoint_interval=(1, 100), num_slots=3)],
    enable_checkpointing=False,
    use_distributed_sampler=False,
    logger=False,
    enable_progress_bar=False,
)
# A loader that has a state: its position comes back, too.
trainer.fit(Regression(), StatefulDataLoader(records, batch_size=4, sampler=sampler))
