"""States that are cut over the ranks, in real jobs: what survives in memory when workers die at any instant."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.jobs import SCRIPTS, Launched, wait_until
from tests.integration.recovery.test_node_loss import Nodes

SCRIPT = SCRIPTS / "cut.py"


def lives(folder, rank: int = 0) -> list[int]:
    """The first step of each life of a rank."""
    return [int(line.split()[0]) for line in (folder / f"lives-{rank}").read_text().splitlines()]


def weights(folder, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"weights-{rank}.pt")


def crash(jobs, folder, num_steps: int, num_kills: int, timeout: float) -> None:
    options = ["--nproc-per-node=2", f"--max-restarts={num_kills + 5}", SCRIPT, folder, str(num_steps)]
    job = jobs.run(*options, "--disk-every", "7", "--kills", str(num_kills), timeout=timeout)
    assert job.process.returncode == 0, job.err
    assert len(list(folder.glob("killed-*"))) == num_kills
    starts = lives(folder)
    assert len(starts) == num_kills + 1
    assert starts == sorted(starts) == lives(folder, 1), "some life went on with another step than it should"
    for rank in (0, 1):
        found, expected = weights(folder, rank), torch.load(folder / f"expected-{rank}.pt")
        assert all(torch.equal(found[name], expected[-1][name]) for name in found)
    last = (num_steps - 1) // 7 * 7
    directory = folder / "checkpoints"
    assert (directory / "dlrover_latest.txt").read_text() == str(last)
    dcp_to_torch_save(directory / str(last), folder / "last.pt")
    stored = torch.load(folder / "last.pt", weights_only=False)
    assert stored["step"] == last
    assert all(torch.equal(stored["model"][name], expected[last][name]) for name in stored["model"])


def test_crashes_at_any_instant_leave_cut_weights_as_they_were(jobs, tmp_path):
    crash(jobs, tmp_path, 30, 3, 120)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_twenty_crashes_at_any_instant_leave_cut_weights_as_they_were(jobs, tmp_path):
    crash(jobs, tmp_path, 250, 20, 400)


class CutNodes(Nodes):
    """Nodes whose ranks hold different pieces; nothing is written to storage."""

    def start(self, rank: int, *script: str) -> Launched:
        words = (f"--rdzv-endpoint={self._address}", "--rdzv-id=cut", f"--node-rank={rank}", *self._options)
        steps = (SCRIPT, self.folder, "16", "--hold-at", "9", "--hold-at", "13", *script)
        job = self._jobs.start("dlrover-run", *words, *steps, DLROVER_LOG_LEVEL="INFO")
        self.launched.append(job)
        if len(self.launched) == 1:
            wait_until(lambda: self._jobs.pids("dlrover.master"))
        return job

    def wait_at(self, step: int, size: int) -> None:
        def is_so() -> bool:
            return all((self.folder / f"holding-{step}-{rank}").exists() for rank in range(size))

        wait_until(is_so, explain=self.said)


@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_a_job_shrinks_and_grows_from_memory_alone_as_it_would_from_storage(jobs, tmp_path):
    """
    Four nodes; one is lost with its memory, and three go on from its copy; then a fourth joins, and no file is ever written. Then the same
    by three jobs that know each other's files only: bit for bit the same weights.
    """
    options = [
        "--nnodes=3:4",
        "--snapshot-replicas=1",
        "--node-grace=1",
        "--rdzv-conf=pend_timeout=1,lastcall_timeout=60",  # no round starts without a node that is only slow
    ]
    nodes = CutNodes(jobs, tmp_path, *options)
    launched = [nodes.start(rank) for rank in range(4)]
    nodes.wait_at(9, 4)
    nodes.wait_for("copy-*.segment", 4, 9)
    nodes.lose(launched.pop(), 3)
    (tmp_path / "go-9").touch()
    nodes.wait_at(13, 3)
    nodes.wait_for("copy-*.segment", 3, 13)
    launched.append(nodes.start(3))
    wait_until(lambda: len(lives(tmp_path)) == 3, explain=nodes.said)
    (tmp_path / "go-13").touch()
    assert [job.wait() for job in launched] == [0] * 4, nodes.said()
    assert lives(tmp_path) == lives(tmp_path, 1) == lives(tmp_path, 2) == [0, 10, 14], nodes.said()
    assert lives(tmp_path, 3) == [0, 14]
    assert not (tmp_path / "checkpoints").exists()

    stored = tmp_path / "stored"
    stored.mkdir()
    for size, num_steps, last in ((4, 10, 9), (3, 14, 13), (4, 16, 15)):
        job = jobs.run(
            f"--nproc-per-node={size}", SCRIPT, stored, str(num_steps), "--disk-every", str(last), timeout=150
        )
        assert job.process.returncode == 0, job.err
    assert lives(stored) == [0, 10, 14]
    for rank in range(4):
        found, expected = weights(tmp_path, rank), weights(stored, rank)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
