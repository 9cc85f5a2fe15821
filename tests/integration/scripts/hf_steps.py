"""
Trains a tiny GPT-2 made from a config with `FlashCkptTrainer`, is killed once, and goes on.

    hf_steps.py FOLDER [deepspeed STAGE]

Every step is kept in memory, every fourth goes to storage; rank 1 dies in step 7. Each life writes the step it began at. What cannot be
checked from outside is checked here: that the end is bitwise the one of an undisturbed training with the plain Trainer, that
plain transformers opens the checkpoints, and that the plain Trainer goes on from one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from dlrover.snapshot.storage.persist import finish, persist, pin_newest, release  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.hf_trainer import FlashCkptTrainer  # noqa: E402

NUM_STEPS, DISK_EVERY, KILL_AT = 10, 4, 7
RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
MODE = sys.argv[2:] or ["ddp"]


class Watch(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        with (FOLDER / f"lives-{RANK}").open("a") as lives:
            lives.write(f"{state.global_step}\n")

    def on_step_end(self, args, state, control, **kwargs):
        mark = FOLDER / "killed"
        if state.global_step == KILL_AT and RANK == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def make_arguments(name: str, **others) -> TrainingArguments:
    more = {}
    if MODE[0] == "deepspeed":
        import deepspeed

        # Its collectives in shared memory would be compiled first, for a minute; gloo does.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        more["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "zero_optimization": {"stage": int(MODE[1])},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    common = {
        "max_steps": NUM_STEPS,
        "save_steps": DISK_EVERY,
        "save_total_limit": 1,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "seed": 5,
    }
    return TrainingArguments(output_dir=str(FOLDER / name), **{**common, **more, **others})


def data() -> list[dict[str, torch.Tensor]]:
    words = torch.randint(64, (100, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in words]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if MODE[0] == "deepspeed":
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: each.clone() for name, each in model.state_dict().items()}
    return {name: each.clone() for name, each in model.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def keep_the_best() -> None:
    """The greatest loss counts as best here, so the first checkpoint is; it is kept, found and loaded at the end."""
    more = {"max_steps": 8, "save_steps": 2, "eval_steps": 2, "eval_strategy": "steps", "load_best_model_at_end": True}
    arguments = make_arguments("best", greater_is_better=True, save_total_limit=2, **more)
    trainer = FlashCkptTrainer(model=make_model(), args=arguments, train_dataset=data(), eval_dataset=data()[:4])
    trainer.train()
    directory = FOLDER / "best"
    assert trainer.state.best_model_checkpoint == str(directory / "checkpoint-2"), trainer.state.best_model_checkpoint
    assert sorted(path.name for path in directory.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-8"]
    assert_same(weights(trainer), GPT2LMHeadModel.from_pretrained(directory / "checkpoint-2").state_dict())
    told = json.loads((directory / "checkpoint-8" / "trainer_state.json").read_text())
    assert told["best_model_checkpoint"] == str(directory / "checkpoint-2")
    trainer.flash_checkpointer.close()


def delete_late() -> None:
    """A snapshot that storage gets only after the training, as from a slow agent or after a break: `save_total_limit` holds for it, too."""
    arguments = make_arguments("late", max_steps=3, save_steps=3)
    trainer = FlashCkptTrainer(model=make_model(), args=arguments, train_dataset=data(), memory_steps=2)
    trainer.train()
    engine = trainer.flash_checkpointer.async_save_engine
    [snapshot] = [each for each in engine.snapshots().of_shard(RANK) if each.name.step == 2]
    pinned = pin_newest(snapshot.name.path, snapshot.name.slot, snapshot.name.generation)
    persist(pinned, snapshot.request)
    release(pinned)
    torch.distributed.barrier()
    if RANK == 0:
        finish(snapshot.request, is_newest=False)
        assert sorted(path.name for path in (FOLDER / "late").glob("checkpoint-*")) == ["checkpoint-3"]
    torch.distributed.barrier()
    trainer.flash_checkpointer.close()


def save_by_itself() -> None:
    """With a rhythm of its own, which begins with a save to storage, though transformers saves nothing."""
    arguments = make_arguments("rhythm", max_steps=3, save_strategy="no")
    trainer = FlashCkptTrainer(model=make_model(), args=arguments, train_dataset=data(), checkpoint_interval=(2, 4))
    trainer.train()
    assert sorted(path.name for path in (FOLDER / "rhythm").glob("checkpoint-*")) == ["checkpoint-1"]
    trainer.flash_checkpointer.close()


def main() -> None:
    trainer = FlashCkptTrainer(
        model=make_model(), args=make_arguments("flash"), train_dataset=data(), callbacks=[Watch()], memory_steps=1
    )
    save, save_file = torch.save, sys.modules["safetensors.torch"].save_file
    trainer.train(resume_from_checkpoint=True)
    assert (torch.save, sys.modules["safetensors.torch"].save_file) == (save, save_file), "put back after every save"
    assert trainer.state.global_step == NUM_STEPS
    assert trainer.wait_latest_checkpoint(100)
    torch.distributed.barrier()
    last = trainer.get_last_checkpoint()
    assert last == str(FOLDER / "flash" / "checkpoint-10"), last
    trained = weights(trainer)

    trainer.flash_checkpointer.close()

    plain = Trainer(model=make_model(), args=make_arguments("plain"), train_dataset=data())
    plain.train()
    assert_same(trained, weights(plain))

    more = {"max_steps": NUM_STEPS + 2}
    resumed = Trainer(model=make_model(), args=make_arguments("resumed", **more), train_dataset=data())
    resumed.train(resume_from_checkpoint=last)
    longer = Trainer(model=make_model(), args=make_arguments("longer", **more), train_dataset=data())
    longer.train(resume_from_checkpoint=str(FOLDER / "plain" / "checkpoint-10"))
    assert_same(weights(resumed), weights(longer))
    if MODE[-1] != "3":
        opened = GPT2LMHeadModel.from_pretrained(last)
        assert_same(opened.state_dict(), trained)
    if MODE[0] == "ddp":
        keep_the_best()
        delete_late()
        save_by_itself()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
