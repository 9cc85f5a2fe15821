"""The first generation's builder becomes the same job, and its trainer calls groups."""

from __future__ import annotations

import pytest

pytest.importorskip("omegaconf", reason="the extra `ray` is not installed: use `make test-ray`")

from dlrover.python.unified.api.base import DLJobBuilder
from dlrover.python.unified.api.rl import RLJobBuilder

from dlrover.unified.api.first_generation import FirstTrainer, trainer_invocation
from tests.unified.loopback import loopback

HERE = "tests.unified.api.test_first_generation"


class Rollout:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @trainer_invocation(target="ALL")
    def generate(self, prompts: object) -> object:
        return self.rank, prompts


class Trainer(FirstTrainer):
    def init(self) -> None:
        self.found: list[object] = []

    def fit(self) -> None:
        self.found.append(self.RG_ROLLOUT.generate("all"))
        self.found.append(self.RG_ROLLOUT.generate(["a", "b"]))


def test_kinds_modules_and_roles_are_taken_as_of_old():
    with pytest.warns(DeprecationWarning, match="first generation"):
        builder = DLJobBuilder().SFT_type()
    job = builder.device_type("CPU").workload("Trainer", HERE, "Trainer").per_node(1).total(1).build()
    assert list(job.workloads) == ["trainer"]
    assert job.workloads["trainer"].entry_point == f"{HERE}.Trainer"
    rl = RLJobBuilder().device_type("CPU").trainer(HERE, "Trainer").actor(HERE, "Rollout").total(2).per_node(2).build()
    assert rl.workloads["ACTOR"].entry_point == f"{HERE}.Rollout"
    command = DLJobBuilder().dlrover_run("dlrover-run --nnodes=1:2 --nproc-per-node=2 train.py").build()
    assert command.workloads["ELASTIC"].total == 4


def test_a_trainer_calls_groups_and_deals_lists_out():
    with loopback(ROLLOUT=[Rollout(0), Rollout(1)]):
        trainer = Trainer()
        trainer.run()
        assert trainer.found == [[(0, "all"), (1, "all")], [(0, "a"), (1, "b")]]
        with pytest.raises(NotImplementedError, match="must define fit"):
            FirstTrainer().run()
