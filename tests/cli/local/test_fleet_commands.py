"""A master by hand with a platform, and everything that people can ask of it from a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import DEADLINE, until_said
from tests.cli.launch.test_check_env_and_commands import DLROVER, run

LARGER = ("--cpu", "2", "--memory-mb", "512")
PS_JOB = {
    "replicas": {"worker": {"count": 2}, "ps": {"count": 1}},
    "strategy": "ParameterServerStrategy",
}


@contextlib.contextmanager
def master(runtime: Path, *options: str) -> Iterator[None]:
    process = subprocess.Popen(
        [*DLROVER, "master", "--job-name", "job", *options],
        env={**os.environ, "TMPDIR": str(runtime)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until_said(process, "serving job=job")
        if "--platform" in options:  # only now its fleet is what the tests expect
            until_said(process, "the platform accepted intent=LaunchNode")
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=DEADLINE)


@pytest.fixture
def fleet_file(tmp_path: Path) -> str:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps(PS_JOB))
    return str(path)


def succeeds(runtime: Path, *args: str) -> str:
    done = run(*args, runtime=runtime)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_platform_by_hand_can_be_steered(short_dir: Path, fleet_file: str) -> None:
    with master(short_dir, "--platform", "fake", "--fleet", fleet_file):
        assert "…" not in succeeds(short_dir, "status"), "who reads it through a pipe gets all of it"
        status = json.loads(succeeds(short_dir, "status", "--json"))
        assert [(node["id"], node["node_type"], node["rank"]) for node in status["fleet"]] == [
            (1, "chief", 0),
            (0, "ps", 0),
            (2, "worker", 0),
        ]
        assert "The job's target is now 2 nodes of type ps" in succeeds(short_dir, "scale", "job", "--replicas", "ps=2")
        assert "ps-0 is being replaced" in succeeds(short_dir, "migrate", "job", "--node", "ps-0", *LARGER)
        assert "suspended" in succeeds(short_dir, "suspend", "job")
        status = json.loads(succeeds(short_dir, "status", "--json"))
        assert status["stage"] == "suspended"
        assert sum(node["node_type"] == "ps" for node in status["fleet"]) == 3, "one more, and one to be exchanged"
        assert "resumed" in succeeds(short_dir, "resume", "job")
        refused = run("restart", "--nodes", "job", runtime=short_dir)
        assert refused.returncode == 1
        assert "form one world" in refused.stderr
        assert "chief-0" in succeeds(short_dir, "status")


def test_a_node_is_named_by_type_and_rank_wherever_one_is_named(short_dir: Path, fleet_file: str) -> None:
    """A number alone is a worker's rank: the platform calls worker 0 node 2."""
    with master(short_dir, "--platform", "fake", "--fleet", fleet_file):
        for command in (["relaunch"], ["migrate", *LARGER]):
            for name in ("worker-7", "2", "moon-1", "worker-", "standby-0", "-1", "a-job-worker-2"):
                refused = run(*command, "job", f"--node={name}", runtime=short_dir)
                assert refused.returncode == 2
                assert refused.stderr == (
                    f"dlrover: error: --node {name}: this job has no such node. Give the type and rank of one of its nodes: "
                    "chief-0, ps-0, worker-0.\n"
                )
        assert succeeds(short_dir, "relaunch", "job", "--node", "0") == "worker-0 is being replaced by a new node.\n"
        assert (
            succeeds(short_dir, "migrate", "job", "--node", "ps-0", *LARGER)
            == "ps-0 is being replaced by a new node.\n"
        )
        fleet = json.loads(succeeds(short_dir, "status", "--json"))["fleet"]
        assert [node["is_released"] for node in fleet if node["id"] == 2] == [True]
        assert sorted(node["id"] for node in fleet if node["node_type"] == "ps") == [0, 4]


