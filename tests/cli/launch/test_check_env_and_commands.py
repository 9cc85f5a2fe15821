"""`dlrover` and `dlrover master`, as a person types them."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dlrover.cli.connection import MASTER_FILE, find_local_job
from dlrover.cli.launch import check_env
from dlrover.cli.launch.runtime_dir import NodeDirectory, user_root
from dlrover.cli.main import app
from dlrover.cli.options.environment import Environment
from dlrover.protocol.errors import ConfigError
from tests.cli.conftest import DEADLINE, until_said
from tests.integration.jobs import paths_below, wait_until

DLROVER = [sys.executable, "-m", "dlrover.cli.main"]


def run(*args: str, runtime: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DLROVER, *args],
        env={**os.environ, "TMPDIR": str(runtime), **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


def ready_files(runtime: Path) -> list[Path]:
    """Of masters that serve."""
    return [path for path in paths_below(runtime) if path.name == "master.ready"]


def test_version(short_dir: Path) -> None:
    done = run("version", runtime=short_dir)
    assert done.returncode == 0
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["status"], "Running here: none"),
        (["stop", "ghost"], "You have no running job ghost"),
        (["status", "--token-file", "/nowhere/token"], "/nowhere/token"),
        (["master", "--job-name", "j", "--platform", "volcano"], "use: --platform pyk8s"),
        (["master", "--job_name", "j", "--hang_downtime", "0"], "--hang-downtime 0: give a number of minutes"),
        (["master", "--job_name", "j", "--hang-detection", "3"], "give 0 (log only), 1 (tell people) or 2"),
        (["master", "--job_name", "j", "--pre_check_ops", "[1]"], "--pre-check-ops [1]: 1 is not a tuple"),
        (["master", "--job_name", "j", "--dynamic_failover_extension", "a::B"], "Give the option to dlrover-run"),
        (["master"], "--job-name"),
        (["master", "--job-name", "j", "--port", "99999"], "99999"),
        (["master", "--job-name", "j", "--port", "first"], "first is not a port"),
        (["master", "--job-name", "j", "--node_num", "0"], "0"),
        (["master", "--job-name", "j", "--node_num", "many"], "many must be a number of at least 1"),
        (["status", "--addr", "host"], "--addr host: the port is missing"),
        (["events", "nowhere.sqlite"], "nor is there such a file"),
        (["report", "nowhere.sqlite"], "nor is there such a file"),
        (["events", "--limit", "0"], "--limit"),
    ],
)
def test_bad_input_is_a_clear_error_with_exit_code_2(args: list[str], expected: str, short_dir: Path) -> None:
    done = run(*args, runtime=short_dir)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_master_that_nobody_reaches_is_told(short_dir: Path) -> None:
    done = run("status", "--addr", "127.0.0.1:9", runtime=short_dir, DLROVER_JOB_TOKEN="x")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_master_that_does_not_answer_is_waited_for_as_long_as_the_variable_says(short_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        words = ["status", "--addr", address]
        done = run(*words, runtime=short_dir, DLROVER_JOB_TOKEN="x", MASTER_CLIENT_TIMEOUT="0.5")
    assert done.returncode == 1
    assert "no answer within 0.5 s" in done.stderr


def test_clean_removes_what_the_dead_left(short_dir: Path) -> None:
    code = (
        "import os; from dlrover.cli.options.environment import read_environment; "
        "from dlrover.cli.launch.runtime_dir import NodeDirectory, user_root; "
        "NodeDirectory(user_root(read_environment(os.environ)), 'dead', 'a'); os._exit(0)"
    )
    environ = {**os.environ, "TMPDIR": str(short_dir)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, timeout=DEADLINE)
    done = run("clean", runtime=short_dir)
    assert done.returncode == 0
    assert "job dead" in done.stdout
    assert "1 left-over" in done.stdout
    assert "0 left-over" in run("clean", runtime=short_dir).stdout


def test_a_master_by_hand_answers_and_ends_with_ctrl_c(short_dir: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    master = subprocess.Popen(
        [*DLROVER, "master", "--job_name", "by-hand", "--node_num", "2", "--journal", str(journal)],
        env={**os.environ, "TMPDIR": str(short_dir)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until_said(master, "job by-hand at 127.0.0.1:", "serving job=by-hand")
        status = run("status", "by-hand", runtime=short_dir)
        assert status.returncode == 0, status.stderr
        assert "job by-hand" in status.stdout
        master.send_signal(signal.SIGINT)
        master.communicate(timeout=DEADLINE)
        assert master.returncode == 130
    finally:
        master.kill()
        master.communicate()
    assert journal.exists()
    replayed = run("replay", str(journal), runtime=short_dir)
    assert replayed.returncode == 0, replayed.stderr


def test_a_master_that_listens_everywhere_names_an_address_that_others_reach(short_dir: Path) -> None:
    master = subprocess.Popen(
        [*DLROVER, "master", "--job-name", "wide", "--host", "0.0.0.0"],
        env={**os.environ, "TMPDIR": str(short_dir)},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until_said(master, f"set DLROVER_MASTER_ADDR={socket.gethostname()}:")
    finally:
        master.send_signal(signal.SIGINT)
        master.communicate(timeout=DEADLINE)


def test_a_master_by_hand_works_and_ends_while_nobody_reads_its_console(
    short_dir: Path, full_pipe: tuple[int, int]
) -> None:
    _, writer = full_pipe
    command = subprocess.Popen(
        [*DLROVER, "master", "--job-name", "by-hand"], env={**os.environ, "TMPDIR": str(short_dir)}, stderr=writer
    )
    os.close(writer)
    try:
        wait_until(lambda: ready_files(short_dir))
        (ready,) = ready_files(short_dir)
        os.kill(json.loads(ready.read_bytes())["pid"], signal.SIGKILL)
        assert command.wait(timeout=DEADLINE) == 128 + signal.SIGKILL
    finally:
        command.kill()
        command.wait()


def test_what_a_master_by_hand_has_to_say_waits_for_a_reader(short_dir: Path, full_pipe: tuple[int, int]) -> None:
    reader, writer = full_pipe
    command = subprocess.Popen(
        [*DLROVER, "master", "--job-name", "by-hand"], env={**os.environ, "TMPDIR": str(short_dir)}, stderr=writer
    )
    os.close(writer)
    try:
        wait_until(lambda: ready_files(short_dir))
        with os.fdopen(os.dup(reader), "rb") as console:
            assert any(b"dlrover master: job by-hand at 127.0.0.1:" in line for line in console)
        command.terminate()
        assert command.wait(timeout=DEADLINE) == 128 + signal.SIGTERM
    finally:
        command.kill()
        command.wait()


def test_a_job_is_found_by_its_name(short_dir: Path) -> None:
    directory = NodeDirectory(user_root(Environment(temp_dir=str(short_dir))), "here", "a")
    directory.record("127.0.0.1:9")
    directory.write("token", b"secret")
    done = run("status", "here", runtime=short_dir)
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    directory.remove()


@pytest.mark.parametrize("host", [0, 1])
def test_of_the_nodes_of_a_job_the_one_with_the_journal_is_asked(
    short_dir: Path, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_dir))
    root = user_root(Environment(temp_dir=str(short_dir)))
    nodes = [NodeDirectory(root, "here", launch) for launch in "ab"]
    for node in nodes:
        node.record("127.0.0.1:9")
    nodes[host].write(MASTER_FILE, b"{}")
    assert find_local_job("here").directory == nodes[host].path
    for node in nodes:
        node.remove()


def test_of_two_jobs_with_one_name_none_is_taken_by_chance(short_dir: Path) -> None:
    root = user_root(Environment(temp_dir=str(short_dir)))
    nodes = [NodeDirectory(root, "twin", launch) for launch in "abc"]
    for node, address in zip(nodes, ("127.0.0.1:9", "localhost:9", "127.0.0.1:10"), strict=True):
        node.record(address)
        node.write("token", b"secret")
    for args in (["stop", "twin"], ["stop"]):
        done = run(*args, runtime=short_dir)
        assert done.returncode == 2
        assert "You have 2 jobs named twin on this host" in done.stderr
        assert f"--addr 127.0.0.1:10 --token-file {nodes[2].path}/token" in done.stderr
    nodes[2].remove()
    assert run("stop", "twin", runtime=short_dir).returncode == 1, "two nodes of one job, whatever they call its master"
    for node in nodes[:2]:
        node.remove()


def test_the_beginning_of_a_name_is_enough_unless_two_jobs_begin_with_it(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(short_dir))
    root = user_root(Environment(temp_dir=str(short_dir)))
    names = ("train-1", "train-12", "evaluate-1")
    nodes = {name: NodeDirectory(root, name, str(number)) for number, name in enumerate(names)}
    for number, node in enumerate(nodes.values()):
        node.record(f"127.0.0.1:{number + 1}")
        node.write("token", b"secret")
    assert find_local_job("e").directory == nodes["evaluate-1"].path
    assert find_local_job("train-12").directory == nodes["train-12"].path
    assert find_local_job("train-1").directory == nodes["train-1"].path, "the whole name, though another begins with it"
    with pytest.raises(ConfigError, match="The names of 2 of your jobs on this host begin with tr: train-1, train-12"):
        find_local_job("tr")
    with pytest.raises(
        ConfigError, match=r"You have no running job other .* Running here: evaluate-1, train-1, train-12"
    ):
        find_local_job("other")
    done = run("events", "tr", runtime=short_dir)
    assert done.returncode == 2
    assert "begin with tr: train-1, train-12. Give more of the name." in done.stderr
    for node in nodes.values():
        node.remove()


def test_every_command_about_a_job_finds_it_in_the_same_way() -> None:
    """Those whose first argument may be a job are made by one decorator."""
    commands = [command for command in app.registered_commands if command.callback is not None]
    about_jobs = [command for command in commands if "job" in inspect.signature(command.callback).parameters]
    assert len(about_jobs) > 10
    for command in about_jobs:
        kinds = {"job", "addr", "token_file", "tls_ca", "tls_cert", "tls_key"}
        assert kinds <= set(inspect.signature(command.callback).parameters), command.callback


def test_check_env_says_what_psutil_is_for() -> None:
    """A job needs it if anything in the package imports it."""
    package = Path(check_env.__file__).parents[2]
    is_imported = any("import psutil" in path.read_text() for path in package.rglob("*.py"))
    [finding] = [finding for finding in check_env.look() if finding.name == "psutil"]
    assert finding.is_essential == is_imported
    assert ("no job imports it" in finding.needed_for) != is_imported


def test_check_env_names_what_the_extra_for_kubernetes_installs() -> None:
    pyproject = tomllib.loads((Path(check_env.__file__).parents[3] / "pyproject.toml").read_text())
    extra = {re.split("[<>=]", entry)[0].lower() for entry in pyproject["project"]["optional-dependencies"]["k8s"]}
    findings = [finding for finding in check_env.look() if "extra: k8s" in finding.needed_for]
    assert {finding.name.lower() for finding in findings} == extra
    assert [finding.name for finding in findings if not finding.is_there] == [], "the tests have them"
    assert not any(finding.is_essential for finding in findings)
