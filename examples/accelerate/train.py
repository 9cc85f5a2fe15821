"""
Training with accelerate that survives: each step goes to memory, and workers that start again go on from there.

    dlrover-run --standalone --nproc-per-node=2 examples/accelerate/train.py FOLDER
"""

import gc
import hashlib
import sys

import torch
from accelerate import Accelerator
from torch import nn

import dlrover

NUM_STEPS = 12

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

# After `prepare`, when the model has its final form. The optimizer is the one inside accelerate's.
checkpointer = dlrover.Checkpointer(
    sys.argv[1], model=model, optimizer=optimizer.optimizer, also={"schedule": schedule}
)
first = (checkpointer.restore() or 0) + 1
accelerator.print(f"begins at step {first}", flush=True)
for step in range(first, NUM_STEPS + 1):
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(100 * step + accelerator.process_index))
    loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    dlrover.report(step, loss=loss)
    checkpointer.save(
        step
    )  # in memory; checkpointer.save_if_due(step) chooses how often, and when to storage, by itself

checkpointer.save(NUM_STEPS, to="storage", on_busy="block")
checkpointer.wait()
checkpointer.close()
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
accelerator.print(f"ends with weights {hashlib.sha256(weights).hexdigest()}", flush=True)
accelerator.wait_for_everyone()
gc.collect()  # the model holds the process group, whose threads must end before Python does
accelerator.end_training()
