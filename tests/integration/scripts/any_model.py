"""
Trains a small model of one kind with `dlrover.Checkpointer`, is killed once, and goes on from memory.

    any_model.py plain|sharded|deepspeed|megatron FOLDER

Every step is saved to memory, step 3 to storage; rank 1 dies after step 5 of the first life. The first step of each life goes to FOLDER/lives-RANK. What
cannot be checked from outside is checked here: the state at the end is that of an undisturbed training, and a second model gets step 3 from storage.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import dlrover

warnings.simplefilter("ignore")
KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
NUM_STEPS, STORED, KILLED = 8, 3, 5


def plain() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.parallel.DistributedDataParallel(net())
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def sharded() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def deepspeed() -> tuple[torch.nn.Module, None]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as theirs

    theirs.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return theirs.initialize(model=model, optimizer=optimizer, config=config)[0], None


def megatron() -> tuple[torch.nn.Module, None]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, use_cpu_initialization=True, pipeline_dtype=torch.float32
    )
    torch.manual_seed(7)
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8), None


def net() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


MAKE = {"plain": plain, "sharded": sharded, "deepspeed": deepspeed, "megatron": megatron}


class Seen:
    """Something else with a state."""

    def __init__(self) -> None:
        self.records = 0

    def state_dict(self) -> dict[str, int]:
        return {"records": self.records}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.records = state["records"]


def train_one(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, step: int) -> None:
    """For Megatron without its own training loop: another number in each weight, the same in each life."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    if KIND == "megatron":
        with torch.no_grad():
            for parameter in model.parameters():
                is_cut = getattr(parameter, "tensor_model_parallel", False)
                own = generator if is_cut else torch.Generator().manual_seed(step)
                parameter.add_(torch.randn(parameter.shape, generator=own))
        return
    loss = model(torch.randn(4, 8, generator=generator)).pow(2).mean()
    if optimizer is None:
        model.backward(loss)
        model.step()
        return
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model: torch.nn.Module) -> list[torch.Tensor]:
    inner = model.module if hasattr(model, "module") else model
    return [getattr(each, "_local_tensor", each).detach().clone() for each in inner.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model, optimizer = MAKE[KIND]()
    seen = Seen()
    checkpointer = dlrover.Checkpointer(
        FOLDER / "run", model=model, optimizer=optimizer, also={"seen": seen}, checkpoint_interval=(1, STORED)
    )
    assert checkpointer.kind == KIND, checkpointer.kind
    restored = checkpointer.restore()
    first = (restored or 0) + 1
    lives = FOLDER / f"lives-{rank}"
    is_first_life = not lives.exists()
    with lives.open("a") as file:
        file.write(f"{first}\n")
    assert restored is None if is_first_life else checkpointer.extra == {"note": f"of step {restored}"}
    assert seen.records == 4 * (first - 1)
    for step in range(first, NUM_STEPS + 1):
        train_one(model, optimizer, step)
        seen.records += 4
        place = "storage" if step == STORED else "memory"
        result = checkpointer.save(step, {"note": f"of step {step}"}, to=place, on_busy="block")
        assert result or (KIND == "plain" and rank == 1 and result.reason == "not_a_saving_rank"), result
        if step == STORED:
            assert checkpointer.wait(120)
        dist.barrier()
        if is_first_life and step == KILLED and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    other, its_optimizer = MAKE[KIND]()
    for step in range(1, STORED + 1):
        train_one(other, its_optimizer, step)
    stored = bits(other)
    for step in range(STORED + 1, NUM_STEPS + 1):
        train_one(other, its_optimizer, step)
    assert same(bits(model), bits(other)), "not the state of an undisturbed training"
    name = f"iter_{STORED:07d}" if KIND == "megatron" else str(STORED)
    assert checkpointer.restore(FOLDER / "run" / name) == STORED
    assert same(bits(model), stored), "the checkpoint in storage is another state"
    assert seen.records == 4 * STORED
    assert checkpointer.extra == {"note": f"of step {STORED}"}
    checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
