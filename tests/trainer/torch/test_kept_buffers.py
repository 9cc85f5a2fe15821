"""Buffers come back as they were before a step, whatever the forward pass did with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dlrover.trainer.torch.resilience.buffers import KeptBuffers
from dlrover.trainer.torch.resilience.recipe import DoubtError


class Average(nn.Module):
    """Replaces its buffer by another tensor in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.mean = self.mean * 0.5 + batch.mean(0)
        self.turned.add_(1)
        return batch - self.mean


class AllKinds(nn.Module):
    """A buffer of each type, none and many numbers, one that is only a view of conjugates, and nothing that a forward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("large", torch.arange(20_000.0))
        self.register_buffer("larger", torch.arange(30_000.0))
        self.register_buffer("conjugate", torch.tensor([1 + 2j, 3 - 4j]).conj())
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.cfloat):
            self.register_buffer(f"one_{dtype}".replace(".", "_"), torch.ones((), dtype=dtype))
            self.register_buffer(f"many_{dtype}".replace(".", "_"), torch.ones(2, 3, dtype=dtype))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in self.buffers():
                buffer.copy_(~buffer if buffer.dtype is torch.bool else buffer + 1)
        return batch


def state(model: nn.Module) -> dict[str, list[float]]:
    return {name: buffer.flatten().tolist() for name, buffer in model.named_buffers()}


@pytest.mark.parametrize(
    "make",
    [lambda: nn.BatchNorm1d(3), Average, AllKinds, lambda: nn.Sequential(nn.BatchNorm1d(3), Average(), AllKinds())],
)
def test_a_broken_step_is_undone_and_may_be_done_after_all(make) -> None:
    model = make()
    kept = KeptBuffers([model])
    for _ in range(3):
        kept.keep()
        before = state(model)
        model(torch.rand(4, 3))
        after = state(model)
        assert after != before
        kept.put_back()
        assert state(model) == before
        kept.put_back()
        assert state(model) == after


def test_a_buffer_whose_memory_was_exchanged_is_kept_from_its_new_place() -> None:
    model = nn.BatchNorm1d(3)
    kept = KeptBuffers([model])
    kept.keep()
    model.running_mean.data = torch.tensor([5.0, 6.0, 7.0])
    kept.keep()
    model.running_mean.zero_()
    kept.put_back()
    assert model.running_mean.tolist() == [5.0, 6.0, 7.0]


def test_a_buffer_of_another_shape_is_a_doubt() -> None:
    model = nn.BatchNorm1d(3)
    kept = KeptBuffers([model])
    kept.keep()
    model.running_mean.resize_(2)
    with pytest.raises(DoubtError, match="changed its shape"):
        kept.put_back()


def test_a_model_without_buffers_costs_nothing() -> None:
    kept = KeptBuffers([nn.Linear(2, 2)])
    kept.keep()
    kept.put_back()
    assert kept.addresses == set()
