"""A robust mutex between two processes: who is told of which end, and when."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest

from dlrover.host.processes import look_up
from dlrover.host.shared_page.death_notice import DeathNotice

DEADLINE = 60.0
SIZE, PLACE = 8192, 4096

HOLDER = """
    import os, signal, sys, threading
    from dlrover.host.shared_page import death_notice
    path, place, program = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    print(death_notice.hold(path, place), flush=True)
    exec(program)
    signal.pause()
"""


class Page:
    def __init__(self) -> None:
        self.descriptor = os.memfd_create("notice")
        os.ftruncate(self.descriptor, SIZE)
        self.told: queue.Queue[None] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self.notice = DeathNotice(self.descriptor, PLACE, lambda: self.told.put(None))

    def start(self, program: str = "") -> subprocess.Popen[str]:
        path = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        command = [sys.executable, "-c", textwrap.dedent(HOLDER), path, str(PLACE), program]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        return process

    def wait(self) -> None:
        self.told.get(timeout=DEADLINE)

    def close(self) -> None:
        self.notice.close()
        for process in self._processes:
            process.kill()
            with process:  # closes its pipes and waits for it
                continue
        os.close(self.descriptor)


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page()
    yield page
    page.close()


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("os.kill(os.getpid(), 9)", signal.SIGKILL),
        ("os._exit(3)", 3 << 8),
        ("sys.exit(4)", 4 << 8),
        ("raise ValueError", 1 << 8),
        ("threading.Thread(target=lambda: os._exit(5)).start()", 5 << 8),
        ("signal.signal(11, signal.SIG_DFL); os.kill(os.getpid(), 11)", signal.SIGSEGV),
    ],
)
def test_every_end_is_told_with_the_status_that_the_parent_will_read(page: Page, program: str, status: int) -> None:
    process = page.start(f"sys.stdin.readline(); {program}")
    process.communicate(input="go\n", timeout=DEADLINE)
    page.wait()
    code = process.returncode
    assert (-code if code < 0 else code << 8) == status


def test_at_the_notice_the_kernel_names_the_status_and_still_has_the_descriptors(page: Page) -> None:
    """Nobody reaps it here before we have looked."""
    process = page.start("memory = bytearray(os.urandom(1)) * (256 << 20)")
    os.kill(process.pid, signal.SIGKILL)
    page.wait()
    seen = look_up(process.pid)
    assert seen is not None
    assert seen.is_exiting
    assert seen.wait_status == signal.SIGKILL
    assert process.wait(DEADLINE) == -signal.SIGKILL


def test_a_program_that_replaces_itself_is_not_exiting(page: Page) -> None:
    process = page.start("os.execv('/bin/sh', ['sh', '-c', 'read line'])")
    page.wait()
    seen = look_up(process.pid)
    assert seen is not None
    assert not seen.is_exiting
    process.communicate(input="end\n", timeout=DEADLINE)


def test_neither_a_forked_child_nor_another_thread_that_ends_tells_anything(page: Page) -> None:
    process = page.start(
        "child = os.fork() or os._exit(7)\n"
        "os.waitpid(child, 0)\n"
        "thread = threading.Thread(target=int); thread.start(); thread.join()\n"
        "print('ready', flush=True)\n"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert page.told.empty()
    process.kill()
    page.wait()
    process.wait(DEADLINE)


def test_a_stopped_process_is_not_dead_until_it_is_killed(page: Page) -> None:
    process = page.start()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    assert page.told.empty()
    process.kill()
    page.wait()
    process.wait(DEADLINE)


def test_a_closed_notice_tells_nothing_and_leaves_no_thread(page: Page) -> None:
    process = page.start()
    waiting = [thread for thread in threading.enumerate() if thread.name == "death notice"]
    assert waiting
    page.notice.close()
    for thread in waiting:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    process.kill()
    process.wait(DEADLINE)
    assert page.told.empty()


def test_a_page_that_is_gone_is_no_error_in_the_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from dlrover.host.shared_page import death_notice; print(death_notice.hold('/proc/1/fd/x', 0))"],
        capture_output=True, text=True, timeout=DEADLINE, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("False\n", "")
