"""The directories of running jobs: where they are, who lives in them, who removes them, and what if that fails."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from dlrover.agent.config import AgentResult
from dlrover.cli.launch import runtime_dir
from dlrover.cli.launch.launcher import _write_outcome
from dlrover.cli.launch.runtime_dir import (
    LIFE_FILE,
    OWNER_FILE,
    SAVING_FILE,
    DirectoryOwner,
    NodeDirectory,
    describe_process,
    directory_of,
    is_running,
    job_directory_name,
    list_nodes,
    reap,
    reap_in_passing,
    saving_until,
    user_root,
    write_private,
)
from dlrover.cli.options.environment import Environment, read_environment
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.memory.homes import Home


@pytest.fixture
def root(short_dir: Path) -> str:
    return user_root(Environment(temp_dir=str(short_dir)))


def test_the_root_survives_the_end_of_the_login_session(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_RUNTIME_DIR is deleted at logout; it serves only where no temporary directory does."""
    login, temporary = short_dir / "run", short_dir / "tmp"
    login.mkdir()
    temporary.mkdir()
    environment = read_environment({"XDG_RUNTIME_DIR": str(login), "TMPDIR": str(temporary)})
    assert Path(user_root(environment)).parent == temporary
    access = os.access  # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path == str(login) and access(path, mode))
    assert Path(user_root(environment)).parent == login


