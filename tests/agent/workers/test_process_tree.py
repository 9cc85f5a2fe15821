from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlrover.agent.workers.process_tree import Graces, ProcessTree
from dlrover.agent.workers.spawner import Spawner
from dlrover.host.processes import descendants, look_up
from dlrover.protocol.messages.job import StopCause
from tests.agent.lab import DEADLINE, is_alive, is_gone, start_process, until, write

FAMILY = """
    # A process with a child, a grandchild in a session of its own, and a daemon that nobody waits for.
    import os, signal, sys, time
    report = sys.argv[1]
    if "ignore" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def note():
        with open(report, "a") as file:
            file.write(f"{os.getpid()}\\n")
    def stay():
        note()
        while True:
            time.sleep(60)
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                stay()
            os._exit(0)
        stay()
    stay()
"""


HELPER = """
    # A child, and a grandchild in a session of its own.
    import os, sys, time
    if os.fork() == 0 and os.fork() == 0:
        os.setsid()
        with open(sys.argv[1] + ".part", "w") as file:
            file.write(f"{os.getppid()} {os.getpid()}")
        os.rename(sys.argv[1] + ".part", sys.argv[1])
    while True:
        time.sleep(60)
"""


SAVER = """
    # Takes its time to write a file after the signal. Its own child, a fork, has inherited the handler and never ends by it.
    import os, signal, sys, time
    report, saved = sys.argv[1:]
    is_told = False
    def save(number, frame):
        global is_told
        is_told = True
    signal.signal(signal.SIGTERM, save)
    if os.fork() == 0:
        while True:
            time.sleep(60)
    with open(report + ".part", "w") as file:
        file.write(f"{os.getpid()}")
    os.rename(report + ".part", report)
    while not is_told:
        time.sleep(0.01)
    while os.getppid() != int(os.environ["ADOPTER"]):
        time.sleep(0.01)  # the shell above is gone
    time.sleep(0.3)  # longer than somebody without a handler has
    with open(saved, "w") as file:
        file.write("whole")
    os._exit(0)
"""


async def start_family(tmp_path: Path, tree: ProcessTree, *options: str) -> tuple[int, list[int], asyncio.Future]:
    script = write(tmp_path / "family.py", FAMILY)
    report = tmp_path / "pids"
    process = start_process(sys.executable, script, str(report), *options, start_new_session=True)
    exited = tree.watch(process.pid)
    process.returncode = 0  # the tree reaps it, not this object
    pids = await until(lambda: report.exists() and len(report.read_text().split()) == 3 and report.read_text().split())
    return process.pid, [int(pid) for pid in pids], exited


@pytest.mark.parametrize("cause", [StopCause.FAILURE, StopCause.END_OF_JOB])
async def test_a_stop_reaches_children_in_other_sessions_and_daemons(
    spawner: Spawner, tree: ProcessTree, tmp_path: Path, cause: StopCause
) -> None:
    pid, family, exited = await start_family(tmp_path, tree)
    await asyncio.wait_for(tree.stop([pid], cause=cause, shutdown_timeout=2 * DEADLINE), DEADLINE)
    assert all(is_gone(member) for member in family)
    assert exited.result().signal == signal.SIGTERM
    assert all(is_alive(zygote) for zygote in spawner.zygote_pids)


@pytest.mark.parametrize("cause", StopCause)
@pytest.mark.parametrize(
    "tree_options", [{"graces": Graces(after_failure=2 * DEADLINE, for_membership=2 * DEADLINE)}], ids=["patient"]
)
async def test_a_program_behind_a_shell_that_dies_first_may_still_use_its_handler(
    tree: ProcessTree, tmp_path: Path, cause: StopCause
) -> None:
    """Its own child would have as much time, if it were taken for a program, too."""
    script, report, saved = write(tmp_path / "saver.py", SAVER), tmp_path / "pid", tmp_path / "saved"
    command = f"{sys.executable} {script} {report} {saved}; :"
    environ = {**os.environ, "ADOPTER": str(os.getpid())}
    shell = start_process("sh", "-c", command, env=environ, start_new_session=True)
    exited = tree.watch(shell.pid)
    shell.returncode = 0
    await until(report.exists)
    family = [process.pid for process in descendants(shell.pid)]
    assert len(family) == 2
    given = await asyncio.wait_for(tree.stop([shell.pid], cause=cause, shutdown_timeout=2 * DEADLINE), DEADLINE)
    assert exited.result().signal == signal.SIGTERM
    assert list(given) == [shell.pid]
    assert saved.read_text() == "whole"
    assert all(is_gone(member) for member in family)


