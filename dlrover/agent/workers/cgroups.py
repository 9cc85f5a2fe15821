"""
Cgroups (version 2) for the workers of one agent, so that the kernel can kill a whole tree at once.

A sweep through /proc races with processes that fork while it looks; `cgroup.kill` does not, whatever session they opened and however
often they forked. It is used where the agent may make cgroups below its own: as root, or where systemd or a container gave it the
subtree. Elsewhere the sweep alone does it, and it follows in any case: it reaps, and finds what left the cgroup.

Moving a process into a cgroup costs 5 to 20 ms here, much more than starting a warm worker, so no worker is ever moved. It is born
in the cgroup of the zygote, which goes on to a new one a second after the last start, when no process waits for it. Until then the two
share one, and it cannot be killed as a whole.

Only directories, no controller: limits and accounting stay those of the agent's own cgroup. An agent that is killed leaves empty
directories behind; their path is in its runtime directory, and the program that removes it removes them, too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections.abc import Collection, Iterator

from dlrover.host.cgroup import unified_directory

_log = logging.getLogger(__name__)

_RECORD = "cgroup"
"""File in the runtime directory that names our directory."""
_PREFIX = "dlrover-"
_CLEAR_DEADLINE = 2.0
_YOUNG = 5.0
"""Seconds in which an agent's directory may be empty because its zygote is just being started."""


class Cgroups:
    """The directory below the agent's own cgroup; the zygote makes one in it for each generation of workers."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def open(cls, runtime_dir: str) -> Cgroups | None:
        """None where this process may not make cgroups, or the kernel cannot kill them (before 5.14)."""
        own = unified_directory()
        if own is None or not os.access(os.path.join(own, "cgroup.procs"), os.W_OK):
            return None
        clear_recorded(runtime_dir)  # of an agent before us in the same launch
        path = os.path.join(own, _PREFIX + os.path.basename(runtime_dir.rstrip("/")))
        try:
            with open(os.path.join(runtime_dir, _RECORD), "w") as file:
                file.write(path)
            os.mkdir(path)
        except OSError as error:
            _log.debug("no cgroup for the workers: %s", error)
            return None
        if not os.path.exists(os.path.join(path, "cgroup.kill")):
            os.rmdir(path)
            return None
        return cls(path)

    def kill(self, keep: Collection[int] = ()) -> None:
        """SIGKILL to all in every cgroup that has none of the `keep` ones."""
        for path in _below(self.path):
            pids = _pids(path)
            if pids and not pids.intersection(keep):
                _write(os.path.join(path, "cgroup.kill"), "1")

    def remove_empty(self) -> None:
        for path in _below(self.path):
            with contextlib.suppress(OSError):  # in use
                os.rmdir(path)

    def close(self) -> None:
        """When all processes are gone. What cannot be removed yet is left to the program that removes the runtime directory."""
        self.remove_empty()
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def clear_recorded(runtime_dir: str) -> None:
    """Kill and remove what the agent of this runtime directory had in cgroups; nothing if it has done so itself."""
    try:
        with open(os.path.join(runtime_dir, _RECORD)) as file:
            path = file.read()
    except (OSError, UnicodeDecodeError):
        return
    kill_file = os.path.join(path, "cgroup.kill")
    if not os.path.basename(path).startswith(_PREFIX) or not os.path.exists(kill_file):
        return  # gone already; or not written by us
    _write(kill_file, "1")
    _wait_empty(path, time.monotonic() + _CLEAR_DEADLINE)
    Cgroups(path).close()


def remove_abandoned(older_than: float) -> None:
    """
    Remove directories of agents below our own cgroup in which no process is left and nothing has changed for so long.

    For those whose runtime directory went without us: a person cleared the temporary directory after killing everything.
    A living agent's is never empty for long, because its zygote is in there.
    """
    own = unified_directory()
    for path in _below(own) if own is not None else ():
        if not os.path.basename(path).startswith(_PREFIX):
            continue
        with contextlib.suppress(OSError):
            age = time.time() - os.stat(path).st_mtime
            if age >= max(older_than, _YOUNG) and not _is_populated(path):
                Cgroups(path).close()


def _below(path: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from sorted(entry.path for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))


def _pids(path: str) -> set[int]:
    try:
        with open(os.path.join(path, "cgroup.procs")) as file:
            return {int(line) for line in file}
    except OSError:
        return set()


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as error:
        _log.warning("%s cannot be written (%s), so processes are killed one by one.", path, error.strerror)


def _is_populated(path: str) -> bool:
    with open(os.path.join(path, "cgroup.events")) as file:
        return "populated 1" in file.read()


def _wait_empty(path: str, until: float) -> None:
    """Without an event loop: for the launcher, and an agent's first lines."""
    try:
        with open(os.path.join(path, "cgroup.events")) as file:
            poll = select.poll()
            poll.register(file, select.POLLPRI)  # at each change
            while "populated 1" in file.read() and (left := until - time.monotonic()) > 0:
                poll.poll(left * 1000)
                file.seek(0)
    except OSError:
        return
