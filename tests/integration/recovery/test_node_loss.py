"""
Whole nodes are lost, with agent, workers and memory; another node goes on at the last replicated step. No storage is written at all, so
none can have been read.
"""

from __future__ import annotations

import shutil
import socket
import weakref
from pathlib import Path

import pytest

from dlrover.snapshot.memory.segment import Segment
from dlrover.snapshot.memory.segment_format import SegmentInvalid
from tests.integration.jobs import SCRIPTS, JobFactory, Launched, freeze, kill_together, wait_until

SCRIPT = SCRIPTS / "flash.py"
HELD_AT = 9


class Nodes:
    """Launchers of one job; the first hosts the master."""

    def __init__(self, jobs: JobFactory, folder: Path, *options: str) -> None:
        seat = socket.socket()  # bound and not listening: the master binds beside it, everybody else gets another port
        weakref.finalize(self, seat.close)
        seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        seat.bind(("127.0.0.1", 0))
        self._address = f"127.0.0.1:{seat.getsockname()[1]}"
        self._jobs, self.folder, self._options = jobs, folder, options
        self.launched: list[Launched] = []

    def start(self, rank: int, *script: str) -> Launched:
        words = (f"--rdzv-endpoint={self._address}", "--rdzv-id=loss", f"--node-rank={rank}", *self._options)
        steps = (SCRIPT, self.folder, "14", "--hold-at", str(HELD_AT), *script)
        job = self._jobs.start("dlrover-run", *words, *steps, DLROVER_LOG_LEVEL="INFO")
        self.launched.append(job)
        if len(self.launched) == 1:
            wait_until(lambda: self._jobs.pids("dlrover.master"))
        return job

    def lose(self, job: Launched, rank: int) -> None:
        """As when a machine loses its power: every process at once, and what was in its memory."""
        everything = freeze(job)
        commands = self._jobs.processes()
        [config] = [Path(commands[pid].split()[-1]) for pid in everything if "dlrover.agent" in commands.get(pid, "")]
        kill_together(*everything)
        job.process.wait()
        wait_until(lambda: not set(everything) & self._jobs.processes().keys())
        homes = [path for path in self._jobs.shared_memory.glob(f"*/*.node-{rank}") if path.is_dir()]
        assert homes, "it had snapshots"
        for directory in (*homes, config.parent):
            shutil.rmtree(directory)

    def lives(self, rank: int) -> list[int]:
        try:
            lines = (self.folder / f"lives-{rank}").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [int(line.split()[0]) for line in lines]

    def said(self) -> str:
        return "\n".join(f"--- {job.err_path.name}\n{job.err[-6000:]}" for job in self.launched)

    def wait_until_held(self, size: int) -> None:
        def is_so() -> bool:
            return all((self.folder / f"holding-{rank}").exists() for rank in range(size))

        wait_until(is_so, explain=self.said)

    def wait_for(self, pattern: str, count: int, step: int = HELD_AT) -> None:
        """So many files of that name have a complete slot of the step."""

        def steps_of(path: Path) -> list[int]:
            try:
                with Segment(path) as segment:
                    return [name.step for name in segment.complete_slots()]
            except (SegmentInvalid, FileNotFoundError):
                return []

        def is_so() -> bool:
            return sum(step in steps_of(path) for path in self._jobs.shared_memory.rglob(pattern)) >= count

        wait_until(is_so, explain=self.said)

    def wait_for_parity(self, size: int) -> None:
        """All nodes have said that their group has protected the step."""

        def is_so() -> bool:
            return (
                sum(f"step {HELD_AT} shard" in job.err and "parity of step" in job.err for job in self.launched) >= size
            )

        wait_until(is_so, explain=self.said)


def test_a_replacement_goes_on_from_the_copy_on_another_node(jobs, tmp_path):
    """Shards differ by rank; the replacement is a cold one, started after the loss."""
    nodes = Nodes(jobs, tmp_path, "--nnodes=2", "--snapshot-replicas=1", "--node-grace=1")
    first, victim = nodes.start(0, "--sharded"), nodes.start(1, "--sharded")
    nodes.wait_until_held(2)
    nodes.wait_for("copy-*.segment", 2)
    nodes.lose(victim, 1)
    (tmp_path / "go").touch()
    new = nodes.start(1, "--sharded")
    assert [first.wait(), new.wait()] == [0, 0], nodes.said()
    assert nodes.lives(0) == nodes.lives(1) == [0, HELD_AT + 1], nodes.said()
    assert not (tmp_path / "checkpoints").exists()
    assert "snapshots from other nodes" in new.err, new.err


@pytest.mark.chaos
def test_a_standby_gets_the_state_that_every_node_has(jobs, tmp_path):
    """Nothing was asked for: where all ranks hold the same, every survivor can give it."""
    nodes = Nodes(jobs, tmp_path, "--nnodes=2", "--standby=1")
    first, victim = nodes.start(0), nodes.start(1)
    nodes.wait_until_held(2)
    standby = nodes.start(2)
    wait_until(lambda: "waiting" in standby.err, explain=nodes.said)
    nodes.lose(victim, 1)
    (tmp_path / "go").touch()
    assert [first.wait(), standby.wait()] == [0, 0], nodes.said()
    assert nodes.lives(0) == nodes.lives(1) == [0, HELD_AT + 1], nodes.said()
    assert not (tmp_path / "checkpoints").exists()
    assert "snapshots from other nodes" in standby.err, standby.err


@pytest.mark.chaos
def test_a_replacement_goes_on_from_parity(jobs, tmp_path):
    """Nobody has a whole copy of the lost shard: it is computed from what the two others hold."""
    nodes = Nodes(jobs, tmp_path, "--nnodes=3", "--snapshot-parity=2+1", "--node-grace=1")
    launched = [nodes.start(rank, "--sharded") for rank in range(3)]
    nodes.wait_until_held(3)
    nodes.wait_for_parity(3)
    nodes.lose(launched.pop(2), 2)
    (tmp_path / "go").touch()
    launched.append(nodes.start(2, "--sharded"))
    assert [job.wait() for job in launched] == [0, 0, 0], nodes.said()
    assert nodes.lives(0) == nodes.lives(1) == nodes.lives(2) == [0, HELD_AT + 1], nodes.said()
    assert not (tmp_path / "checkpoints").exists()
    assert "was computed from parity" in launched[-1].err, launched[-1].err