async def test_who_ignores_sigterm_is_killed_after_the_grace(tree: ProcessTree, tmp_path: Path) -> None:
    pid, family, exited = await start_family(tmp_path, tree, "ignore")
    began_at = time.monotonic()
    await asyncio.wait_for(tree.stop([pid], cause=StopCause.END_OF_JOB, shutdown_timeout=0.3), DEADLINE)
    assert time.monotonic() - began_at >= 0.3
    assert exited.result().signal == signal.SIGKILL
    assert all(is_gone(member) for member in family)


async def test_a_stopped_process_is_woken_to_take_the_signal(tree: ProcessTree, tmp_path: Path) -> None:
    pid, family, exited = await start_family(tmp_path, tree)
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: look_up(pid).state == "T")
    await asyncio.wait_for(tree.stop([pid], cause=StopCause.MEMBERSHIP, shutdown_timeout=20), DEADLINE)
    assert exited.result().signal == signal.SIGTERM
    assert all(is_gone(member) for member in family)


async def test_processes_that_are_not_ours_are_not_touched(spawner: Spawner, tree: ProcessTree, tmp_path: Path) -> None:
    pid, _family, _exited = await start_family(tmp_path, tree)
    ours = {process.pid for process in descendants(os.getpid(), keep=spawner.zygote_pids)}
    assert pid in ours
    assert os.getpid() not in ours
    assert os.getppid() not in ours
    assert not ours & set(spawner.zygote_pids)


async def test_orphans_that_end_by_themselves_are_reaped(tree: ProcessTree, tmp_path: Path) -> None:
    script = write(
        tmp_path / "orphan.py",
        """
        import os, sys, time
        if os.fork() == 0:
            parent = os.getppid()
            with open(sys.argv[1] + ".part", "w") as file: file.write(str(os.getpid()))
            os.rename(sys.argv[1] + ".part", sys.argv[1])
            sys.stdin.read()  # until the test lets go
            os._exit(0)
        os._exit(7)
        """,
    )
    report = tmp_path / "pid"
    process = start_process(sys.executable, script, str(report), stdin=subprocess.PIPE, start_new_session=True)
    exited = tree.watch(process.pid)
    process.returncode = 0
    assert (await asyncio.wait_for(exited, DEADLINE)).exit_code == 7
    await until(report.exists)
    orphan = int(report.read_text())
    assert look_up(orphan).parent_pid == os.getpid()
    process.stdin.close()
    await until(lambda: is_gone(orphan))


async def test_a_helper_of_ours_tells_its_exit_status_to_whoever_started_it(tree: ProcessTree) -> None:
    helper = start_process(sys.executable, "-c", "raise SystemExit(7)")
    await until(lambda: look_up(helper.pid).state == "Z")
    tree.reap_orphans()
    await tree.sweep()
    assert helper.wait() == 7


