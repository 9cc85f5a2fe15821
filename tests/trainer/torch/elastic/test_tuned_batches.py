"""
The tuner changes how a step is computed, never what it learns: the GPT of the example makes the same losses at equal records, whatever the micro-batch is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlrover.trainer.torch.elastic import ElasticTrainer  # noqa: E402
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader  # noqa: E402
from dlrover.trainer.torch.elastic.trainer import LOOK_EVERY  # noqa: E402

EXAMPLE = Path(__file__).resolve().parents[4] / "examples/gpt/train.py"
STEPS = 2 * LOOK_EVERY + 10


@pytest.fixture(scope="module")
def gpt() -> Iterator[dict[str, Any]]:
    """The example up to where it makes its model: options, data, classes."""
    source = EXAMPLE.read_text().partition("bare_model = GPT()")[0]
    argv, sys.argv = sys.argv, ["train.py", "--width=32", "--layers=2", "--heads=2", "--context=32"]
    try:
        names: dict[str, Any] = {"__file__": str(EXAMPLE), "__name__": "gpt_example", "__doc__": "a GPT"}
        exec(compile(source, str(EXAMPLE), "exec"), names)
        yield names
    finally:
        sys.argv = argv


class Windows(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, gpt: dict[str, Any], count: int) -> None:
        self.tokens, self.length, self.count = gpt["tokens"], gpt["options"].context + 1, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        start = index * 7 % (len(self.tokens) - self.length)
        return self.tokens[start : start + self.length]


def wish(file: Path, version: int, batch: int, accumulation: int) -> None:
    loader = {"version": version, "batch_size": batch, "accumulation": accumulation}
    file.write_text(json.dumps({"dataloader": loader}))


class Run:
    """A job of one worker in a full world of `max_workers`, with a batch for each of them."""

    def __init__(self, gpt: dict[str, Any], file: Path, batch: int, max_workers: int) -> None:
        torch.manual_seed(1)
        self.net = gpt["GPT"]()
        self.records = batch * max_workers
        self.loader = ElasticDataLoader(Windows(gpt, self.records * STEPS), batch_size=batch, config_file=file)
        self.trainer = ElasticTrainer(self.net, self.loader, max_workers=max_workers)
        self.optimizer = self.trainer.prepare(torch.optim.AdamW(self.net.parameters(), lr=2e-3))
        self.losses: list[float] = []
        self.sizes: list[int] = []

    def train(self, wishes: dict[int, tuple[int, int]], file: Path) -> Run:
        """`wishes`: after so many steps of the optimizer, the micro-batch and the accumulation that the tuner wants."""
        total, count, version = 0.0, 0, 1
        for window in self.loader:
            with self.trainer.step(fix_total_batch_size=True):
                loss = self.net(window[:, :-1], window[:, 1:])
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            total, count = total + float(loss.detach()) * len(window), count + len(window)
            if self.trainer.num_steps > len(self.losses):
                self.losses.append(total / count)
                self.sizes.append(count)
                total, count = 0.0, 0
                if self.trainer.num_steps in wishes:
                    version += 1
                    wish(file, version, *wishes[self.trainer.num_steps])
        return self


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "auto_paral_config.json"


def test_the_losses_of_the_gpt_example_stay_when_the_micro_batch_grows(gpt: dict[str, Any], tmp_path: Path) -> None:
    plain, tuned = tmp_path / "plain.json", tmp_path / "tuned.json"
    untuned = Run(gpt, plain, 2, 8).train({}, plain)
    other = Run(gpt, tuned, 2, 8).train({LOOK_EVERY - 1: (4, 4), 2 * LOOK_EVERY - 1: (16, 1)}, tuned)
    assert other.loader.get_batch_size() == 16
    assert untuned.sizes == other.sizes == [16] * STEPS, "as many records in each step"
    assert other.losses == pytest.approx(untuned.losses, rel=1e-4)
    assert untuned.losses[-1] < 0.9 * untuned.losses[0], "it learns"


def test_half_a_micro_batch_after_a_lack_of_memory_learns_the_same(gpt: dict[str, Any], tmp_path: Path) -> None:
    plain, halved = tmp_path / "plain.json", tmp_path / "halved.json"
    untuned = Run(gpt, plain, 8, 1).train({}, plain)
    wish(halved, 1, 4, 2)
    other = Run(gpt, halved, 8, 1)
    assert (other.loader.get_batch_size(), other.trainer.gradient_accumulation_steps) == (4, 2), (
        "from the first step on"
    )
    assert other.train({}, halved).losses == pytest.approx(untuned.losses, rel=1e-4)
    assert other.sizes == [8] * STEPS


def test_a_life_that_finds_a_tuned_batch_keeps_the_records_of_a_step(gpt: dict[str, Any], file: Path) -> None:
    """The accumulation was counted for the workers of another time; the file is read before the script's batch is ever used."""
    wish(file, 3, 8, 1)
    run = Run(gpt, file, 2, 8).train({}, file)
    assert set(run.sizes) == {16}
    assert run.loader.get_batch_size() == 8
    assert run.trainer.gradient_accumulation_steps == 2


def test_no_micro_batch_is_larger_than_the_share_of_a_worker(gpt: dict[str, Any], file: Path) -> None:
    wish(file, 3, 8, 1)
    run = Run(gpt, file, 4, 1).train({}, file)
    assert set(run.sizes) == {4}, "the world has grown since, and each worker has less to do"
