"""
Trains 20 epochs as scripts of the original do: the count of `ElasticTrainer` begins from 0 in each. `epochs.py FOLDER adam|sgd`

A checkpoint is written after each epoch. With `adam` it is the script's own, of `torch.save`; with `sgd` nothing but the number of the epoch is
kept, in a text file. In each of the epochs 1 to 6 the script kills itself once, after 4 of 10 steps. Each line of `steps` is `epoch step`.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from dlrover.trainer.torch.elastic.trainer import ElasticTrainer

folder, kind = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(4, 1)
loader = DataLoader(TensorDataset(torch.ones(10, 4)))
optimizer = torch.optim.Adam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), lr=0.01)
checkpoint, begin = folder / "checkpoint", 0
if checkpoint.exists() and kind == "adam":
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    begin = state["epoch"]
elif checkpoint.exists():
    begin = int(checkpoint.read_text())
trainer = ElasticTrainer(model, loader)
optimizer = trainer.prepare(optimizer)
with (folder / "steps").open("a", buffering=1) as log:
    for epoch in range(begin, 20):
        trainer.reset()
        for (batch,) in loader:
            with trainer.step():
                time.sleep(0.02)
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            log.write(f"{epoch} {trainer.num_steps}\n")
            if 1 <= epoch <= 6 and trainer.num_steps == 4 and not (folder / f"killed-{epoch}").exists():
                (folder / f"killed-{epoch}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        draft = folder / "checkpoint.new"
        if kind == "adam":
            done = {"epoch": epoch + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(done, draft)
        else:
            draft.write_text(str(epoch + 1))
        draft.rename(checkpoint)