def test_restart_is_mild_and_old_spellings_say_what_to_write_instead(short_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text(json.dumps({"replicas": {"worker": {"count": 2}}}))
    with master(short_dir, "--platform", "fake", "--fleet", str(path)):
        for options, notice in (
            ([], ""),
            (["--workers"], "dlrover: notice: --workers is the default and can be left out.\n"),
        ):
            mild = run("restart", *options, "job", runtime=short_dir)
            assert (mild.returncode, mild.stderr) == (
                1,
                f"{notice}dlrover: error: No workers run now: the next round is open already.\n",
            )
        assert run("restart", "--workers", "--nodes", "job", runtime=short_dir).returncode == 2
        assert "nodes are being replaced" in succeeds(short_dir, "restart", "--nodes", "job")
        assert "--message" not in succeeds(short_dir, "stop", "--help")
        stopped = run("stop", "job", "--message", "enough", runtime=short_dir)
        assert (stopped.returncode, stopped.stderr) == (0, "dlrover: notice: --message is called --reason now.\n")


def test_the_link_to_the_page_is_that_of_the_proxy_in_front_of_it(short_dir: Path) -> None:
    page = ["--enable-dashboard", "--dashboard-port", "0"]
    with master(short_dir, *page, "--dashboard-url", "https://Jobs.example.com,https://other"):
        assert succeeds(short_dir, "dashboard").startswith("https://jobs.example.com/?token=")
    with master(short_dir, *page):
        assert succeeds(short_dir, "dashboard").startswith("http://127.0.0.1:")


def test_the_chief_may_be_called_by_its_former_name(short_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "former.json"
    replicas = {"master": {"count": 1}, "worker": {"count": 1}, "ps": {"count": 1}}
    path.write_text(json.dumps({**PS_JOB, "replicas": replicas}))
    with master(short_dir, "--platform", "fake", "--fleet", str(path)):
        assert "target is now 2 nodes of type chief" in succeeds(short_dir, "scale", "job", "--replicas", "master=2")
        status = json.loads(succeeds(short_dir, "status", "--json"))
        assert [node["node_type"] for node in status["fleet"]] == ["chief", "chief", "ps", "worker"]


def test_without_a_platform_each_command_says_so(short_dir: Path) -> None:
    asked = (
        ["suspend"],
        ["resume"],
        ["restart", "--nodes"],
        ["scale", "--replicas", "ps=2"],
        ["migrate", "--node", "1", *LARGER],
    )
    with master(short_dir):
        for args in asked:
            done = run(*args, runtime=short_dir)
            assert done.returncode == 1
            assert "started by hand: it has no platform" in done.stderr
            assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--platform", "moon"], "no platform 'moon'"),
        (["--platform", "fake"], "give --fleet FILE"),
        (["--fleet", "/nowhere/fleet.json"], "/nowhere/fleet.json: No such file"),
        (["--fleet", "{fleet}", "--platform-options", "{list}"], "Expected `object`"),
        (["--fleet", "{list}"], "Expected `object`"),
        (["--fleet", "{empty}"], "there is no worker"),
        (["--fleet", "{fleet}"], "missing required field `socket`"),
    ],
)
def test_a_platform_that_cannot_be_is_a_clear_error(
    args: list[str], expected: str, short_dir: Path, tmp_path: Path, fleet_file: str
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.json").write_text('{"replicas": {}}')
    files = {"fleet": fleet_file, "list": str(tmp_path / "list.json"), "empty": str(tmp_path / "empty.json")}
    done = run("master", "--job-name", "j", *(arg.format(**files) for arg in args), runtime=short_dir)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "args", [["scale"], ["scale", "--nodes", "2", "--replicas", "ps=1"], ["scale", "--replicas", "moons=1"]]
)
def test_scaling_needs_to_know_what(args: list[str], short_dir: Path) -> None:
    done = run(*args, runtime=short_dir)
    assert done.returncode == 2
    assert "TYPE=COUNT" in done.stderr
