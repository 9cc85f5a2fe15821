"""A state is built again in the shape in which the script saved it, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dlrover.trainer.torch.resilience.recipe import DoubtError, Sources, digest_of, shape_of


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Job:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.sources = Sources(Wrapper(self.model), self.optimizer, [self.scheduler])

    def train(self) -> None:
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self, step: int, **more: Any) -> dict[str, Any]:
        return {
            "states": {
                "model": self.model.state_dict(),
                "training": {"optimizer": self.optimizer.state_dict(), "scheduler": self.scheduler.state_dict()},
                "step": step,
                "name": "a job",
                **more,
            }
        }


def test_all_is_taken_from_the_objects_as_they_are_now() -> None:
    job = Job()
    job.train()
    shape = shape_of(job.state(1))
    job.train()
    job.train()
    built = job.sources.build(shape, 1, 3)
    expected = job.state(3)
    assert digest_of(built) == digest_of(expected)
    assert built["states"]["step"] == 3
    assert built["states"]["training"]["scheduler"] == job.scheduler.state_dict()
    assert built["states"]["training"]["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("more", "doubt"),
    [
        ({"epoch": 3}, "states.epoch is 3. It is not the step, and it belongs to none of the given objects"),
        ({"best": 0.5}, "states.best belongs to none"),
        ({"ema": torch.zeros(3)}, "states.ema belongs to none"),
        ({"is_warm": True}, "states.is_warm belongs to none"),
        ({"losses": [1.0]}, "states.losses belongs to none"),
        ({"config": object()}, r"states.config \(object\) belongs to none"),
    ],
)
def test_what_nobody_named_is_a_doubt(more: dict[str, Any], doubt: str) -> None:
    job = Job()
    job.train()
    with pytest.raises(DoubtError, match=doubt):
        job.sources.build(shape_of(job.state(1, **more)), 1, 2)


def test_two_objects_that_look_alike_are_a_doubt() -> None:
    job = Job()
    other = torch.optim.lr_scheduler.StepLR(job.optimizer, 2, 0.5)
    sources = Sources(job.model, job.optimizer, [job.scheduler, other])
    with pytest.raises(DoubtError, match="more than one of the given objects"):
        sources.build(shape_of(job.state(1)), 1, 2)


def test_what_has_no_state_cannot_be_named() -> None:
    with pytest.raises(TypeError, match="int has no state_dict"):
        Sources(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.zeros(1))]), [3])


def test_a_digest_sees_one_bit_but_not_what_is_each_ranks_own() -> None:
    job = Job()
    job.train()
    own = {buffer.data_ptr() for buffer in job.model.buffers()}
    before, before_all = digest_of(job.state(1), own), digest_of(job.state(1))
    with torch.no_grad():
        job.model[1].running_mean += 1
    assert digest_of(job.state(1), own) == before
    assert digest_of(job.state(1)) != before_all
    with torch.no_grad():
        job.model[0].weight[0, 0] += 1e-6
    assert digest_of(job.state(1), own) != before
    assert digest_of(job.state(2), own) != digest_of(job.state(1), own)
