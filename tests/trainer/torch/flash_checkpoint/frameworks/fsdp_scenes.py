"""What ranks do in the tests of cut states: small models, deterministic training, saving and loading."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from dlrover.snapshot.storage.commit import read_global_manifest
from dlrover.snapshot.storage.storage import LocalStorage
from dlrover.trainer.torch.flash_checkpoint.checkpointer import Checkpointer
from dlrover.trainer.torch.flash_checkpoint.dcp import FlashStorageReader, FlashStorageWriter
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer
from dlrover.trainer.torch.flash_checkpoint.fsdp import (
    FsdpCheckpointer,
    FsdpFullCheckpointer,
    FsdpShardCheckpointer,
    StorageType,
)
from tests.trainer.torch.flash_checkpoint.frameworks.fsdp_lab import Rank


class Net(torch.nn.Module):
    """Sizes that neither 2, 3 nor 4 ranks divide evenly, a buffer, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 9)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.second(torch.tanh(self.first(data)))


class SmallEnd(Net):
    """Of the last layer only one rank gets a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(9, 1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.last(super().forward(data))


def fsdp2(
    seed: int = 1, mesh: DeviceMesh | None = None, net: type[Net] = Net
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = net()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(data).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """All of it, on every rank: a digest of every bit and every other value."""
    states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    digest = hashlib.blake2b()
    for name, value in sorted(_leaves(states)):
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.detach().numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


def _leaves(value: Any, name: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, each in value.items() for leaf in _leaves(each, f"{name}/{key}")]
    if isinstance(value, (list, tuple)):
        return [leaf for number, each in enumerate(value) for leaf in _leaves(each, f"{name}/{number}")]
    return [(name, value)]


EXTRA = {"step": 3, "note": "all of it", "more": {"a": [1, 2], "t": torch.arange(3)}}


def save_round_trip(rank: Rank) -> dict[str, Any]:
    """Memory, then storage; what comes back is what was saved, and changes no more with the training."""
    model, optimizer = fsdp2()
    train(model, optimizer, range(3))
    checkpointer = rank.front(rank.folder / "run")
    assert checkpointer.load_checkpoint(*fsdp2(5)) == {}, "there is nothing yet"
    saved = checkpointer.save_checkpoint(3, model, optimizer, EXTRA, storage_type=StorageType.MEMORY)
    expected = whole(model, optimizer)
    train(model, optimizer, range(3, 5))
    other, other_optimizer = fsdp2(9)
    extra = checkpointer.load_checkpoint(other, other_optimizer)
    found = {
        "saved": bool(saved),
        "step": checkpointer.restored_step,
        "memory": whole(other, other_optimizer) == expected,
    }
    found["extra"] = extra.pop("more")["t"].tolist(), extra
    train(other, other_optimizer, range(3, 5))
    found["goes on the same"] = whole(other, other_optimizer) == whole(model, optimizer)
    again, again_optimizer = fsdp2(11)
    checkpointer.load_checkpoint(again, again_optimizer)
    found["not aliased"] = whole(again, again_optimizer) == expected
    assert checkpointer.save_checkpoint(5, model, optimizer, {"step": 5}, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(30)
    found["whole"] = whole(model, optimizer)
    checkpointer.close()
    return found


def load_plainly(rank: Rank) -> str:
    """With torch alone, as somebody would who has never heard of us."""
    model, optimizer = fsdp2(21)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=str(rank.folder / "run" / "5"))
    from torch.distributed.checkpoint.state_dict import set_state_dict

    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert state["step"] == 5
    return whole(model, optimizer)


def load_newest(rank: Rank) -> tuple[str, int | None, dict[str, Any]]:
    model, optimizer = fsdp2(31)
    checkpointer = rank.front(rank.folder / "run")
    extra = checkpointer.load_checkpoint(model, optimizer)
    step = checkpointer.restored_step
    checkpointer.close()
    return whole(model, optimizer), step, extra


def load_and_go_on(rank: Rank) -> tuple[str, int | None]:
    """Restore, train two steps, save them to memory and the last to storage."""
    model, optimizer = fsdp2(41)
    checkpointer = rank.front(rank.folder / "run")
    first = checkpointer.load_checkpoint(model, optimizer).get("step", 0)
    for step in range(first, first + 2):
        train(model, optimizer, range(step, step + 1))
        kind = StorageType.DISK if step == first + 1 else StorageType.MEMORY
        extra = {"step": step + 1}
        assert checkpointer.save_checkpoint(step + 1, model, optimizer, extra, storage_type=kind, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    return whole(model, optimizer), first


def pieces_of(whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's piece of it, without asking the others."""
    parts = torch.chunk(whole, mesh.size())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    own = parts[coordinate[0]].clone() if coordinate[0] < len(parts) else whole[:0].clone()
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.size(), stride=whole.stride())


