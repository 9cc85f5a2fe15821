"""A job for four workers goes on with two and then with three: every step of its model has the same batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler
from tests.integration.jobs import SCRIPTS, Launched, freeze, kill_together, wait_until
from tests.integration.recovery.test_node_loss import Nodes
from tests.integration.scripts.elastic_batches import BATCH, EPOCHS, SIZE, make_data, make_model

SCRIPT = SCRIPTS / "elastic_batches.py"
FULL = 4
SHRINKS_AT, GROWS_AT = 5, 15
# No round starts without a node that is only slow.
OPTIONS = ("--nnodes=2:4", "--node-grace=1", "--rdzv-conf=pend_timeout=1,lastcall_timeout=60")


class Trainers(Nodes):
    def start(self, rank: int, *script: str) -> Launched:
        words = (f"--rdzv-endpoint={self._address}", "--rdzv-id=batch", f"--node-rank={rank}", *self._options)
        holds = ("--hold-at", str(SHRINKS_AT), "--hold-at", str(GROWS_AT))
        job = self._jobs.start("dlrover-run", *words, SCRIPT, self.folder, *holds, DLROVER_LOG_LEVEL="INFO")
        self.launched.append(job)
        if len(self.launched) == 1:
            wait_until(lambda: self._jobs.pids("dlrover.master"))
        return job

    def wait_at(self, step: int, size: int) -> None:
        def is_so() -> bool:
            return all((self.folder / f"holding-{step}-{rank}").exists() for rank in range(size))

        wait_until(is_so, explain=self.said)

    def lose_at_once(self, lost: dict[int, Launched]) -> None:
        """With what was in their memory. One after the other could give a world of those left in between."""
        everything = [pid for job in lost.values() for pid in freeze(job)]
        agents = [
            words for pid, words in self._jobs.processes().items() if pid in everything and "dlrover.agent" in words
        ]
        kill_together(*everything)
        wait_until(lambda: not set(everything) & set(self._jobs.processes()))
        homes = [path for rank in lost for path in self._jobs.shared_memory.glob(f"*/*.node-{rank}") if path.is_dir()]
        assert len(homes) == len(agents) == len(lost), "they had snapshots"
        for directory in (*homes, *(Path(words.split()[-1]).parent for words in agents)):
            shutil.rmtree(directory)


def undisturbed() -> tuple[dict[str, torch.Tensor], float]:
    """Plain torch, one process, the whole batch at once."""
    inputs, wanted = make_data()
    net = make_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    sampler = ElasticDistributedSampler(range(SIZE), 1, 0, seed=5)
    sampler.play(FULL, BATCH)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for at in range(0, len(order), BATCH * FULL):
            indices = order[at : at + BATCH * FULL]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(inputs[indices]), wanted[indices]).backward()
            optimizer.step()
            scheduler.step()
    return net.state_dict(), optimizer.param_groups[0]["lr"]


def reads(folder: Path) -> dict[int, dict[int, tuple[int, dict[int, list[int]]]]]:
    """By round and step: the epoch, and what each rank read for it."""
    found: dict[int, dict[int, tuple[int, dict[int, list[int]]]]] = {}
    for path in sorted(folder.glob("read-*")):
        _, round_, rank = path.name.split("-")
        for line in path.read_text().splitlines():
            step, epoch, records = json.loads(line)
            found.setdefault(int(round_), {}).setdefault(step, (epoch, {}))[1][int(rank)] = records
    return found


@pytest.mark.timeout(240)
def test_the_batch_stays_the_same_with_four_two_and_three_workers(jobs, tmp_path):
    nodes = Trainers(jobs, tmp_path, *OPTIONS)
    launched = [nodes.start(rank) for rank in range(4)]
    nodes.wait_at(SHRINKS_AT, 4)
    nodes.lose_at_once({rank: launched.pop() for rank in (3, 2)})
    (tmp_path / f"go-{SHRINKS_AT}").touch()
    nodes.wait_at(GROWS_AT, 2)
    launched.append(nodes.start(2))
    wait_until(lambda: len(list(tmp_path.glob("read-*-2"))) == 2, explain=nodes.said)
    (tmp_path / f"go-{GROWS_AT}").touch()
    assert [job.wait() for job in launched] == [0, 0, 0], nodes.said()

    rounds = reads(tmp_path)
    sizes = [max(len(ranks) for _, ranks in steps.values()) for _, steps in sorted(rounds.items())]
    assert sizes == [4, 2, 3], sizes
    of_model: dict[int, tuple[int, list[int]]] = {}
    for _, steps in sorted(rounds.items()):
        for step, (epoch, ranks) in steps.items():
            records = [record for each in ranks.values() for record in each]
            assert len(records) == BATCH * FULL, f"step {step} of {len(ranks)} workers"
            of_model[step] = (epoch, records)  # what a later round did again counts
    assert sorted(of_model) == list(range(1, EPOCHS * SIZE // (BATCH * FULL) + 1))
    for epoch in range(EPOCHS):
        seen = [record for its_epoch, records in of_model.values() if its_epoch == epoch for record in records]
        assert sorted(seen) == list(range(SIZE)), "each record of an epoch once"

    result, (weights, lr) = torch.load(tmp_path / "result.pt"), undisturbed()
    assert result["steps"] == len(of_model)
    assert result["lr"] == pytest.approx(lr, rel=1e-12)
    for name, weight in weights.items():
        torch.testing.assert_close(result["model"][name], weight, rtol=1e-9, atol=1e-12)
