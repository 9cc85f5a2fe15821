"""
Trains a small model with DeepSpeed, one ZeRO stage after the other, and is killed once in some of them.

    deepspeed_steps.py FOLDER STAGE...          a stage with an exclamation mark is one to be killed in

Every step is saved to memory, step 4 to storage; rank 1 dies after step 6. In every life the first step goes to FOLDER/lives-RANK. What cannot
be checked from outside is checked here: that the weights are those of an undisturbed training, that a fresh engine gets them from
memory, that DeepSpeed reads our files without us, and that we read DeepSpeed's.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch

warnings.simplefilter("ignore")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: E402

from dlrover.trainer.torch.flash_checkpoint.deepspeed import DeepSpeedCheckpointer, StorageType  # noqa: E402

NUM_STEPS, DISK_AT, KILL_AT = 8, 4, 6
# Its collectives in shared memory would be compiled first, for a minute; gloo does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def make_engine(stage: int):
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model.register_buffer("count", torch.zeros(1))
    model[0].bias.requires_grad_(stage != 3)  # a frozen parameter: ZeRO 3 has fragments of it in another place
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage == 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_one(engine, step: int) -> None:
    rank = torch.distributed.get_rank()
    batch = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    engine.backward(engine(batch.to(engine.module[0].weight.dtype)).float().pow(2).mean())
    engine.step()
    engine.module.count += 1


def weights(engine) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name in one:
        assert torch.equal(one[name], other[name]), name


def run_stage(folder: Path, stage: int, kills: bool) -> None:
    rank = torch.distributed.get_rank()
    directory = str(folder / f"zero-{stage}")
    engine = make_engine(stage)
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
    checkpointer = DeepSpeedCheckpointer(engine, directory)
    path, client_state = checkpointer.load_checkpoint(directory)
    first = 1 if path is None else client_state["step"] + 1
    with (folder / f"lives-{rank}").open("a") as lives:
        lives.write(f"{stage} {first}\n")
    for step in range(first, NUM_STEPS + 1):
        train_one(engine, step)
        is_disk = step == DISK_AT
        tag = f"at-{step}" if step % 2 else step if is_disk else None
        kind = StorageType.DISK if is_disk else StorageType.MEMORY
        result = checkpointer.save_checkpoint(directory, tag, {"step": step}, storage_type=kind, on_busy="block")
        assert result, result
        if is_disk:
            assert checkpointer.wait_latest_checkpoint(100)
            stored = weights(engine)
            assert (folder / f"zero-{stage}" / "latest").read_text() == "4"
            torch.distributed.barrier()
        if kills and step == KILL_AT and first == 1:
            torch.distributed.barrier()  # everybody has saved
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine", "put back after every save"
    assert not list((folder / f"zero-{stage}").glob("at-*")), "memory saves leave nothing on disk"
    checkpointer.close()
    trained = weights(engine)
    undisturbed = make_engine(stage)
    for step in range(1, NUM_STEPS + 1):
        train_one(undisturbed, step)
    assert_same(trained, weights(undisturbed))

    fresh = make_engine(stage)
    reader = DeepSpeedCheckpointer(fresh, directory)
    path, client_state = reader.load_checkpoint(directory)
    assert (fresh.global_steps, client_state["step"]) == (NUM_STEPS, NUM_STEPS)
    assert not os.path.exists(path), "it is in memory only"
    assert_same(trained, weights(fresh))
    train_one(fresh, NUM_STEPS + 1)
    train_one(engine, NUM_STEPS + 1)
    assert_same(weights(engine), weights(fresh))
    reader.close()

    # DeepSpeed by itself reads what the agent wrote, and we read what it writes.
    alone = make_engine(stage)
    alone.load_checkpoint(directory)
    assert alone.global_steps == DISK_AT
    if first <= DISK_AT:
        assert_same(weights(alone), stored)
    train_one(alone, 99)
    native = str(folder / f"native-{stage}")
    alone.save_checkpoint(native, tag="by-itself", client_state={"step": 99})
    other = make_engine(stage)
    reader = DeepSpeedCheckpointer(other, native)
    path, client_state = reader.load_checkpoint(native)
    assert client_state["step"] == 99
    assert_same(weights(other), weights(alone))
    reader.close()
    (folder / f"done-{stage}-{rank}").touch()


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed(dist_backend="gloo")
    for word in sys.argv[2:]:
        stage, kills = int(word.rstrip("!")), word.endswith("!")
        is_done = torch.tensor(int((folder / f"done-{stage}-{torch.distributed.get_rank()}").exists()))
        torch.distributed.all_reduce(is_done, op=torch.distributed.ReduceOp.MIN)
        if not is_done:
            run_stage(folder, stage, kills)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