async def test_helpers_and_what_is_below_them_outlive_the_workers_and_end_with_us(
    tree: ProcessTree, tmp_path: Path
) -> None:
    report = tmp_path / "helpers"
    helper = start_process(sys.executable, write(tmp_path / "helper.py", HELPER), str(report))
    await until(report.exists)
    below = [int(pid) for pid in report.read_text().split()]
    pid, family, _exited = await start_family(tmp_path, tree)
    await asyncio.wait_for(tree.stop([pid], cause=StopCause.FAILURE, shutdown_timeout=20), DEADLINE)
    tree.kill()
    assert all(is_gone(member) for member in family)
    assert helper.poll() is None
    assert all(is_alive(member) for member in below)
    tree.close()
    assert helper.wait() == -signal.SIGKILL
    statuses = [(await asyncio.to_thread(os.waitpid, member, 0))[1] for member in below]  # ours by now
    assert statuses == [signal.SIGKILL] * 2


async def test_without_pidfds_the_exit_arrives_by_sigchld(
    tree: ProcessTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))  # as an old kernel does

    monkeypatch.setattr(os, "pidfd_open", refuse)
    pid, family, exited = await start_family(tmp_path, tree)
    os.kill(pid, signal.SIGUSR1)
    assert (await asyncio.wait_for(exited, DEADLINE)).signal == signal.SIGUSR1
    await asyncio.wait_for(tree.sweep(), DEADLINE)
    assert all(is_gone(member) for member in family)


async def test_watching_a_process_that_is_no_child_is_refused(tree: ProcessTree) -> None:
    with pytest.raises(ProcessLookupError):
        tree.watch(1)


def test_the_launcher_kills_descendants_without_a_loop(tmp_path: Path) -> None:
    script = write(tmp_path / "family.py", FAMILY)
    launcher = write(
        tmp_path / "launcher.py",
        f"""
        import os, subprocess, sys, time
        from dlrover.agent.workers.process_tree import become_subreaper, kill_descendants
        from dlrover.host.processes import descendants
        become_subreaper()
        kept = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        report = sys.argv[1]
        subprocess.Popen([sys.executable, {script!r}, report])
        while not os.path.exists(report) or len(open(report).read().split()) < 3:
            time.sleep(0.01)
        assert kill_descendants(keep=[kept.pid]) == []
        assert [process.pid for process in descendants(os.getpid())] == [kept.pid]
        assert "asyncio" not in sys.modules
        assert kept.poll() is None
        assert kill_descendants() == []
        assert descendants(os.getpid()) == []
        """,
    )
    report = tmp_path / "pids"
    subprocess.run([sys.executable, launcher, str(report)], check=True, timeout=DEADLINE)
    pids = [int(pid) for pid in report.read_text().split()]
    assert len(pids) == 3
    assert all(is_gone(pid) for pid in pids)


def test_processes_that_proc_hides_are_nobody_of_ours(tmp_path: Path) -> None:
    script = write(
        tmp_path / "hidden.py",
        """
        import os, signal, subprocess
        from dlrover.agent.workers.process_tree import kill_descendants
        from dlrover.host.processes import descendants, look_up
        from dlrover.agent.workers.sigterm import Handler, Reaction
        from dlrover.cli.launch.runtime_dir import DirectoryOwner, is_running
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        try:
            open("/proc/1/stat")
        except PermissionError:
            pass
        else:
            raise AssertionError("nothing is hidden")
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        child.stdin.write(b"x")
        child.stdin.flush()
        child.stdout.read(1)  # it is `cat` by now: before, it is hidden like us, who have changed our user
        assert [process.pid for process in descendants(os.getpid())] == [child.pid]
        assert look_up(1) is None
        assert Reaction(1).handler is Handler.NONE
        assert not Reaction(1).is_on_its_way(1.0)
        assert not is_running(DirectoryOwner(pid=1, started="7@boot"))
        assert kill_descendants() == []
        """,
    )
    mount = "mount -t proc -o hidepid=1 proc /proc"
    unshare = shutil.which("unshare") or "false"
    tried = subprocess.run([unshare, "--mount", "sh", "-c", mount], capture_output=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"a /proc with hidepid cannot be mounted here: {tried.stderr.decode().strip()}")
    command = [unshare, "--mount", "sh", "-c", f'{mount} && exec "$0" "$1"', sys.executable, script]
    subprocess.run(command, check=True, timeout=30)
