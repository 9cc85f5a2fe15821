"""
One of two ranks that save and load through the Megatron front ends, with the stand-in for Megatron-LM's training package.

    megatron_ranks.py FOLDER RANK

Each rank plays a node of its own: without an agent its memory is its own as well, so what another rank saved has to be handed over.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent / "megatron_standin"))
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")

from megatron.training import checkpointing  # noqa: E402
from megatron.training.global_vars import set_args  # noqa: E402

from dlrover.protocol.errors import ConfigError  # noqa: E402
from dlrover.snapshot.memory.checksum import Corrupt  # noqa: E402
from dlrover.snapshot.storage.manifest import ManifestInvalid  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint import megatron, megatron_dist_ckpt  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.megatron import MegatronCheckpointer, StorageType  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.megatron_dist_ckpt import MegatronDistCheckpointer  # noqa: E402

mpu = checkpointing.mpu


def new_args(name: str, **changes: object) -> argparse.Namespace:
    made = argparse.Namespace(
        save=str(folder / name),
        load=str(folder / name),
        ckpt_format="torch",
        use_distributed_optimizer=False,
        no_save_optim=False,
        no_load_optim=False,
        no_save_rng=False,
        no_load_rng=False,
        finetune=False,
        exit_on_missing_checkpoint=False,
        fp16=False,
        bf16=False,
        data_parallel_random_init=False,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        fail_in_save=False,
        write_by_itself=False,
    )
    vars(made).update(changes)
    set_args(made)
    return made


def new_model(seed: int) -> tuple[list[torch.nn.Module], torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return [model], optimizer


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one.parameters(), other.parameters(), strict=True))


class Shares:
    """A distributed optimizer as Megatron's is built inside: this rank's piece of each parameter, in buckets."""

    def __init__(self, model: torch.nn.Module, seed: int) -> None:
        torch.manual_seed(100 * seed + rank)
        params = list(model.parameters())
        self.mains = [torch.nn.Parameter(torch.randn(3)) for _ in params]
        self.optimizer = torch.optim.AdamW(self.mains)
        for main in self.mains:
            main.grad = torch.randn(3)
        self.optimizer.step()
        self.gbuf_ranges = [{torch.float32: [{"param_map": {param: {} for param in params}}]}]
        self.model_param_group_index_map = {param: (0, order) for order, param in enumerate(params)}
        self.is_loaded = False

    def state_dict(self):
        return {"lr": 0.5}

    def load_state_dict(self, state):
        self.is_loaded = state == {"lr": 0.5}

    def tensors(self) -> list[torch.Tensor]:
        return [*self.mains, *(value for main in self.mains for value in self.optimizer.state[main].values())]


class TellingShares(Shares):
    """As in later versions, which tell a parameter's tensors themselves."""

    def _get_main_param_and_optimizer_states(self, param):
        main = self.mains[self.model_param_group_index_map[param][1]]
        return {"param": main, **self.optimizer.state[main]}

    def _set_main_param_and_optimizer_states(self, param, tensors):
        for name, tensor in self._get_main_param_and_optimizer_states(param).items():
            tensor.copy_(tensors[name])


class Chain:
    def __init__(self, *members: object) -> None:
        self.chained_optimizers = members

    def state_dict(self):
        return [member.state_dict() for member in self.chained_optimizers if hasattr(member, "gbuf_ranges")]

    def load_state_dict(self, state):
        assert state == [{"lr": 0.5}]


def replicas() -> None:
    """Data parallelism: one model file, saved by the first rank, needed by both."""
    args = new_args("replicas")
    saved, optimizer = new_model(1)
    result = megatron.save_checkpoint(10, saved, optimizer, None, 7.0, storage_type=StorageType.MEMORY)
    assert result, result
    assert not os.path.exists(args.save), "a memory save leaves the directory alone"
    assert args.save == str(folder / "replicas")
    assert torch.save.__module__ == "torch.serialization"
    other, its_optimizer = new_model(2)
    assert megatron.load_checkpoint(other, its_optimizer, None) == (10, 7.0)
    assert same(other[0], saved[0]), "both ranks have iteration 10 from memory"
    assert torch.load.__module__ == "torch.serialization"

    third, its_optimizer = new_model(3)
    how = {"checkpoint_interval": (10, 20), "num_floating_point_operations_so_far": 9.0}
    assert megatron.save_checkpoint_if_due(20, third, its_optimizer, None, **how)
    assert megatron.save_checkpoint_if_due(21, third, its_optimizer, None, **how) is None
    assert not megatron.is_save_requested()
    assert megatron.wait_latest_checkpoint(60)
    dist.barrier()
    files = sorted(str(path.relative_to(args.save)) for path in Path(args.save).rglob("*.pt"))
    assert files == ["iter_0000020/mp_rank_00/model_optim_rng.pt"], files
    assert Path(args.save, "latest_checkpointed_iteration.txt").read_text() == "20"
    stored = torch.load(Path(args.save, files[0]), weights_only=False)
    assert (stored["iteration"], stored["args"].save) == (20, args.save)
    MegatronCheckpointer._instance.close()
    dist.barrier()

    fourth, its_optimizer = new_model(4)
    assert megatron.load_checkpoint(fourth, its_optimizer, None) == (20, 9.0), "by Megatron itself, from its own files"
    assert same(fourth[0], third[0])
    args.load = str(folder / "elsewhere")
    assert megatron.load_checkpoint(fourth, its_optimizer, None) == (0, 0), "another directory is not memory's business"
    MegatronCheckpointer._instance.close()
    dist.barrier()