NUMBERS = torch.arange(35.0).reshape(7, 5)


def save_numbers(rank: Rank) -> bool:
    """The older call: the script has made the state itself."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    state = {"model": {"numbers": pieces_of(NUMBERS, mesh), "same": torch.arange(4), "wide": NUMBERS.t()}, "step": 1}
    checkpointer = FsdpCheckpointer(rank.folder / "run")
    is_saved = bool(checkpointer.save_checkpoint(1, state, str(rank.folder / "run" / "one"), StorageType.DISK))
    is_saved &= checkpointer.wait_latest_checkpoint(30)
    state["model"]["numbers"].to_local().add_(1)
    is_saved &= bool(checkpointer.save_checkpoint(2, state, storage_type=StorageType.MEMORY))
    checkpointer.close()
    return is_saved


def load_numbers_in_another_order(rank: Rank) -> tuple[list[float], list[float], list[float], bool]:
    """The ranks have changed places: rank 0 now has the last piece. What it got, and what it should have."""
    mesh = DeviceMesh("cpu", list(range(rank.world_size))[::-1])
    state = {
        "model": {
            "numbers": pieces_of(torch.zeros(7, 5), mesh),
            "same": torch.zeros(4, dtype=torch.int64),
            "wide": torch.zeros(5, 7),
        },
        "step": 0,
    }
    checkpointer = FsdpCheckpointer(rank.folder / "run")
    reader = checkpointer.get_storage_reader()
    assert reader is not None
    dcp.load(state, storage_reader=reader)
    own = pieces_of(NUMBERS, mesh).to_local()
    is_rest_fine = torch.equal(state["model"]["wide"], NUMBERS.t()) and state["model"]["same"].tolist() == [0, 1, 2, 3]
    found = state["model"]["numbers"].to_local().flatten().tolist()
    checkpointer.close()
    return found, own.flatten().tolist(), (own + 1).flatten().tolist(), is_rest_fine


def load_newest_numbers(rank: Rank) -> tuple[int | None, bool]:
    """The step, and whether this rank has its own numbers of that step."""
    mesh = init_device_mesh("cpu", (rank.world_size,))
    zeros = torch.zeros_like
    state = {
        "model": {
            "numbers": pieces_of(zeros(NUMBERS), mesh),
            "same": zeros(torch.arange(4)),
            "wide": zeros(NUMBERS.t()),
        }
    }
    checkpointer = FsdpCheckpointer(rank.folder / "run")
    found = checkpointer.engine.load_state(state)
    step = checkpointer.restored_step
    assert found is not None
    assert step is not None
    assert found["step"] == 1
    own = pieces_of(NUMBERS, mesh).to_local() + step - 1
    checkpointer.close()
    return step, torch.equal(state["model"]["numbers"].to_local(), own)


_FULL = StateDictOptions(full_state_dict=True)


def fsdp1(seed: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = FullyShardedDataParallel(SmallEnd(), device_id=torch.device("cpu"), use_orig_params=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def hybrid(seed: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two replicas of two pieces."""
    return fsdp2(seed, init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "pieces")))


def save_hybrid_and_load_as(rank: Rank) -> bool:
    model, optimizer = hybrid()
    train(model, optimizer, range(2))
    checkpointer = rank.front(rank.folder / "run")
    assert checkpointer.save_checkpoint(2, model, optimizer, {"step": 2}, on_busy="block")
    assert checkpointer.wait_latest_checkpoint(30)
    expected = whole(model, optimizer)
    found = []
    for make in (hybrid, fsdp2):
        for path in ("", str(rank.folder / "run" / "2")):
            other = make(7)
            assert checkpointer.load_checkpoint(*other, resume_path=path) == {"step": 2}
            found.append(whole(*other) == expected)
    checkpointer.close()
    return all(found)


