"""The command line of `dlrover local`: what is ours, what is the nodes', and what makes no sense."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlrover.cli.local.command import LocalPlan, read_plan
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.fleet import NodeType, Resource
from tests.cli.launch.test_check_env_and_commands import run


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def plan(*argv: str) -> LocalPlan:
    return read_plan(argv, {"PATH": os.environ["PATH"], "NODE_RANK": "7", "POD_IP": "192.0.2.1"})


def test_own_options_come_first_and_the_rest_is_of_the_nodes(script):
    made = plan(
        "--nodes", "2:4", "--standby=1", "--max-relaunches", "5", "--", "--nproc-per-node=2", script, "--steps", "9"
    )
    assert (made.min_nodes, made.max_nodes, made.standby) == (2, 4, 1)
    assert made.node_argv == ("--nnodes=2:4", "--standby=1", "--nproc-per-node=2", script, "--steps", "9")
    assert made.settings.local_world_size == 2
    assert made.settings.node_rank is None  # of our own surroundings: no business of the nodes
    workers = made.fleet.replicas[NodeType.WORKER]
    assert (workers.count, workers.max_relaunches, made.fleet.standby) == (4, 5, 1)


def test_the_dashes_between_may_be_left_out(script):
    made = plan("--nodes", "3", "--nproc-per-node", "2", "--no-warm", script, "--nodes", "8")
    assert made.max_nodes == 3
    assert made.settings.local_world_size == 2
    assert made.settings.entry.args == (b"--nodes", b"8")


def test_each_node_of_a_cluster_is_meant_for_as_many_cores(script):
    made = plan("--ps", "2", "--cpus", "1.5", "--memory", "512", script)
    assert {each.resource for each in made.fleet.replicas.values()} == {Resource(cpu=1.5, memory_mb=512)}


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        ([], "Name the training script"),
        (["--nodes", "2"], "Name the training script"),
        (["--nodes", "0", "train.py"], "--nodes 0: give the number of nodes"),
        (["--nodes", "4:2", "train.py"], "MIN:MAX"),
        (["--nodes", "two", "train.py"], "--nodes two"),
        (["--standby=-1", "train.py"], "--standby -1: give 0 or more"),
        (["--memory=-5", "train.py"], "--memory -5"),
        (["--cpus=-1", "train.py"], "--cpus -1.0: give 0 or more"),
        (["--cpus=nan", "train.py"], "--cpus nan: give a finite number"),
        (["--nodes", "2", "--", "/no/such/train.py"], "/no/such/train.py does not exist"),
        (["--nodes", "2", "--", "/dev/stdin"], "/dev/stdin can be read only once"),
        (["--", "--nnodes=3", "train.py"], "--nnodes after `dlrover local`.* Give --nodes instead, in front of `--`"),
        (["--", "--node-rank=0", "train.py"], "--node-rank after"),
        (["--", "--standalone", "train.py"], "--standalone after"),
        (["--", "--job-token-file=x", "train.py"], "--job-token-file after"),
        (["--", "--standby=1", "train.py"], "--standby after .* Give it once, in front of `--`"),
        (["--", "--nproc-per-nodes=2", "train.py"], "--nproc-per-nodes"),
        (["--node", "2", "--", "train.py"], "--node is not an option of dlrover local or .* Did you mean --nodes"),
        (["--standy=1", "train.py"], "Did you mean --standby"),
    ],
)
def test_bad_input_gets_a_clear_error(argv, what):
    with pytest.raises(ConfigError, match=what):
        plan(*argv)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["local", "--nodes", "0", "x.py"], "--nodes 0"),
        (["local", "--netns", "maybe", "x.py"], "maybe"),
        (["scale", "ghost", "--nodes", "3"], "You have no running job ghost"),
        (["scale", "ghost", "--nodes", "3:1"], "--nodes 3:1"),
        (["suspend", "ghost"], "You have no running job ghost"),
        (["resume", "ghost"], "You have no running job ghost"),
        (["restart", "ghost"], "You have no running job ghost"),
    ],
)
def test_commands_refuse_bad_input_with_exit_code_2(args, expected, short_dir):
    done = run(*args, runtime=short_dir)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_the_options(short_dir):
    done = run("local", "--help", runtime=short_dir)
    assert done.returncode == 0
    for option in ("--nodes", "--standby", "--max-relaunches", "--netns", "--log-dir"):
        assert option in done.stdout