def stages() -> None:
    """Pipeline parallelism inside a node: every stage is saved, whatever its local rank."""
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    args = new_args("stages")
    saved, optimizer = new_model(50 + rank)
    assert megatron.save_checkpoint(5, saved, optimizer, None)
    assert megatron.wait_latest_checkpoint(60)
    other, its_optimizer = new_model(60)
    assert megatron.load_checkpoint(other, its_optimizer, None) == (5, 0)
    assert same(other[0], saved[0]), "each rank has its own stage back"
    dist.barrier()
    files = sorted(str(path.relative_to(args.save)) for path in Path(args.save).rglob("*.pt"))
    assert files == [f"iter_0000005/mp_rank_00_00{stage}/model_optim_rng.pt" for stage in (0, 1)], files
    keep = megatron_dist_ckpt.KeepLatestStepStrategy(1, args.save)
    assert megatron.save_checkpoint(6, saved, optimizer, None, on_busy="block", deletion_strategy=keep)
    assert megatron.wait_latest_checkpoint(60)
    MegatronCheckpointer._instance.close()
    dist.barrier()
    assert sorted(path.name for path in Path(args.save).glob("iter_*")) == ["iter_0000006"]
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel()
    dist.barrier()


def failures() -> None:
    """Whatever Megatron does in between, torch and the arguments are as they were afterwards."""
    args = new_args("failures", fail_in_save=True)
    model, optimizer = new_model(1)
    for changes, error in (
        ({"fail_in_save": True}, RuntimeError),
        ({"fail_in_save": False, "write_by_itself": True}, ConfigError),
        ({"write_by_itself": False, "ckpt_format": "torch_dist"}, ConfigError),
    ):
        vars(args).update(changes)
        try:
            megatron.save_checkpoint(1, model, optimizer, None, storage_type=StorageType.MEMORY)
        except error:
            dist.barrier()
        else:
            raise AssertionError(f"nothing was raised for {changes}")
        assert torch.save.__module__ == "torch.serialization"
        assert args.save == str(folder / "failures")
    MegatronCheckpointer._instance.close()


def shares() -> None:
    """Every rank saves its own share of the optimizer; the model once."""
    for name, chained in (("shares", False), ("chain", True)):
        args = new_args(name, use_distributed_optimizer=True)
        model, _ = new_model(1)
        kind = TellingShares if chained else Shares
        own = kind(model[0], seed=1)
        optimizer = Chain(object(), own) if chained else own
        args.consumed_train_samples = 640
        assert megatron_dist_ckpt.save_checkpoint(30, model, optimizer, None, 3.0, storage_type=StorageType.MEMORY)
        how = {"checkpoint_interval": 1, "num_floating_point_operations_so_far": 4.0}
        assert megatron_dist_ckpt.save_checkpoint_if_due(31, model, optimizer, None, **how)
        assert megatron_dist_ckpt.wait_latest_checkpoint(60)
        dist.barrier()
        for source in ("memory", "storage"):
            args = new_args(name, use_distributed_optimizer=True)
            other, _ = new_model(2)
            its_own = kind(other[0], seed=2)
            its_optimizer = Chain(object(), its_own) if chained else its_own
            assert megatron_dist_ckpt.load_checkpoint(other, its_optimizer, None) == (31, 4.0), source
            assert same(other[0], model[0]), source
            assert all(torch.equal(a, b) for a, b in zip(own.tensors(), its_own.tensors(), strict=True)), source
            assert args.consumed_train_samples == 640
            MegatronDistCheckpointer._instance.close()
            dist.barrier()
        files = sorted(str(path.relative_to(args.save)) for path in Path(args.save).rglob("*.pt"))
        assert files == [
            "iter_0000031/mp_rank_00/model_optim_rng.pt",
            "iter_0000031/rank_00000/distrib_optim.pt",
            "iter_0000031/rank_00001/distrib_optim.pt",
        ], files
        optim = torch.load(Path(args.save, f"iter_0000031/rank_{rank:05d}/distrib_optim.pt"), weights_only=False)
        assert sorted((optim[1] if chained else optim)[0][0][1]) == ["exp_avg", "exp_avg_sq", "param", "step"]
        dist.barrier()