def round_trip_of_fsdp1(rank: Rank) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own parts
        model, optimizer = fsdp1()
        train(model, optimizer, range(2))
        checkpointer = rank.front(rank.folder / "run")
        assert checkpointer.save_checkpoint(2, model, optimizer, {"step": 2})
        expected = whole(model, optimizer)
        assert checkpointer.wait_latest_checkpoint(30)
        found = []
        for path in ("", str(rank.folder / "run" / "2")):
            other = fsdp1(7)
            checkpointer.load_checkpoint(*other, resume_path=path)
            found.append(whole(*other) == expected)
        newer = fsdp2(7, net=SmallEnd)
        checkpointer.load_checkpoint(*newer)
        one, two = (get_model_state_dict(each, options=_FULL) for each in (model, newer[0]))
        found.append(all(torch.equal(one[name], two[name]) for name in two))
        checkpointer.close()
    return found


def follow_the_old_guide(rank: Rank) -> list[bool]:
    """Saving and loading as scripts for the original's first versions do it: states made by hand, a reader for torch's functions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own parts
        model, optimizer = fsdp1()
        train(model, optimizer, range(2))
        checkpointer = FsdpCheckpointer(str(rank.folder / "run"))
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {
                "model": model.state_dict(),
                "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer),
                "step": 2,
            }
            checkpointer.save_checkpoint(2, state, str(rank.folder / "run" / "2"), StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(30)
        expected = whole(model, optimizer)
        found = []
        for path in ("", str(rank.folder / "run" / "2")):
            other, other_optimizer = fsdp1(7)
            reader = checkpointer.get_storage_reader(path)
            with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
                wanted = {"model": other.state_dict(), "step": 0}
                dcp.load(wanted, storage_reader=reader)
                other.load_state_dict(wanted["model"])
                loaded = load_sharded_optimizer_state_dict(
                    model_state_dict=wanted["model"], optimizer_key="optim", storage_reader=reader
                )
                flat = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, loaded["optim"])
                other_optimizer.load_state_dict(flat)
            found += [wanted["step"] == 2, whole(other, other_optimizer) == expected]
        checkpointer.close()
    return found


def use_torch_functions(rank: Rank) -> list[bool]:
    """A script that calls `dcp.save`, `dcp.async_save` and `dcp.load` itself, with our reader and writer."""
    directory = rank.folder / "run"
    checkpointer = FsdpShardCheckpointer(directory)
    model, optimizer = fsdp2()
    train(model, optimizer, range(2))
    writer = FlashStorageWriter(checkpointer)
    dcp.save(_state(model, optimizer, 2), checkpoint_id=str(directory / "step-2"), storage_writer=writer)
    expected = {2: whole(model, optimizer)}
    train(model, optimizer, range(2, 3))
    writer.step = 3
    group = dist.new_group(backend="gloo")
    state = _state(model, optimizer, 3)
    later = dcp.async_save(state, checkpoint_id="", storage_writer=writer, process_group=group)
    train(model, optimizer, range(2, 3))  # goes on, with collectives of its own
    later.result()
    assert checkpointer.wait_latest_checkpoint(30)
    found = []
    for _ in range(2):
        reader = FlashStorageReader(checkpointer)
        found.append(reader.step == 3)
        other = fsdp2(8)
        dcp.load(_state(*other, 0), storage_reader=reader)
    found.append(whole(*other) == _trained(3))
    older = fsdp2(8)
    dcp.load(_state(*older, 0), storage_reader=FlashStorageReader(checkpointer, str(directory / "step-2")))
    found.append(whole(*older) == expected[2])
    plain = fsdp2(8)
    dcp.load(_state(*plain, 0), checkpoint_id=str(directory / "3"))
    found.append(whole(*plain) == _trained(3))
    checkpointer.close()
    return found


def _trained(num_steps: int) -> str:
    model, optimizer = fsdp2()
    train(model, optimizer, range(num_steps))
    return whole(model, optimizer)


def _state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optimizer_state, "step": step}


def read_what_others_wrote(rank: Rank) -> list[bool]:
    """Plain `dcp.save`, found by path and by the tracker; the older step in storage after damage to the newer."""
    directory = rank.folder / "run"
    model, optimizer = fsdp2()
    train(model, optimizer, range(4))
    dcp.save(_state(model, optimizer, 4), checkpoint_id=str(directory / "4"))
    checkpointer = FsdpShardCheckpointer(directory)
    found = []
    other = fsdp2(8)
    extra = checkpointer.load_checkpoint(*other, resume_path=str(directory / "4"))
    found.append(extra == {"step": 4} and whole(*other) == whole(model, optimizer))
    if rank.rank == 0:
        (directory / "dlrover_latest.txt").write_text("4")
    dist.barrier()
    other = fsdp2(8)
    found.append(checkpointer.load_checkpoint(*other) == {"step": 4} and checkpointer.restored_step == 4)
    found.append(whole(*other) == whole(model, optimizer))
    checkpointer.close()
    return found


def save_steps(rank: Rank) -> str:
    """Two steps in storage and in memory; returns the state of the older."""
    model, optimizer = fsdp2()
    checkpointer = rank.front(rank.folder / "run")
    states = []
    for step in (1, 2):
        train(model, optimizer, range(step - 1, step))
        assert checkpointer.save_checkpoint(step, model, optimizer, {"step": step}, on_busy="block")
        states.append(whole(model, optimizer))
    assert checkpointer.wait_latest_checkpoint(30)
    checkpointer.close()
    return states[0]


def change_the_structure(rank: Rank) -> list[bool]:
    """More keys, another shape, bytes that grow: every save is planned for what it is."""
    checkpointer = FsdpShardCheckpointer(rank.folder / "run")
    mesh = init_device_mesh("cpu", (rank.world_size,))
    found = []
    for step, (num_rows, text) in enumerate([(7, "a"), (7, "b" * 200), (9, "c" * 5000), (3, "d"), (3, "e" * 40)]):
        numbers = torch.arange(float(num_rows * 2)).reshape(num_rows, 2) + step
        state: dict[str, Any] = {"numbers": pieces_of(numbers, mesh), "text": text, "empty": torch.empty(0, 3)}
        if step % 2:
            state[f"only {step}"] = [step, {"x": torch.tensor(step)}]
        kind = StorageType.DISK if step in (2, 4) else StorageType.MEMORY
        assert checkpointer.save_checkpoint(step, state, "", kind, on_busy="block")
        for path in ["", *([str(rank.folder / "run" / str(step))] if kind is StorageType.DISK else [])]:
            if path:
                assert checkpointer.wait_latest_checkpoint(30)
            wanted = {"numbers": pieces_of(torch.zeros(num_rows, 2), mesh)}
            loaded = checkpointer.engine.load_state(wanted, path)
            assert loaded is not None
            same = torch.equal(wanted["numbers"].to_local(), state["numbers"].to_local())
            found.append(same and loaded["text"] == text and loaded["empty"].shape == (0, 3))
            if step % 2:
                [number, inner] = loaded[f"only {step}"]
                found.append(number == step and inner["x"].item() == step)
    checkpointer.close()
    return found


def save_before_the_first_step(rank: Rank) -> list[bool]:
    """Neither a load that finds nothing nor a save changes an optimizer that has not made a step; and it is restored as such."""
    reference = fsdp2()
    train(*reference, range(2))
    expected = whole(*reference)
    found = []
    for make in (FsdpShardCheckpointer, FsdpFullCheckpointer):
        checkpointer = make(rank.folder / make.__name__)
        model, optimizer = fsdp2()
        optimizer.param_groups[0]["weight_decay"] = reference[1].param_groups[0]["weight_decay"]
        assert checkpointer.load_checkpoint(model, optimizer) == {}
        found.append(not optimizer.state)
        checkpointer.save_checkpoint(0, model, optimizer, {"step": 0}, storage_type=StorageType.MEMORY)
        found.append(not optimizer.state)
        train(model, optimizer, range(2))
        found.append(whole(model, optimizer) == expected)
        dist.barrier()
        if make is FsdpShardCheckpointer:
            found.append(checkpointer.load_checkpoint(model, optimizer) == {"step": 0} and not optimizer.state)
            train(model, optimizer, range(2))
            found.append(whole(model, optimizer) == expected)
        checkpointer.close()
    return found


def save_when_due(rank: Rank) -> list[bool]:
    """With a rhythm, and lazily where that is possible; what comes back is as it was at the call."""
    checkpointer = FsdpShardCheckpointer(rank.folder / "run", checkpoint_interval=(2, 8), lazy="auto", num_slots=3)
    found = [isinstance(checkpointer, Checkpointer), *_save_in_a_rhythm(rank, checkpointer)]
    found += [checkpointer.wait_for_staging(), checkpointer.poll()]
    found += _save_with_a_metric(rank, checkpointer)
    whole_state = FsdpFullCheckpointer(rank.folder / "whole", checkpoint_interval=(2, 8), num_slots=3)
    return [*found, *_save_in_a_rhythm(rank, whole_state), *_save_with_a_metric(rank, whole_state, "whole")]


def _save_in_a_rhythm(rank: Rank, checkpointer: FsdpShardCheckpointer | FsdpFullCheckpointer) -> list[bool]:
    model, optimizer = fsdp2()
    results = []
    for step in range(6):
        train(model, optimizer, range(step, step + 1))
        results.append(checkpointer.save_if_due(step, model, optimizer, {"step": step}))
        if results[-1] is not None:
            expected = step, whole(model, optimizer)
    is_saving = rank.rank == 0 or isinstance(checkpointer, FsdpShardCheckpointer)
    found = [not checkpointer.is_save_requested(), None in results, any(results) == is_saving]
    other = fsdp2(8)
    found.append(checkpointer.load_checkpoint(*other) == {"step": expected[0]})
    found.append(whole(*other) == expected[1])
    return found


def _save_with_a_metric(
    rank: Rank, checkpointer: FsdpShardCheckpointer | FsdpFullCheckpointer, name: str = "run"
) -> list[bool]:
    model, optimizer = fsdp2()
    train(model, optimizer, range(1))
    checkpointer.save_checkpoint(9, model, optimizer, on_busy="block", metric=0.25)
    found = [checkpointer.wait_latest_checkpoint(30)]
    dist.barrier()
    manifest = read_global_manifest(LocalStorage(), str(rank.folder / name / "9"))
    found.append(manifest is not None and manifest.metric == 0.25)
    checkpointer.close()
    return found


def resize_a_copied_state(rank: Rank) -> tuple[int, list[float]]:
    """A state that all ranks have whole, as DDP's: the next step, saved to memory, and to storage now and then."""
    checkpointer = DdpCheckpointer(rank.folder / "run")
    state = checkpointer.load_checkpoint() or {"step": 0, "weights": torch.zeros(4)}
    step = state["step"] + 1
    weights = state["weights"] * 0.5 + step
    kind = StorageType.DISK if step == 2 else StorageType.MEMORY
    saved = checkpointer.save_checkpoint(step, {"step": step, "weights": weights}, storage_type=kind, on_busy="block")
    assert bool(saved) == (rank.rank == 0)
    assert checkpointer.wait_latest_checkpoint(30)
    dist.barrier()
    checkpointer.close()
    return step, weights.tolist()


def round_trip_in_one_file(rank: Rank) -> list[bool]:
    return _round_trip_in_one_file(rank, fsdp2, "run")


def round_trip_of_fsdp1_in_one_file(rank: Rank) -> list[bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own parts
        return _round_trip_in_one_file(rank, fsdp1, "older run")


def _round_trip_in_one_file(
    rank: Rank, make: Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]], name: str
) -> list[bool]:
    checkpointer = FsdpFullCheckpointer(rank.folder / name)
    model, optimizer = make(1)
    train(model, optimizer, range(2))
    assert checkpointer.load_checkpoint(*make(5)) == {}
    saved = checkpointer.save_checkpoint(2, model, optimizer, {"step": 2})
    assert bool(saved) == (rank.rank == 0)
    assert checkpointer.wait_latest_checkpoint(30)
    dist.barrier()
    expected = whole(model, optimizer)
    found = []
    for path in ("", str(rank.folder / name / "2" / "rank_0.pt")):
        other = make(8)
        found.append(checkpointer.load_checkpoint(*other, resume_path=path) == {"step": 2})
        found.append(whole(*other) == expected)
    checkpointer.close()
    return found