def test_a_runtime_directory_is_private_and_ours(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(user_root(Environment(runtime_root="/no/such/place", temp_dir=str(short_dir))))
    assert root.parent == short_dir
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    root.rename(short_dir / "dlrover-4711")
    with pytest.raises(ConfigError, match="belongs to another user"):
        user_root(Environment(temp_dir=str(short_dir)))


def test_a_node_directory_leaves_room_for_the_name_of_a_socket(tmp_path: Path, short_dir: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    name = "a job with a very long name indeed, longer than any"
    for directory in (deep, short_dir, short_dir / "some" / "what" / "deeper"):
        directory.mkdir(parents=True, exist_ok=True)
        node = NodeDirectory(user_root(Environment(temp_dir=str(directory))), name, "0" * 8)
        node.remove()
        assert len(node.path) + len("/agent.sock") <= 107
        assert node.path.startswith(f"{directory}/") == (directory != deep)


def test_job_names_become_distinct_file_names() -> None:
    names = ["job", "a/b", "a_b", "..", "x" * 60, "x" * 61, "größe"]
    directories = [job_directory_name(name) for name in names]
    assert len(set(directories)) == len(names)
    assert all("/" not in name and not name.startswith(".") and len(name) <= 32 for name in directories)


def test_what_a_dead_launcher_left_is_reaped_and_the_living_is_not(root: str) -> None:
    living = NodeDirectory(root, "alive", "a")
    code = (
        "import sys; from dlrover.cli.launch.runtime_dir import NodeDirectory; import os; "
        "d = NodeDirectory(sys.argv[1], 'dead', 'b'); d.share_token(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, root], check=True, timeout=30)
    nodes, left = list_nodes(root)
    assert [owner.job_name for _, owner in nodes] == ["alive"]
    assert [entry.job_name for entry in left] == ["dead"]
    assert reap(root) == []  # too young for a start to remove it
    assert [entry.job_name for entry in reap(root, older_than=0.0)] == ["dead"]
    assert sorted(path.name for path in Path(root).iterdir()) == [".lock", "alive"]
    living.remove()


def test_a_process_of_a_dead_job_is_killed_when_it_is_reaped(root: str) -> None:
    code = (
        "import sys; from dlrover.cli.launch.runtime_dir import NodeDirectory; import os; "
        "print(NodeDirectory(sys.argv[1], 'dead', 'b').path, flush=True); os._exit(0)"
    )
    path = subprocess.run(
        [sys.executable, "-c", code, root], check=True, timeout=30, capture_output=True, text=True
    ).stdout.strip()
    environ = {**os.environ, "DLROVER_AGENT_SOCKET": f"{path}/agent.sock"}
    waits = "import signal; print(flush=True); signal.pause()"
    survivor = subprocess.Popen([sys.executable, "-c", waits], env=environ, stdout=subprocess.PIPE)
    stranger = subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE)
    assert survivor.stdout is not None
    assert stranger.stdout is not None
    try:
        survivor.stdout.readline()
        stranger.stdout.readline()
        reap(root, older_than=0.0)
        assert survivor.wait(timeout=10) == -9
        assert stranger.poll() is None
    finally:
        for process in (survivor, stranger):
            process.kill()
            process.communicate()


def test_a_reused_pid_is_not_the_owner() -> None:
    me = describe_process(os.getpid())
    assert is_running(me)
    assert not is_running(type(me)(pid=me.pid, started="0@another boot"))


def test_who_lives_is_told_by_the_lock_and_not_by_the_pid(root: str) -> None:
    """The launcher of another container: its directory is shared with us, its processes are not."""
    elsewhere = NodeDirectory(root, "elsewhere", "a")
    unknown = DirectoryOwner(pid=2**22 + 1, started="1@this boot", job_name="elsewhere")
    elsewhere.write(OWNER_FILE, msgspec.json.encode(unknown))
    assert list_nodes(root) == ([(elsewhere.path, unknown)], [])
    assert reap(root, older_than=0.0) == []
    assert os.path.isdir(elsewhere.path)
    elsewhere.remove()


def test_whoever_knows_the_launcher_finds_out_until_when_its_agent_writes(root: str) -> None:
    directory = NodeDirectory(root, "job", "a")
    assert directory_of(directory.job_dir, os.getpid() + 1) is None
    assert directory_of(directory.job_dir, os.getpid()) == directory.path
    assert saving_until(directory.path) == 0.0
    directory.write(SAVING_FILE, b"12.5")
    assert saving_until(directory.path) == 12.5
    directory.write(SAVING_FILE, b"")  # a full disk
    assert saving_until(directory.path) == 0.0
    directory.remove()
    assert directory_of(directory.job_dir, os.getpid()) is None


def test_a_file_that_says_so_already_is_not_written_again(root: str) -> None:
    """A restart on a full disk needs no room."""
    directory = NodeDirectory(root, "job", "a")
    first = os.stat(directory.write("agent.json", b"{}"))
    assert os.stat(directory.write("agent.json", b"{}")).st_ino == first.st_ino
    with open(directory.write("agent.json", b"{ }"), "rb") as file:
        assert file.read() == b"{ }"
    directory.remove()


def test_without_a_lock_the_pid_is_asked(root: str) -> None:
    directory = NodeDirectory(root, "tidied", "a")
    os.unlink(os.path.join(directory.path, LIFE_FILE))
    assert [path for path, _ in list_nodes(root)[0]] == [directory.path]
    directory.write(OWNER_FILE, msgspec.json.encode(DirectoryOwner(pid=os.getpid(), started="0@another boot")))
    assert [left.path for left in list_nodes(root)[1]] == [directory.path]
    directory.remove()


def test_children_do_not_keep_a_dead_launcher_alive(root: str) -> None:
    """Neither one that was executed nor one that was only forked."""
    code = """
import os, signal, subprocess, sys
from dlrover.cli.launch.runtime_dir import NodeDirectory
directory = NodeDirectory(sys.argv[1], "dead", "a")
executed = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False)
forked = os.fork()
if not forked:
    os.close(1)
    signal.pause()
print(executed.pid, forked, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True, check=True, timeout=30)
    try:
        assert [left.job_name for left in list_nodes(root)[1]] == ["dead"]
    finally:
        for pid in done.stdout.split():
            os.kill(int(pid), signal.SIGKILL)


def test_systems_that_tidy_up_see_that_the_directory_is_in_use(root: str) -> None:
    """systemd skips directories on which it cannot get an exclusive lock."""
    directory = NodeDirectory(root, "long", "a")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        directory.remove()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("lost", ["", ".lock", "job", "job/node-a"])
def test_removing_what_is_no_longer_there_is_no_error(root: str, lost: str) -> None:
    directory = NodeDirectory(root, "job", "a")
    os.rename(os.path.join(root, lost), os.path.join(os.path.dirname(root), "lost"))
    directory.remove()
    assert not os.path.exists(directory.job_dir)


@contextmanager
def stopped_holder(root: str) -> Iterator[None]:
    """Another process that got the lock on the listing and does not go on."""
    code = (
        "import signal, sys; from dlrover.cli.launch.runtime_dir import locked\n"
        "with locked(sys.argv[1]): print(flush=True); signal.pause()"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.communicate()


def test_a_stopped_process_with_the_lock_delays_nobody_for_long(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = NodeDirectory(root, "job", "a", patience=0.1)
    with stopped_holder(root):
        with pytest.raises(ConfigError, match=r"fuser .*\.lock"):
            NodeDirectory(root, "another", "b", patience=0.1)
        with pytest.raises(ConfigError):
            reap(root, patience=0.1)
        reap_in_passing(root)
        directory.remove()
    assert not os.path.exists(directory.path)  # the rest, shared with others, goes with the next start
    assert "some files could not be removed" in capsys.readouterr().err
    reap(root)
    assert os.listdir(root) == [".lock"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "rename", "mkdir"])
def test_a_directory_that_cannot_be_written_is_named_and_nothing_stays(
    root: str, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(ConfigError, match=rf"{root}/job.*{os.strerror(number)}.*TMPDIR"):
        NodeDirectory(root, "job", "a")
    monkeypatch.undo()
    assert os.listdir(root) == [".lock"]


def test_a_file_that_could_not_be_written_leaves_the_former_one(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_dir / "file"
    write_private(str(path), b"former")

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(ConfigError, match="No space left"):
        write_private(str(path), b"new")
    assert [(found.name, found.read_bytes()) for found in short_dir.iterdir()] == [("file", b"former")]


def test_an_outcome_that_cannot_be_told_is_no_reason_to_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write_outcome(str(tmp_path / "gone" / "outcome.json"), AgentResult(exit_code=0))
    assert "could not write how the job ended" in capsys.readouterr().err


def test_snapshots_survive_those_who_tidy_the_runtime_directories(short_dir: Path) -> None:
    """Also where both are in the same place, as with TMPDIR=/dev/shm."""
    environment = Environment(temp_dir=str(short_dir), snapshot_dir=str(short_dir))
    root = runtime_dir.user_root(environment)
    with Home(runtime_dir.snapshot_root(environment), "job", "a", 0) as home:
        reap(root, older_than=0.0)
        assert runtime_dir.reap_snapshots(runtime_dir.snapshot_root(environment), older_than=0.0) == []
        assert home.path.is_dir()
    runtime_dir.remove_snapshots(runtime_dir.snapshot_root(environment), "job", "other")
    assert home.path.is_dir()
    runtime_dir.remove_snapshots(runtime_dir.snapshot_root(environment), "job", "a")
    assert not os.path.exists(runtime_dir.snapshot_root(environment))