def damage() -> None:
    """A flipped bit in a file of the newest iteration: the one before it is loaded, by all ranks; one that was named is refused."""
    for kind, holder in ((megatron, MegatronCheckpointer), (megatron_dist_ckpt, MegatronDistCheckpointer)):
        args = new_args(f"damage-{holder.__name__}")
        for iteration in (1, 2):
            model, optimizer = new_model(iteration)
            assert kind.save_checkpoint(iteration, model, optimizer, None, 0.0, on_busy="block")
        assert kind.wait_latest_checkpoint(60)
        holder._instance.close()
        dist.barrier()
        if rank == 0:
            file = Path(args.save, "iter_0000002/mp_rank_00/model_optim_rng.pt")
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        dist.barrier()
        other, its_optimizer = new_model(3)
        assert kind.load_checkpoint(other, its_optimizer, None)[0] == 1
        assert same(other[0], new_model(1)[0][0])
        assert args.load == args.save
        args.ckpt_step = 2
        try:
            kind.load_checkpoint(other, its_optimizer, None)
        except Corrupt:
            dist.barrier()
        else:
            raise AssertionError("a damaged iteration was loaded because somebody named it")
        holder._instance.close()
        dist.barrier()


def lost_trackers() -> None:
    """Decision 46: without its tracker, or without the iteration that it names, Megatron goes on from a complete one, on all ranks."""
    for kind, holder in ((megatron, MegatronCheckpointer), (megatron_dist_ckpt, MegatronDistCheckpointer)):
        args = new_args(f"lost-{holder.__name__}")
        other, its_optimizer = new_model(9)
        assert kind.load_checkpoint(other, its_optimizer, None)[0] == 0, "a beginning"
        for iteration in (1, 2, 3):
            model, optimizer = new_model(iteration)
            assert kind.save_checkpoint(iteration, model, optimizer, None, 0.0, on_busy="block")
        assert kind.wait_latest_checkpoint(60)
        holder._instance.close()
        dist.barrier()
        ours, theirs = Path(args.save, "dlrover_latest.txt"), Path(args.save, "latest_checkpointed_iteration.txt")

        def garble(theirs: Path = theirs) -> None:
            theirs.write_text("no iteration")

        def lose_both(theirs: Path = theirs, ours: Path = ours) -> None:
            theirs.unlink()
            ours.unlink()

        def lose_iteration(theirs: Path = theirs) -> None:
            theirs.write_text("3")
            shutil.rmtree(theirs.parent / "iter_0000003")

        def lose_manifest(theirs: Path = theirs) -> None:
            theirs.write_text("2")
            (theirs.parent / "iter_0000002/.dlrover/manifest.json").unlink()

        for spoil, expected in ((garble, 3), (lose_both, 3), (lose_iteration, 2), (lose_manifest, 1)):
            if rank == 0:
                spoil()
            dist.barrier()
            args.consumed_train_samples = args.consumed_valid_samples = 0
            other, its_optimizer = new_model(9)
            assert kind.load_checkpoint(other, its_optimizer, None)[0] == expected, spoil
            assert same(other[0], new_model(expected)[0][0]), spoil
            assert args.load == args.save
            holder._instance.close()
            dist.barrier()
        if rank == 0:
            (theirs.parent / "iter_0000001/.dlrover/manifest.json").unlink()
        dist.barrier()
        try:
            kind.load_checkpoint(other, its_optimizer, None)
        except ManifestInvalid:
            dist.barrier()
        else:
            raise AssertionError("a damaged iteration was loaded")
        holder._instance.close()
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mpu.initialize_model_parallel()
    for scenario in (replicas, stages, shares, failures, damage, lost_trackers):
        scenario()
        print(f"{scenario.__name__} done", flush=True)
    dist.destroy_process_group()
