"""
Lives that restore, each in a fork with a progress page: `restoring_lives.py FOLDER NAME=PAGE...`

A life has two halves. What stands before `hooked()` is the life before, which writes checkpoints and which nobody watches.
"""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
FOLDER = Path(sys.argv[1])
BEFORE, AFTER = 8, 3
"""Steps of the life before, and of the one that restores."""
page = ""


def hooked() -> None:
    from dlrover.trainer import environment
    from dlrover.trainer.worker import hooks as worker_hooks

    told = {"DLROVER_PROGRESS_PAGE": page, "DLROVER_PROGRESS_HOOKS": "1", "DLROVER_AGENT_SOCKET": str(FOLDER / "none")}
    worker_hooks.install(environment.read({**os.environ, **told}))


def make(kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4)
    return model, kind(model.parameters(), **({"lr": 0.01} | options))


def train(model: Any, *optimizers: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def restoring(kind: type[torch.optim.Optimizer], **options: Any) -> None:
    path = FOLDER / f"{kind.__name__}-{len(options)}.pt"
    model, optimizer = make(kind, **options)
    train(model, optimizer, steps=BEFORE)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    hooked()
    model, optimizer = make(kind, **options)
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, steps=AFTER)


def adam() -> None:
    restoring(torch.optim.Adam)


def sgd() -> None:
    restoring(torch.optim.SGD)


def momentum_sgd() -> None:
    restoring(torch.optim.SGD, momentum=0.9)


def weights() -> None:
    model, _ = make()
    state = model.state_dict()
    hooked()
    model, optimizer = make()
    model.load_state_dict(state)
    train(model, optimizer, steps=AFTER)


def whole_model() -> None:
    model, _ = make()
    torch.save(model, FOLDER / "whole.pt")
    hooked()
    model = torch.load(FOLDER / "whole.pt", weights_only=False)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=AFTER)


def nothing() -> None:
    hooked()
    train(*make(torch.optim.SGD), steps=AFTER)


class Saved(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return AFTER

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.load(FOLDER / "sample.pt")


def data() -> None:
    torch.save(torch.ones(4), FOLDER / "sample.pt")
    hooked()
    model, optimizer = make()
    for batch in DataLoader(Saved()):
        model(batch).sum().backward()
        optimizer.step()


def two() -> None:
    """A model with two optimizers that step in turn; one of them was restored."""
    model, optimizer = make()
    train(model, optimizer, steps=BEFORE)
    state = optimizer.state_dict()
    hooked()
    model, first = make()
    second = torch.optim.Adam(model.parameters())
    second.load_state_dict(state)
    train(model, first, second, steps=AFTER)


def dummy_step() -> None:
    """As torch's distributed checkpoints do: state is made by a step before it is loaded."""
    model, optimizer = make()
    train(model, optimizer, steps=BEFORE)
    state = optimizer.state_dict()
    hooked()
    model, optimizer = make()
    train(model, optimizer, steps=1)
    optimizer.load_state_dict(state)
    train(model, optimizer, steps=AFTER)


def back() -> None:
    """Its loss became NaN, say."""
    hooked()
    model, optimizer = make()
    train(model, optimizer, steps=BEFORE)
    state = optimizer.state_dict()
    state = {**state, "state": {key: {**each, "step": each["step"].clone()} for key, each in state["state"].items()}}
    train(model, optimizer, steps=5)
    optimizer.load_state_dict(state)
    train(model, optimizer, steps=1)


def accelerate() -> None:
    from accelerate import Accelerator

    def prepared() -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(*make())

    accelerator, model, optimizer = prepared()
    train(model, optimizer, steps=BEFORE)
    accelerator.save_state(str(FOLDER / "accelerate"))
    hooked()
    accelerator, model, optimizer = prepared()
    accelerator.load_state(str(FOLDER / "accelerate"))
    train(model, optimizer, steps=AFTER)


def transformers() -> None:
    """With SGD: only the state of the trainer tells the step."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    def run(steps: int, resume: bool) -> None:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        arguments = TrainingArguments(
            output_dir=str(FOLDER / "transformers"),
            max_steps=steps,
            save_steps=BEFORE,
            optim="sgd",
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        words = [{"input_ids": torch.ones(4).long(), "labels": torch.ones(4).long()}] * 20
        Trainer(model=model, args=arguments, train_dataset=words).train(resume_from_checkpoint=resume)

    run(BEFORE, resume=False)
    hooked()
    run(BEFORE + AFTER, resume=True)


def lightning() -> None:
    """With SGD: only the loops of the trainer tell the step."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(steps: int, path: str | None) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(max_steps=steps, accelerator="cpu", enable_checkpointing=False, **quiet)
        trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(20, 4))), ckpt_path=path)
        return trainer

    path = str(FOLDER / "lightning.ckpt")
    fit(BEFORE, None).save_checkpoint(path)
    hooked()
    fit(BEFORE + AFTER, path)


def a_loader(size: int = 6) -> Any:
    return DataLoader(TensorDataset(torch.ones(size, 4)))


def trained_by_epochs(loader: Any, sizes: tuple[int, ...]) -> None:
    """`ElasticTrainer` as scripts of the original use it; the last epoch is cut off by the end of the life."""
    from dlrover.trainer.torch.elastic.trainer import ElasticTrainer

    model, optimizer = make(torch.optim.SGD)
    trainer = ElasticTrainer(model, loader)
    optimizer = trainer.prepare(optimizer)
    for size in sizes:
        trainer.reset()
        for number, (batch,) in enumerate(loader):
            if number == size:
                break
            with trainer.step():
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


def reset() -> None:
    hooked()
    trained_by_epochs(a_loader(), (7, 1))


def first_epoch() -> None:
    """A life that ends with its epoch, before the next reset."""
    hooked()
    trained_by_epochs(a_loader(3), (7,))


def half_epoch() -> None:
    hooked()
    trained_by_epochs(a_loader(3), (2,))


def own_reset() -> None:
    """Its own reports, which begin from 1 in each epoch; no loader of torch."""
    hooked()
    from dlrover.trainer import report

    model, optimizer = make(torch.optim.SGD)
    for _epoch in range(2):
        for step in range(1, 4):
            train(model, optimizer, steps=1)
            report(step)


def taken_back() -> None:
    hooked()
    from dlrover.trainer import report

    model, optimizer = make(torch.optim.SGD)
    for step in (100, 101, 102, 101, 102, 103):
        train(model, optimizer, steps=1)
        report(step)


def evaluation() -> None:
    """In the middle of an epoch."""
    hooked()
    model, optimizer = make(torch.optim.SGD)
    for number, (batch,) in enumerate(a_loader()):
        model(batch).sum().backward()
        optimizer.step()
        if number == 3:
            break
        list(a_loader(2))


def sampler() -> None:
    hooked()
    from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler

    restored = ElasticDistributedSampler(TensorDataset(torch.ones(20, 4)), num_replicas=1, rank=0)
    restored.load_state_dict({"epoch": 4, "completed_num": 6})
    restored.set_epoch(4)
    torch.utils.data.DistributedSampler(TensorDataset(torch.ones(4)), num_replicas=1, rank=0).set_epoch(3)


def main() -> None:
    global page
    train(*make(), steps=1)  # torch imports much with its first step: once for all
    failed = []
    for argument in sys.argv[2:]:
        name, _, page = argument.partition("=")
        life: Callable[[], None] = globals()[name]
        pid = os.fork()
        if pid == 0:
            try:
                life()
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(pid, 0)[1]:
            failed.append(name)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
