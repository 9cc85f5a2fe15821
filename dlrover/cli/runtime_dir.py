"""
The directories of running jobs on this host: `<root>/dlrover-<uid>/<job>/node-<launch>`.

Each launcher owns one node directory (configuration of its agent, sockets, error files, the journal if it hosts the
master) and removes it at the end. What a launcher could not remove because it was killed together with everything else
is removed by the next start of this user, or by `dlrover clean`: the owner's pid and start time are on record, so a
dead owner is told from a pid that was given to somebody else.

All jobs of a user share one short-lived lock, so that creating, sharing the job's token and removing cannot interleave.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator

import msgspec

from dlrover.cli.environment import Environment
from dlrover.protocol.errors import ConfigError

MAX_PATH_BYTES = 96
"""Of a node directory: a unix socket's name has at most 107 bytes, and `/agent.sock` must follow."""
_NODE_BYTES = len("/node-00000000")
_JOB_NAME_BYTES = range(12, 33)
"""How much of a job's name is kept: as much as fits. Below the minimum another root is taken."""
STALE_AFTER = 600.0
"""Seconds before a start removes the directory of a dead owner: somebody may want to look at it first."""
OWNER_FILE = "owner.json"
TOKEN_FILE = "token"


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Which process a node directory belongs to."""

    pid: int
    started: str
    """Kernel's start time of the process and the id of the boot: together with the pid unique."""
    job_name: str = ""
    master_addr: str = ""


def user_root(environment: Environment) -> str:
    """`<root>/dlrover-<uid>`, created, ours, and closed to others."""
    candidates = [environment.runtime_root, environment.temp_dir]
    base = next((path for path in candidates if path and _is_usable(path)), "/tmp")
    root = os.path.join(base, f"dlrover-{os.getuid()}")
    if _job_room(root) < _JOB_NAME_BYTES[0]:
        root = f"/tmp/dlrover-{os.getuid()}"
    _make_private(root)
    return root


def job_directory_name(job_name: str, length: int = _JOB_NAME_BYTES[-1]) -> str:
    """The job's name as far as it can be a short file name; a digest keeps two that become equal apart."""
    plain = "".join(
        letter if (letter.isascii() and letter.isalnum()) or letter in "._-" else "_" for letter in job_name
    )
    if plain == job_name and len(plain) <= length and not plain.startswith("."):
        return plain
    import hashlib

    digest = hashlib.blake2b(job_name.encode(), digest_size=3).hexdigest()
    return f"{plain.lstrip('.')[: length - 7]}-{digest}"


def _job_room(root: str) -> int:
    return min(_JOB_NAME_BYTES[-1], MAX_PATH_BYTES - len(os.fsencode(root)) - 1 - _NODE_BYTES)


