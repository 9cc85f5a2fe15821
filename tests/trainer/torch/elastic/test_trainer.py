"""The trainer: fewer workers do exactly what the full world would do."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from dlrover.protocol.errors import ConfigError  # noqa: E402
from dlrover.trainer.torch.elastic import ElasticTrainer  # noqa: E402
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader  # noqa: E402
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler  # noqa: E402

BATCH, SIZE, FULL = 4, 96, 4


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SIZE, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True) + 0.1)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def train_as_rank(rank: int, world_size: int, folder: str) -> None:
    """`train` in a process group, which ends before the process does.

    A wrapped model stands in a cycle and holds the group. Left to the end of the interpreter, a thread of gloo
    that then frees a tensor asks for a GIL that is gone, and the process dies of SIGABRT.
    """
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    train(rank, world_size, folder)
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()


def train(rank: int, world_size: int, folder: str, clears_first: bool = False) -> None:
    """One epoch with some ranks of a job for four; rank 0 keeps the weights, each rank what it read per step."""
    net = model()
    wrapped = torch.nn.parallel.DistributedDataParallel(net) if world_size > 1 else net
    sampler = ElasticDistributedSampler(data(), world_size, rank, seed=9)
    trainer = ElasticTrainer(wrapped, max_workers=FULL)
    trainer.deal(sampler, BATCH)
    plain = torch.optim.AdamW(net.parameters(), lr=0.05)
    optimizer, scheduler = trainer.prepare(plain, torch.optim.lr_scheduler.ExponentialLR(plain, 0.9))
    assert optimizer is plain
    counts: list[int] = []
    for inputs, wanted in DataLoader(data(), BATCH, sampler=sampler):
        with trainer.step(fix_total_batch_size=True):
            if clears_first:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(wrapped(inputs), wanted).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e9)
            optimizer.step()
            scheduler.step()
            if not clears_first:
                optimizer.zero_grad()
        counts += [0] * (trainer.num_steps + 1 - len(counts))
        counts[-2 if not trainer._micro_step else -1] += len(inputs)
    result: dict[str, Any] = {
        "weights": net.state_dict(), "steps": trainer.num_steps, "counts": counts[: trainer.num_steps],
        "lr": plain.param_groups[0]["lr"],
    }  # fmt: skip
    torch.save(result, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """Plain torch with the whole batch at once."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    sampler = ElasticDistributedSampler(data(), 1, 0, seed=9)
    sampler.play(FULL, BATCH)
    for inputs, wanted in DataLoader(data(), BATCH * FULL, sampler=sampler):
        torch.nn.functional.mse_loss(net(inputs), wanted).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return {"weights": net.state_dict(), "lr": optimizer.param_groups[0]["lr"]}


def check(folder: Path, world_size: int, reference: dict[str, Any]) -> None:
    results = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
    assert {each["steps"] for each in results} == {SIZE // (BATCH * FULL)}
    for per_step in zip(*(each["counts"] for each in results), strict=True):
        assert sum(per_step) == BATCH * FULL, "the batch of every step is that of the full world"
    assert results[0]["lr"] == pytest.approx(reference["lr"], rel=1e-12)
    for name, weight in reference["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clears_first", [False, True])
def test_one_worker_of_four(tmp_path: Path, reference: dict[str, Any], clears_first: bool) -> None:
    train(0, 1, str(tmp_path), clears_first)
    check(tmp_path, 1, reference)


def test_three_workers_of_four(tmp_path: Path, reference: dict[str, Any]) -> None:
    """They do not divide: one rank does two micro-batches in each step, the others one."""
    mp.spawn(train_as_rank, args=(3, str(tmp_path)), nprocs=3)
    check(tmp_path, 3, reference)


def test_without_a_fixed_batch_every_micro_batch_is_a_step() -> None:
    net = model()
    trainer = ElasticTrainer(net, max_workers=8)
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    before = [each.clone() for each in net.parameters()]
    for _ in range(3):
        with trainer.step():
            net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert trainer.num_steps == 3
    assert any(not torch.equal(one, two) for one, two in zip(before, net.parameters(), strict=True))
    trainer.reset()
    assert trainer.num_steps == 0


@pytest.mark.parametrize(("nodes", "local", "wanted"), [("4", "2", 8), ("", "", 1), ("0", "4", 1)])
def test_the_full_world_is_what_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, nodes: str, local: str, wanted: int
) -> None:
    monkeypatch.setenv("WORKER_NUM", nodes)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert ElasticTrainer(model()).gradient_accumulation_steps == wanted


