"""
Starting a launcher so that nothing of it can outlive the benchmark.

The benchmark makes itself a child subreaper: whatever a launcher starts, however it daemonises, stays a descendant of
ours, so "everything I started" is a tree we can read from the kernel and end by pid.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


@contextlib.contextmanager
def running(
    command: Sequence[str], *, environment: Mapping[str, str], folder: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a launcher, its output into `log`; on leaving, by whatever way, end it and all its descendants."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is ours to pass on
            preexec_fn=_die_with_parent,
        )
    try:
        yield process
    finally:
        end(process, grace=5.0)


def _die_with_parent() -> None:
    _libc.prctl(
        PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0
    )  # if the benchmark is SIGKILLed, the launcher cleans up itself


def end(process: subprocess.Popen[bytes], *, grace: float) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(grace)
    end_descendants(deadline_at=time.monotonic() + 10)


def end_descendants(*, deadline_at: float) -> None:
    """SIGKILL until the tree is empty: a process may have forked between our look and our signal."""
    while children := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline_at:
            raise RuntimeError(f"cannot end the processes {[child.pid for child in children]}")
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