class NodeDirectory:
    """The directory of one launcher; created on construction, removed by `remove`."""

    def __init__(self, root: str, job_name: str, launch: str) -> None:
        self._root = root
        self._job_name = job_name
        self.job_dir = os.path.join(root, job_directory_name(job_name, _job_room(root)))
        self.path = os.path.join(self.job_dir, f"node-{launch}")
        with locked(root):
            _make_private(self.job_dir)
            _make_private(self.path)
            self.record("")

    def record(self, master_addr: str) -> None:
        """Who owns the directory, and where the job's master is."""
        owner = describe_process(os.getpid(), job_name=self._job_name, master_addr=master_addr)
        self.write(OWNER_FILE, msgspec.json.encode(owner))

    def write(self, name: str, data: bytes) -> str:
        """A 0600 file that appears whole."""
        path = os.path.join(self.path, name)
        write_private(path, data)
        return path

    def share_token(self) -> str:
        """The token that launchers of this user on this host share for this job; whoever comes first makes it."""
        path = os.path.join(self.job_dir, TOKEN_FILE)
        with locked(self._root):
            try:
                with open(path, encoding="ascii") as file:
                    return file.read().strip()
            except FileNotFoundError:
                token = os.urandom(24).hex()
                write_private(path, token.encode())
                return token

    def remove(self) -> None:
        with locked(self._root):
            _remove_tree(self.path)
            _remove_empty_job(self.job_dir)


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """Guards the listing of a user's jobs; held for some file operations only, by separate processes (so no queue)."""
    descriptor = os.open(os.path.join(root, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def describe_process(pid: int, *, job_name: str = "", master_addr: str = "") -> Owner:
    return Owner(pid=pid, started=_start_of(pid) or "", job_name=job_name, master_addr=master_addr)


def is_alive(owner: Owner) -> bool:
    return _start_of(owner.pid) == owner.started


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """A node directory with a dead owner."""

    path: str
    age: float
    job_name: str = ""


def list_nodes(root: str) -> tuple[list[tuple[str, Owner]], list[LeftBehind]]:
    """Node directories with a living owner, and those that nobody owns any more."""
    living: list[tuple[str, Owner]] = []
    dead: list[LeftBehind] = []
    for job in _subdirectories(root):
        for path in _subdirectories(job):
            try:
                age = time.time() - os.stat(path).st_mtime
                with open(os.path.join(path, OWNER_FILE), "rb") as file:
                    owner = msgspec.json.decode(file.read(), type=Owner)
            except FileNotFoundError:
                owner = None
            except (OSError, msgspec.DecodeError):
                continue  # being removed, or not ours to judge
            if owner is not None and is_alive(owner):
                living.append((path, owner))
            elif os.path.isdir(path):
                dead.append(LeftBehind(path=path, age=age, job_name=owner.job_name if owner else ""))
    return living, dead


def reap(root: str, *, older_than: float = STALE_AFTER) -> list[LeftBehind]:
    """Remove what dead launchers left: their processes first, then their directories. Returns what was removed."""
    with locked(root):
        _, dead = list_nodes(root)
        stale = [left for left in dead if left.age >= older_than]
        if stale:
            _kill_processes_of([left.path for left in stale])
        for left in stale:
            _remove_tree(left.path)
        for job in _subdirectories(root):
            _remove_empty_job(job)
    return stale


def write_private(path: str, data: bytes) -> None:
    temporary = f"{path}.{os.getpid()}.new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)
    os.rename(temporary, path)


def _kill_processes_of(paths: list[str]) -> None:
    """
    SIGKILL every process of ours whose environment says that its agent lived in one of these directories.

    Only descendants that left their session can still be alive after everything of a job was killed at once. Their
    environment is the one mark they cannot have lost; a pidfd makes sure that the pid is still the process that was
    read.
    """
    import signal

    marks = [f"\0DLROVER_AGENT_SOCKET={path}/".encode() for path in paths]
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            descriptor = os.pidfd_open(int(name))
        except OSError:
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid != os.getuid():
                continue
            with open(f"/proc/{name}/environ", "rb") as file:
                environ = b"\0" + file.read()
            if any(mark in environ for mark in marks):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _remove_empty_job(job_dir: str) -> None:
    """The last node of a job takes the shared token with it. Called under the lock."""
    if any(True for _ in _subdirectories(job_dir)):
        return
    _remove_tree(job_dir)


def _remove_tree(path: str) -> None:
    import shutil  # late: the start of the workers would wait for it

    shutil.rmtree(path, ignore_errors=True)


def _subdirectories(path: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(path))
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield entry.path


def _start_of(pid: int) -> str | None:
    """None: no such process, or only its zombie is left."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    if fields[0] in (b"Z", b"X"):
        return None
    return f"{fields[19].decode()}@{boot}"


def _is_usable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _make_private(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise ConfigError(
            f"The runtime directory {path} cannot be created: {error.strerror}. Point XDG_RUNTIME_DIR or TMPDIR to a "
            "directory that you may write to."
        ) from error
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            f"The runtime directory {path} belongs to somebody else (uid {found.st_uid}) or is no directory; what is "
            "in it cannot be trusted. Remove it, or point XDG_RUNTIME_DIR or TMPDIR elsewhere."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
