"""Machines that are low on memory or lack the code: each is said in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray.jobs import TRAINED_STEPS, RunningRayJob, run_dlrover
from tests.ray.lab import RayLab, until

ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dlrover":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def add_machine(lab: RayLab) -> Iterator[Callable[..., Any]]:
    added = []

    def add(**more: Any) -> Any:
        added.append(lab.add_machine(**more))
        return added[-1]

    yield add
    for machine in added:
        lab.remove_machine(machine)
        # A driver that comes now may be sent to a machine that Ray takes for alive.
        until(
            lambda machine=machine: all(each["NodeID"] != machine.node_id or not each["Alive"] for each in ray.nodes())
        )


def test_a_machine_without_the_package_is_named(lab: RayLab, add_machine: Callable[..., Any], tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(ABSENT)
    add_machine(resources={"bare": 1}, env_vars={"PYTHONPATH": str(tmp_path)})
    ended = run_dlrover("ray", "run", "--address", lab.address, "--resource", "bare=1", "--", TRAINED_STEPS, "/nowhere")
    assert ended.returncode == 2, ended.stderr
    assert "The module dlrover is not installed on the machine" in ended.stderr
    assert "Install the same packages on every machine of the cluster" in ended.stderr
    lab.await_nothing_left(TRAINED_STEPS)


def test_a_node_that_ray_kills_for_its_memory_counts_as_out_of_memory(
    lab: RayLab, add_machine: Callable[..., Any], tmp_path: Path
):
    """The machine takes each process for too much, so Ray's own monitor kills the node's actor."""
    greedy = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    add_machine(resources={"small": 1}, env_vars=greedy)
    job = RunningRayJob(lab, tmp_path, "--resource", "small=1", "--max-relaunches", "1")
    try:
        assert job.wait() != 0, job.output()
        assert "OOM" in job.output(), job.output()
        lab.await_nothing_left(TRAINED_STEPS)
    finally:
        job.close()
