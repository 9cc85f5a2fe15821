"""
A script of plain torch that saves and restores by itself, and tells nobody its step: `own_restore.py FOLDER adam|sgd`

It saves after step 12, dies in its first life after step 20, and ends after step 72. Each line of `steps` is a step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

folder, kind = Path(sys.argv[1]), sys.argv[2]
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), lr=0.01)
checkpoint, step = folder / "checkpoint.pt", 0
is_first_life = not checkpoint.exists()
if not is_first_life:
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
with (folder / "steps").open("a", buffering=1) as log:
    while step < 72:
        time.sleep(0.03)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write(f"{step}\n")
        if is_first_life and step == 12:
            torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
        if is_first_life and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
