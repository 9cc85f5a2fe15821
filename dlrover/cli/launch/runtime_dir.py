"""
The directories of running jobs on this host: `<root>/dlrover-<uid>/<job>/node-<launch>`.

Each launcher owns one node directory (configuration of its agent, sockets, error files, the journal if it hosts the
master) and removes it at the end. What a launcher could not remove because it was killed together with everything else
is removed by the next start of this user, or by `dlrover clean`. Who is dead is told by a lock that the launcher holds
for life: containers that share a directory see each other's locks, but not each other's processes.

All jobs of a user share another, short-lived lock, so that creating, sharing the job's token and removing cannot
interleave.

The root is a temporary directory and not XDG_RUNTIME_DIR: that one is deleted when the user logs out, and a job under
nohup or tmux goes on.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator

import msgspec

from dlrover.cli.console import say
from dlrover.cli.options.environment import Environment
from dlrover.host.ownership import NotOurs, make_private
from dlrover.host.processes import look_up
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import ConfigError

MAX_PATH_BYTES = 96
"""Of a node directory: a unix socket's name has at most 107 bytes, and `/agent.sock` must follow."""
_NODE_PREFIX = "node-"
_NODE_BYTES = len(f"/{_NODE_PREFIX}00000000")
_JOB_NAME_BYTES = range(12, 33)
"""How much of a job's name is kept: as much as fits. Below the minimum another root is taken."""
STALE_AFTER = 600.0
"""Seconds before a start removes the directory of a dead owner: a person may want to look at it first."""
LOCK_TIMEOUT = 10.0
"""Seconds for the lock on the listing. It is held for milliseconds; longer means that its holder was stopped."""
OWNER_FILE = "owner.json"
LIFE_FILE = "alive.lock"
"""Locked by the owner as long as it lives."""
TOKEN_FILE = "token"
SAVING_FILE = "saving"
"""The agent's note that it ends and still writes checkpoints, and until when."""


class DirectoryOwner(msgspec.Struct, frozen=True, kw_only=True):
    """Which process a node directory belongs to."""

    pid: int
    started: str
    """Kernel's start time of the process and the id of the boot: together with the pid unique on a host."""
    job_name: str = ""
    master_addr: str = ""
    tls: TlsConfig | None = None
    """The files with which the job's own nodes reach the master."""


def user_root(environment: Environment) -> str:
    """
    `<root>/dlrover-<uid>`, created, ours, and closed to others.

    XDG_RUNTIME_DIR only where no temporary directory can be used: it does not survive the end of the login session.
    """
    roots = [
        os.path.join(base, f"dlrover-{os.getuid()}")
        for base in (environment.temp_dir, "/tmp", environment.runtime_root)
        if base and _is_usable(base)
    ]
    fitting = (root for root in roots if _job_room(root) >= _JOB_NAME_BYTES[0])
    root = next(fitting, f"/tmp/dlrover-{os.getuid()}")
    _make_private(root)
    return root


def snapshot_root(environment: Environment) -> str:
    """
    Directory of this user's snapshot segments; it exists only while there are any.

    Never the directory of the running jobs, even where TMPDIR is in memory too: a tool that tidies one does not know the other.
    """
    base = environment.snapshot_dir if _is_usable(environment.snapshot_dir) else environment.temp_dir
    return os.path.join(base, f"dlrover-snapshots-{os.getuid()}")


def remove_snapshots(root: str, job_name: str, launch: str) -> None:
    """At the end of a launch, when its processes are gone. Never fails: the job has its result by now."""
    if not os.path.isdir(root):
        return  # nobody saved anything; the usual job need not import what follows
    from dlrover.snapshot.memory.homes import remove_launch

    try:
        remove_launch(root, job_name, launch)
    except OSError as error:
        say(f"the snapshots of this job could not be removed from {root}: {error}. Run `dlrover clean` to try again.")