def test_a_prepared_optimizer_is_a_real_one() -> None:
    net = model()
    trainer = ElasticTrainer(net, max_workers=2)
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    assert isinstance(optimizer, torch.optim.SGD)
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(True))
    for _ in range(4):
        with trainer.step(fix_total_batch_size=True):
            loss = net(torch.ones(2, 5, dtype=torch.float64)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(heard) == 2
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1


def scaler() -> torch.amp.GradScaler:
    """It grows after every second step, so that a step too many shows."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


def train_scaled(num_parts: int, *, fused: bool, clips: bool, broken: tuple[int, ...] = ()) -> dict[str, Any]:
    """An epoch with a scaler, each step in so many parts. The loss of the broken ones, counted in quarters of a step, is not finite."""
    net, scaling = model().float(), scaler()
    trainer = ElasticTrainer(net, max_workers=num_parts)
    plain = torch.optim.Adam(net.parameters(), lr=0.05, fused=fused)
    optimizer = trainer.prepare(plain, grad_scaler=scaling)
    size = BATCH * FULL // num_parts
    scales = []
    for number, (inputs, wanted) in enumerate(DataLoader(data(), size)):
        quarters = range(number * FULL // num_parts, (number + 1) * FULL // num_parts)
        with trainer.step(fix_total_batch_size=True):
            loss = torch.nn.functional.mse_loss(net(inputs.float()), wanted.float())
            if any(each in broken for each in quarters):
                loss = loss * float("inf")
            scaling.scale(loss).backward()
            if clips:
                scaling.unscale_(optimizer)
                if trainer.is_last_micro_batch:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
        if not trainer._micro_step:
            scales.append(scaling.get_scale())
    assert trainer.num_steps == SIZE // (BATCH * FULL)
    return {"weights": net.state_dict(), "scales": scales, "num_taken": int(plain.state_dict()["state"][0]["step"])}


@pytest.mark.parametrize("broken", [(), (4,), (7,)], ids=["finite", "first-overflows", "last-overflows"])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_unscales_the_whole_batch_once(fused: bool, clips: bool, broken: tuple[int, ...]) -> None:
    """Also where a step is left out because a part of it is not finite: the next one begins anew."""
    whole = train_scaled(1, fused=fused, clips=clips, broken=broken)
    parts = train_scaled(FULL, fused=fused, clips=clips, broken=broken)
    assert whole["num_taken"] == parts["num_taken"] == SIZE // (BATCH * FULL) - bool(broken)
    assert parts["scales"] == whole["scales"]
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(parts["weights"][name], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scaler_that_was_not_given_is_refused_before_there_are_fewer_workers(world_size: int) -> None:
    net = model()
    trainer = ElasticTrainer(net, max_workers=2)
    trainer._world_size = world_size  # as in a group; nothing is exchanged here
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    scaling, off = scaler(), torch.amp.GradScaler("cpu", enabled=False)
    with trainer.step(fix_total_batch_size=True):
        scaling.scale(net(torch.ones(2, 5, dtype=torch.float64)).sum()).backward()
        off.step(optimizer)
        with pytest.raises(ConfigError, match="grad_scaler=scaler"):
            scaling.step(optimizer)


def test_a_scaler_needs_no_trainer_where_every_micro_batch_is_a_step() -> None:
    net = model()
    trainer = ElasticTrainer(net, max_workers=2)
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    before, scaling = net[0].weight.clone(), scaler()
    with trainer.step():
        scaling.scale(net(torch.ones(2, 5, dtype=torch.float64)).sum()).backward()
        scaling.step(optimizer)
        scaling.update()
    assert not torch.equal(net[0].weight, before)


@pytest.mark.parametrize(("is_inside", "has_backward"), [(True, True), (False, True), (False, False)])
def test_a_step_that_nobody_takes_is_cleared(is_inside: bool, has_backward: bool) -> None:
    net = torch.nn.Linear(1, 1, bias=False).double()
    trainer = ElasticTrainer(net, max_workers=2)
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=1.0))
    left = []
    for value in (1.0, float("inf"), 3.0, 5.0):
        with trainer.step(fix_total_batch_size=True):
            loss = (net.weight * value).sum()
            if has_backward or loss.isfinite():
                loss.backward()
            if value == 5.0:
                left.append(float(net.weight.grad))
            if loss.isfinite():
                optimizer.step()
            if is_inside:
                optimizer.zero_grad()
        if not is_inside:
            optimizer.zero_grad()
    assert left == [4.0], "the mean over the second step alone"


def test_the_state_of_a_prepared_scheduler_is_torchs_own() -> None:
    net = model()
    plain = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    before = set(scheduler.state_dict())
    _, prepared = ElasticTrainer(net, max_workers=1).prepare(plain, scheduler)
    assert set(prepared.state_dict()) == before
    assert isinstance(prepared, torch.optim.lr_scheduler.ExponentialLR)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_state_in_the_middle_of_an_epoch_goes_on_with_any_number_of_workers(num_ranks: int) -> None:
    def begin(ranks: int) -> tuple[ElasticTrainer, ElasticDistributedSampler]:
        sampler = ElasticDistributedSampler(data(), ranks, 0, seed=9)
        trainer = ElasticTrainer(model(), max_workers=FULL)
        trainer.deal(sampler, BATCH)
        return trainer, sampler

    trainer, sampler = begin(1)
    for number, _ in enumerate(DataLoader(data(), BATCH, sampler=sampler), 1):
        with trainer.step(fix_total_batch_size=True):
            pass
        if trainer.num_steps == 2:
            break
        if number == 1:
            with pytest.raises(RuntimeError, match="between the micro-batches of a step"):
                trainer.state_dict()
    state = trainer.state_dict()
    assert (state["num_steps"], state["sampler"]["completed_num"]) == (2, 2 * BATCH * FULL)
    again, rest = begin(num_ranks)
    again.load_state_dict(state)
    assert again.num_steps == 2
    assert rest.num_samples * FULL == SIZE - 2 * BATCH * FULL
    with pytest.raises(Exception, match="for at most 4 workers, and this job is for 8"):
        ElasticTrainer(model(), max_workers=8).load_state_dict(state)


@pytest.mark.parametrize("rank", [0, 2])
def test_without_dealing_all_ranks_take_equally_many_steps_and_the_last_one_counts(rank: int) -> None:
    """Three workers of four, and five micro-batches in an epoch: two, two, and the one that is left, on every rank."""
    net = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.zeros_(net.weight)
    loader = DataLoader(TensorDataset(torch.ones(5, 1).double()), 1)
    trainer = ElasticTrainer(net, loader, max_workers=4)
    trainer._world_size, trainer._rank = 3, rank  # as in a group; nothing is exchanged here
    optimizer = trainer.prepare(torch.optim.SGD(net.parameters(), lr=1.0))
    steps, gradients = [], []
    for _ in range(2):
        for (inputs,) in loader:
            with trainer.step(fix_total_batch_size=True):
                net(inputs).sum().backward()
                if trainer._is_last:
                    gradients.append(float(net.weight.grad))
                optimizer.step()
                optimizer.zero_grad()
            steps.append(trainer.num_steps)
    assert steps == [0, 1, 1, 2, 3, 3, 4, 4, 5, 6]
    assert gradients == [1.0] * 6, "the mean over two micro-batches, and over the one that is left"


class Twos:
    """One of two workers; the gradient of each micro-batch is 1."""

    def __init__(self, loader: Any) -> None:
        self.net = torch.nn.Linear(1, 1, bias=False).double()
        self.trainer = ElasticTrainer(self.net, loader, max_workers=2)
        self.optimizer = self.trainer.prepare(torch.optim.SGD(self.net.parameters(), lr=1.0))

    def takes_step(self) -> bool:
        """With the next micro-batch."""
        with self.trainer.step(fix_total_batch_size=True):
            self.net.weight.sum().backward()
            if self.trainer.is_last_micro_batch:
                assert float(self.net.weight.grad) == 1.0, "a mean"
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self.trainer.is_last_micro_batch


@pytest.mark.parametrize("kind", [DataLoader, ElasticDataLoader])
def test_an_epoch_that_is_left_early_does_not_end_the_next(tmp_path: Path, kind: Any) -> None:
    options = {"config_file": str(tmp_path / "c.json")} if kind is ElasticDataLoader else {}
    loader = kind(range(5), 1, **options)
    twos = Twos(loader)
    for num_seen, steps in ((2, [0, 1]), (5, [0, 1, 0, 1, 1]), (3, [0, 1, 0]), (5, [1, 0, 1, 0, 1])):
        assert [twos.takes_step() for _ in itertools.islice(loader, num_seen)] == [bool(each) for each in steps]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("sizes", [(4, 8), (8, 4)])
def test_a_new_batch_size_moves_the_end_of_the_epoch(tmp_path: Path, sizes: tuple[int, int], num_workers: int) -> None:
    loader = ElasticDataLoader(range(52), config_file=str(tmp_path / "c.json"), num_workers=num_workers)
    twos = Twos(loader)
    for _ in range(2):
        loader.update_batch_size(sizes[0])
        steps = []
        for number, _ in enumerate(loader, 1):
            if number == 3:
                loader.update_batch_size(sizes[1])
            steps.append(twos.takes_step())
        assert len(steps) not in (-(-52 // sizes[0]), -(-52 // sizes[1])), "it changed on the way"
        assert steps == [number % 2 == 0 or number == len(steps) for number in range(1, len(steps) + 1)]


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_a_stream_has_no_end_to_look_for() -> None:
    loader = DataLoader(Stream(), 1)
    twos = Twos(loader)
    assert [twos.takes_step() for _ in loader] == [False, True, False, True, False]
    assert [twos.takes_step() for _ in loader] == [True, False, True, False, True]


def test_scripts_read_what_they_gave_and_whether_gradients_are_whole() -> None:
    net, loader = model(), DataLoader(range(6))
    trainer = ElasticTrainer(net, dataloader=loader, max_workers=3)
    state = trainer.gradient_state
    assert (trainer.model, trainer.dataloader) == (net, loader)
    seen = []
    for _ in loader:
        with trainer.step(fix_total_batch_size=True):
            net(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            seen.append(state.sync_gradients)
    assert seen == [False, False, True] * 2
    assert (state.num_backward_steps, state.num_steps) == (6, 2)
    trainer.reset()
    assert state.num_steps == 0
