"""Machines that are low on memory, lack the code or are pods with few ports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.ray.jobs import TRAINED_STEPS, RunningRayJob, run_dlrover
from tests.ray.lab import RayLab, free_port, until

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


def test_a_host_that_cannot_serve_says_why(lab: RayLab, add_machine: Callable[..., Any]):
    machine = add_machine(num_cpus=0, env_vars={"HOST_PORTS": "many"})
    options = ("--address", lab.address, "--host-machine", machine.node_id)
    ended = run_dlrover("ray", "run", *options, "--", TRAINED_STEPS, "/nowhere")
    assert ended.returncode == 23, ended
    assert "The job cannot run on" in ended.stderr
    assert "HOST_PORTS=many must be a comma-separated list of ports" in ended.stderr
    lab.await_nothing_left(TRAINED_STEPS)


SHOW = (
    "import json, os, pathlib, sys; pathlib.Path(sys.argv[1], 'environ.json').write_text(json.dumps(dict(os.environ)))"
)


def test_a_node_knows_its_place_and_keeps_to_the_ports_of_its_pod(
    lab: RayLab, add_machine: Callable[..., Any], tmp_path: Path
):
    ports = [free_port() for _ in range(5)]
    pod = {"HOST_PORTS": ",".join(map(str, ports)), "POD_IP": "127.0.0.1"}
    machine = add_machine(resources={"pod": 1}, env_vars=pod)
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    options = ("--resource", "pod=1", "--host-machine", machine.node_id, "--job-name", "podded")
    job = RunningRayJob(lab, tmp_path, *options, script=str(script))
    try:
        assert job.wait() == 0, job.output()
    finally:
        job.close()
    found = json.loads((tmp_path / "environ.json").read_text())
    for name in ("NODE", "WORKER"):
        assert [found[f"{name}_{what}"] for what in ("TYPE", "ID", "RANK", "NUM")] == ["worker", "0", "0", "1"]
    assert found["ELASTIC_JOB_NAME"] == "podded"
    assert found["JOB_UID"]
    assert found["POD_IP"] == "127.0.0.1"
    assert int(found["DLROVER_MASTER_ADDR"].rpartition(":")[2]) in ports
    assert int(found["MASTER_PORT"]) in ports