def reap_snapshots(root: str, *, older_than: float = STALE_AFTER) -> list[str]:
    """Remove the snapshots of launches whose agents and trainers are all dead. Returns the directories."""
    if not os.path.isdir(root):
        return []
    from dlrover.snapshot.memory.homes import reap_orphans, remove_empty_root

    try:
        removed = [str(path) for path in reap_orphans(root, time.time(), grace=older_than)]
    except OSError as error:
        say(f"snapshots left over in {root} from an earlier job could not be removed: {error}")
        return []
    remove_empty_root(root)
    return removed


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
    """
    The directory of one launcher; created on construction, removed by `remove`.

    Raises `ConfigError` where it cannot be had, and then leaves nothing behind.
    """

    def __init__(
        self,
        root: str,
        job_name: str,
        launch: str,
        *,
        others: Iterator[str] | None = None,
        patience: float = LOCK_TIMEOUT,
    ) -> None:
        """`others`: names to take instead, while jobs with the ones before run here. `patience`: seconds for a lock."""
        self._root = root
        self._patience = patience
        self._claims: list[int] = []
        with locked(root, patience=patience):
            self.job_name, self.job_dir = job_name, job_directory(root, job_name)
            while others is not None and _is_taken(self.job_dir) and (another := next(others, "")):
                self.job_name, self.job_dir = another, job_directory(root, another)
            self.path = os.path.join(self.job_dir, f"{_NODE_PREFIX}{launch}")
            try:
                _make_private(self.job_dir)
                _make_private(self.path)
                with explained(self.path):
                    self._claim()
                self.record("")
            except BaseException:
                self._remove_files()
                raise

    def _claim(self) -> None:
        """Two locks that end with this process: one says that we live, the other keeps tidy systems off our files."""
        life = _open_for_life(os.path.join(self.path, LIFE_FILE), os.O_RDWR | os.O_CREAT)
        self._claims.append(life)
        if not _take(life, self._patience):  # not at once: somebody who lists the directories may be looking at it
            raise BlockingIOError(errno.EWOULDBLOCK, f"another process holds {LIFE_FILE}")
        # systemd removes what has not been touched for ten days from temporary directories, but for those locked.
        root = _open_for_life(self._root, os.O_RDONLY | os.O_DIRECTORY)
        self._claims.append(root)
        with contextlib.suppress(OSError):  # a file system without locks on directories has no such visitor either
            fcntl.flock(root, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def record(self, master_addr: str, tls: TlsConfig | None = None) -> None:
        """Who owns the directory, and where and how the job's master is reached."""
        owner = describe_process(os.getpid(), job_name=self.job_name, master_addr=master_addr, tls=tls)
        self.write(OWNER_FILE, msgspec.json.encode(owner))

    def write(self, name: str, data: bytes) -> str:
        """A 0600 file that appears whole. One that says so already stays: a restart needs no room on a full disk."""
        path = os.path.join(self.path, name)
        if not _has_content(path, data):
            write_private(path, data)
        return path

    def share_token(self) -> str:
        """The token that launchers of this user on this host share for this job; the first of them makes it."""
        path = os.path.join(self.job_dir, TOKEN_FILE)
        with locked(self._root, patience=self._patience), explained(self.job_dir):
            try:
                with open(path, encoding="ascii") as file:
                    return file.read().strip()
            except FileNotFoundError:
                token = os.urandom(24).hex()
                write_private(path, token.encode())
                return token

    def remove(self) -> None:
        """Never fails: the job has its result by now. What stays is left to the next start."""
        if not os.path.isdir(self._root):
            self._release()  # somebody cleared the whole temporary directory
            return
        try:
            with locked(self._root, patience=self._patience):
                self._remove_files()
        except ConfigError as error:
            _remove_node(self.path)  # ours alone; only the listing needs the lock
            self._release()
            say(f"some files could not be removed. {error}")

    def _remove_files(self) -> None:
        _remove_node(self.path)
        _remove_empty_job(self.job_dir)
        self._release()

    def _release(self) -> None:
        while self._claims:
            descriptor = self._claims.pop()
            if descriptor in _held_for_life:  # not in a forked child, which has closed it
                _held_for_life.remove(descriptor)
                os.close(descriptor)


def job_directory(root: str, job_name: str) -> str:
    return os.path.join(root, job_directory_name(job_name, _job_room(root)))


def _is_taken(job_dir: str) -> bool:
    """A launcher of that job lives. Under the lock on the listing."""
    return any(is_alive(path, None) for path in _subdirectories(job_dir))


@contextlib.contextmanager
def locked(root: str, *, patience: float = LOCK_TIMEOUT) -> Iterator[None]:
    """
    Guards the listing of a user's jobs; held for some file operations only, by separate processes (so no queue).

    Raises `ConfigError` if its holder does not let go within so many seconds.
    """
    path = os.path.join(root, ".lock")
    with explained(root):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with explained(root):
            is_ours = _take(descriptor, patience)
        if not is_ours:
            raise ConfigError(
                f"Another process has held the lock {path} for {patience:.0f} s. It is probably stopped, for "
                f"example a `dlrover clean` in the background. `fuser {path}` prints its pid; continue or end "
                "that process."
            )
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(directory: str) -> Iterator[None]:
    """A full or read-only disk is nothing that we can heal: say where, and what to do."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"The runtime directory {directory} cannot be used: {error.strerror or error}. Free space there or "
            "correct its permissions, or set TMPDIR to a directory that you can write to."
        ) from error


def _take(descriptor: int, patience: float) -> bool:
    """Whether the lock is ours now. The kernel has no wait with a deadline for it, so look again in growing steps."""
    until = time.monotonic() + patience
    pause = 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


_held_for_life: set[int] = set()


def _open_for_life(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    _held_for_life.add(descriptor)
    return descriptor


def _forget_locks() -> None:
    """A lock belongs to all copies of its descriptor: a forked child must not keep its dead parent alive."""
    while _held_for_life:
        os.close(_held_for_life.pop())


os.register_at_fork(after_in_child=_forget_locks)


def describe_process(
    pid: int, *, job_name: str = "", master_addr: str = "", tls: TlsConfig | None = None
) -> DirectoryOwner:
    return DirectoryOwner(pid=pid, started=_start_of(pid) or "", job_name=job_name, master_addr=master_addr, tls=tls)


def is_running(owner: DirectoryOwner) -> bool:
    """Whether that very process runs, as far as we can see from here."""
    return _start_of(owner.pid) == owner.started


def is_alive(path: str, owner: DirectoryOwner | None) -> bool:
    """
    Whether a node directory has a living owner.

    The lock decides. The pid is asked only if there is none to ask (tidied away): it says nothing about a
    launcher in another container.
    """
    try:
        descriptor = os.open(os.path.join(path, LIFE_FILE), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return owner is not None and is_running(owner)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not take each other for owners
    except OSError:
        return True  # held, or not to be told: better too many directories than one too few
    finally:
        os.close(descriptor)
    return False


def directory_of(job_dir: str, pid: int) -> str | None:
    """The node directory of this job that the launcher with this pid made; None: it has none yet, or no more."""
    for path in _subdirectories(job_dir):
        try:
            with open(os.path.join(path, OWNER_FILE), "rb") as file:
                owner = msgspec.json.decode(file.read(), type=DirectoryOwner)
        except (OSError, msgspec.DecodeError):
            continue  # being made, or being removed
        if owner.pid == pid:
            return path
    return None


def saving_until(path: str) -> float:
    """Until when (monotonic) the agent in this node directory may still write checkpoints; 0: it does not."""
    try:
        with open(os.path.join(path, SAVING_FILE), encoding="ascii") as file:
            return float(file.read())
    except (OSError, ValueError):
        return 0.0


class LeftBehind(msgspec.Struct, frozen=True, kw_only=True):
    """A node directory with a dead owner."""

    path: str
    age: float
    job_name: str = ""


def list_nodes(root: str) -> tuple[list[tuple[str, DirectoryOwner]], list[LeftBehind]]:
    """Node directories with a living owner, and those without one."""
    living: list[tuple[str, DirectoryOwner]] = []
    dead: list[LeftBehind] = []
    for job in _subdirectories(root):
        for path in _subdirectories(job):
            try:
                age = time.time() - os.stat(path).st_mtime
                with open(os.path.join(path, OWNER_FILE), "rb") as file:
                    owner = msgspec.json.decode(file.read(), type=DirectoryOwner)
            except FileNotFoundError:
                owner = None
            except (OSError, msgspec.DecodeError):
                continue  # being removed, or not ours to judge
            if is_alive(path, owner):
                if owner is not None:  # else it is just being created
                    living.append((path, owner))
            elif os.path.isdir(path):
                dead.append(LeftBehind(path=path, age=age, job_name=owner.job_name if owner else ""))
    return living, dead


def reap(
    root: str, *, older_than: float = STALE_AFTER, patience: float = LOCK_TIMEOUT, job_dir: str = ""
) -> list[LeftBehind]:
    """
    Remove what dead launchers left: their processes first, then their directories. Returns what was removed.

    With `job_dir` only of that job.
    """
    with locked(root, patience=patience):
        _, dead = list_nodes(root)
        stale = [left for left in dead if left.age >= older_than]
        if job_dir:
            stale = [left for left in stale if os.path.dirname(left.path) == job_dir]
        if stale:
            _kill_processes_of([left.path for left in stale])
        for left in stale:
            _remove_node(left.path)
        for job in _subdirectories(root):
            _remove_empty_job(job)
    from dlrover.agent.workers.cgroups import remove_abandoned

    remove_abandoned(older_than)
    return stale


def launch_of(path: str) -> str:
    """Of a node directory."""
    return os.path.basename(path).removeprefix(_NODE_PREFIX)


def remove_left(path: str, job_name: str, snapshots: str) -> None:
    """What a launcher of ours left that was killed, when nothing of its node lives any more."""
    if is_alive(path, None):
        return
    remove_snapshots(snapshots, job_name, launch_of(path))
    _remove_node(path)


def reap_in_passing(root: str) -> None:
    """For a start that has better things to do: if anything is in the way, another start will."""
    with contextlib.suppress(ConfigError):
        reap(root, patience=0.0)


def write_private(path: str, data: bytes) -> None:
    """A 0600 file that appears whole or not at all. Raises `ConfigError`, for instance on a full disk."""
    temporary = f"{path}.{os.getpid()}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with explained(os.path.dirname(path)):
        try:
            descriptor = os.open(temporary, flags, 0o600)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def _has_content(path: str, data: bytes) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read() == data
    except OSError:
        return False


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


def _remove_node(path: str) -> None:
    from dlrover.agent.workers.cgroups import clear_recorded  # late: only an agent that was killed left anything there

    clear_recorded(path)
    _remove_tree(path)


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
    """None: no such process, or only its zombie is left, or it is another user's and hidden from us: then it is none of ours."""
    process = look_up(pid)
    if process is None or process.is_dead:
        return None
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
    except (FileNotFoundError, PermissionError):
        return None
    return f"{process.started_at_ticks}@{boot}"


def _is_usable(path: str) -> bool:
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _make_private(path: str) -> None:
    with explained(path):
        try:
            make_private(path)
        except NotOurs as error:
            raise ConfigError(
                f"The runtime directory {path} cannot be used: {error.strerror}. Remove it, or set TMPDIR to "
                "another directory."
            ) from error
