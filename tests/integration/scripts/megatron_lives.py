"""
Two ranks of a Megatron job that is killed once after a memory save, and goes on from memory.

    megatron_lives.py core|any|lm FOLDER

core: a tiny GPT of the real megatron-core, cut by tensor parallelism, in its distributed checkpoints. any: the same with `dlrover.Checkpointer`. lm: the front end for Megatron-LM's own
functions, with the tests' stand-in for them, two data-parallel ranks.
"""

import argparse
import gc
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = Path(__file__).parents[2]
STANDIN = TESTS / "trainer" / "torch" / "flash_checkpoint" / "frameworks" / "megatron_standin"


class Core:
    """Saves and loads with megatron-core's `dist_checkpointing`."""

    def __init__(self, folder: Path, *, is_first: bool = True) -> None:
        from megatron.core import parallel_state

        if is_first:
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        self.directory = folder / "checkpoints"
        self.checkpointer = self.new_checkpointer(self.directory, checkpoint_interval=(7, 7))
        self.wait = self.checkpointer.wait_latest_checkpoint

    def new_checkpointer(self, directory: Path, **options: Any) -> Any:
        from dlrover.trainer.torch.flash_checkpoint.megatron_sharded import MegatronShardedCheckpointer

        return MegatronShardedCheckpointer(directory, **options)

    def new_model(self, seed: int) -> torch.nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
        )
        torch.manual_seed(seed)
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=8)
        with torch.no_grad():
            for parameter in model.parameters():
                # What is cut differs from rank to rank, what is replicated does not.
                own = dist.get_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 * seed + own)))
        return model

    def save(self, iteration: int, model: torch.nn.Module, storage_type: object) -> None:
        """To storage by a rhythm, which begins with such a save."""
        state = {"model": model.sharded_state_dict(), "iteration": iteration}
        if storage_type is type(storage_type).MEMORY:
            assert self.checkpointer.save_checkpoint(iteration, state, storage_type)
        else:
            assert self.checkpointer.save_if_due(iteration, lambda: state)
            assert self.checkpointer.save_if_due(iteration + 1, dict) is None
        assert not self.checkpointer.is_save_requested()

    def load(self, model: torch.nn.Module) -> int:
        return self._filled(model, self.checkpointer.load_checkpoint({"model": model.sharded_state_dict()}))

    def load_without_us(self, model: torch.nn.Module, iteration: int) -> int:
        from megatron.core import dist_checkpointing

        directory = self.directory / f"iter_{iteration:07d}"
        return self._filled(model, dist_checkpointing.load({"model": model.sharded_state_dict()}, str(directory)))

    def _filled(self, model: torch.nn.Module, state: dict | None) -> int:
        if state is None:
            return 0
        model.load_state_dict(state["model"])
        return state["iteration"]


class AnyModel(Core):
    """The same through `dlrover.Checkpointer`."""

    def new_checkpointer(self, directory: Path, **options: Any) -> Any:
        sys.path.insert(0, str(TESTS.parent))
        from tests.trainer.torch.flash_checkpoint.any_front import MegatronFront

        return MegatronFront(directory, **options)

    def _filled(self, model: torch.nn.Module, state: dict | None) -> int:
        return super()._filled(model, state and {**state, "iteration": state["step"]})


class Lm:
    """Saves and loads with the front end for Megatron-LM's functions."""

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(STANDIN))
        from megatron.training import checkpointing
        from megatron.training.global_vars import set_args

        from dlrover.trainer.torch.flash_checkpoint import megatron

        checkpointing.mpu.initialize_model_parallel()
        self.directory = folder / "checkpoints"
        where = str(self.directory)
        set_args(argparse.Namespace(save=where, load=where, fail_in_save=False, write_by_itself=False))
        self.theirs, self.ours, self.wait = checkpointing, megatron, megatron.wait_latest_checkpoint

    def new_model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        return torch.nn.Linear(4, 3)

    def save(self, iteration: int, model: torch.nn.Module, storage_type: object) -> None:
        optimizer = torch.optim.SGD(model.parameters())
        assert self.ours.save_checkpoint(iteration, [model], optimizer, None, storage_type=storage_type)

    def load(self, model: torch.nn.Module) -> int:
        return self.ours.load_checkpoint([model], torch.optim.SGD(model.parameters()), None)[0]

    def load_without_us(self, model: torch.nn.Module, iteration: int) -> int:
        return self.theirs.load_checkpoint([model], torch.optim.SGD(model.parameters()), None)[0]


def without_our_files(job: Core, folder: Path) -> None:
    """A checkpoint as megatron-core would have left it: no manifest and no tracker of ours."""
    if dist.get_rank() == 0:
        names = shutil.ignore_patterns(".dlrover", "dlrover_latest.txt", "*.lock")
        shutil.copytree(job.directory, folder / "checkpoints", ignore=names)
        assert sorted(path.name for path in (folder / "checkpoints" / "iter_0000007").iterdir()) == [
            ".metadata",
            "__0_0.distcp",
            "__1_0.distcp",
            "common.pt",
            "metadata.json",
        ]
    dist.barrier()


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))


def main() -> None:
    folder = Path(sys.argv[2])
    dist.init_process_group("gloo")
    job = {"core": Core, "any": AnyModel, "lm": Lm}[sys.argv[1]](folder)
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType

    model = job.new_model(1)
    first = job.load(model)
    with (folder / f"lives-{dist.get_rank()}").open("a") as file:
        file.write(f"{first}\n")
    if first == 0:
        job.save(3, job.new_model(2), StorageType.MEMORY)
        dist.barrier()
        assert not job.directory.exists()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    assert same(model, job.new_model(2)), "what was in memory only is back on every rank"
    job.save(7, job.new_model(5), StorageType.DISK)
    assert job.wait(60)
    dist.barrier()
    assert (job.directory / "latest_checkpointed_iteration.txt").read_text() == "7"
    for load in (lambda fresh: job.load_without_us(fresh, 7), job.load):
        fresh = job.new_model(1)
        assert load(fresh) == 7
        assert same(fresh, job.new_model(5))
    dist.barrier()
    if isinstance(job, Core):
        job.checkpointer.close()
        without_our_files(job, folder / "theirs")
        if dist.get_rank() == 0:
            for tracker in ("dlrover_latest.txt", "latest_checkpointed_iteration.txt"):
                (job.directory / tracker).unlink()
        dist.barrier()
        for place in ("theirs", "."):  # with Megatron's tracker and nothing of ours; with our manifest and no tracker
            fresh = job.new_model(1)
            found = type(job)(folder / place, is_first=False)
            assert found.load(fresh) == 7
            assert same(fresh, job.new_model(5))
            found.checkpointer.close()
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
