"""The node check with real launchers, agents and tasks: four nodes on one machine, one of them bad or slow."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPTS, JobFactory, Launched, wait_until


def start_nodes(jobs: JobFactory, port: int, nnodes: str, word: Path, *options: str, **env: str) -> list[Launched]:
    """The first one hosts the master: a launcher that does stays for the others when its own node has left."""
    nodes: list[Launched] = []
    for rank in range(4):
        nodes.append(
            jobs.start(
                "dlrover-run",
                *("--nnodes", nnodes, "--nproc-per-node", "1", "--node-rank", str(rank)),
                *("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "checked", "--master-grace", "5"),
                *("--network-check", "--accelerator", "cpu", *options),
                SCRIPTS / "wait_for_word.py",
                word,
                DLROVER_LOG_LEVEL="INFO",
                **env,
            )
        )
        wait_until(lambda: jobs.pids("dlrover.master"))
    return nodes


def status(jobs: JobFactory) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "dlrover.cli.main", "status"],
        env=jobs.env(COLUMNS="250"),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def explain(nodes: list[Launched]) -> str:
    return "\n".join(f"--- node {rank}\n{node.out}\n{node.err}" for rank, node in enumerate(nodes))


def test_a_faulty_node_leaves_with_a_message_and_the_others_train(
    jobs: JobFactory, tmp_path: Path, reserved_port: int
) -> None:
    word = tmp_path / "word"
    faults = {"MOCK_ERR_RANK": "0", "MOCK_ERR_NODE_RANK": "3"}
    nodes = start_nodes(jobs, reserved_port, "3:4", word, "--rdzv-conf", "lastcall_timeout=2", **faults)
    *good, bad = nodes
    assert bad.wait() == 20, explain(nodes)
    assert "the node check found this node faulty" in bad.err
    assert "injected communication failure" in bad.err
    wait_until(lambda: all("of 3" in node.out for node in good), explain=lambda: explain(nodes))
    shown = status(jobs)
    assert "faulty" in shown
    assert "check of worker-3: faulty" in shown
    word.touch()
    assert [node.wait() for node in good] == [0, 0, 0], explain(nodes)
    assert "training" not in bad.out


SLOW = {"MOCK_STRAGGLER_RANK": "0", "MOCK_STRAGGLER_NODE_RANK": "2", "MOCK_STRAGGLER_SECONDS": "2"}


@pytest.mark.chaos
def test_a_slow_node_leaves_where_stragglers_are_excluded(jobs: JobFactory, tmp_path: Path, reserved_port: int) -> None:
    word = tmp_path / "word"
    nodes = start_nodes(
        jobs, reserved_port, "3:4", word, "--exclude-straggler", "--rdzv-conf", "lastcall_timeout=2", **SLOW
    )
    slow = nodes[2]
    good = [node for node in nodes if node is not slow]
    assert slow.wait() == 21, explain(nodes)
    wait_until(lambda: all("of 3" in node.out for node in good), explain=lambda: explain(nodes))
    assert "training" not in slow.out
    word.touch()
    assert [node.wait() for node in good] == [0, 0, 0], explain(nodes)


@pytest.mark.chaos
def test_a_slow_node_is_named_and_all_train(jobs: JobFactory, tmp_path: Path, reserved_port: int) -> None:
    word = tmp_path / "word"
    nodes = start_nodes(jobs, reserved_port, "4", word, "--comm-perf-test", **SLOW)
    wait_until(lambda: all("of 4" in node.out for node in nodes), explain=lambda: explain(nodes))
    shown = status(jobs)
    assert shown.count("healthy") == 3, shown
    assert "check of worker-2: straggler" in shown
    assert shown.count("GB/s") == 4
    named = [node for node in nodes if "the node check found this node slow" in node.err]
    assert named == [nodes[2]], "it is told on its own console, and nowhere else"
    word.touch()
    assert [node.wait() for node in nodes] == [0, 0, 0, 0], explain(nodes)
