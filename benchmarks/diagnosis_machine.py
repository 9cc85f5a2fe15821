"""
What some faults of the corpus need of the machine: control groups with limits, networks of their own, small and paused disks, clocks that can be moved.

Everything here is made for one job and undone with it. Where the machine does not allow it, `why_not` says what is missing, and the kind is left out with that
reason rather than imitated.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

DISK = Path(__file__).with_name("diagnosis_disk.py")
_CGROUPS = Path("/sys/fs/cgroup")
_DROP_ALL = ("tbf", "rate", "8bit", "burst", "60", "limit", "60")
"""A token bucket that is smaller than any packet of TCP, so that all are dropped: it is there where `netem` is not."""
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static int (*real)(clockid_t, struct timespec *);
static volatile double *moved;
__attribute__((constructor)) static void begin(void) {
  real = dlsym(RTLD_NEXT, "clock_gettime");
  const char *path = getenv("CORPUS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *page = file < 0 ? MAP_FAILED : mmap(0, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
  if (page != MAP_FAILED) moved = page;
}
int clock_gettime(clockid_t which, struct timespec *now) {
  if (!real) begin();
  int result = real(which, now);
  if (!result && moved && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += (time_t)*moved;
  return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  int result = clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec, now->tv_usec = exact.tv_nsec / 1000;
  return result;
}
time_t time(time_t *where) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (where) *where = exact.tv_sec;
  return exact.tv_sec;
}
"""


def why_not(needs: Sequence[str]) -> str:
    """What of all that is missing here; empty: nothing."""
    for need in needs:
        if need == "root" and os.geteuid() != 0:
            return "needs the superuser"
        if need == "fuse" and not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return "needs /dev/fuse"
        if need in ("memory", "pids") and _cgroup_root(need) is None:
            return f"needs a control group with a limit of {need}"
        if need == "networks" and (reason := _why_no_networks()):
            return reason
        if need == "gcc" and shutil.which("gcc") is None:
            return "needs gcc"
    return ""


class Cgroup:
    """A control group with one controller, of version 1 or 2."""

    def __init__(self, controller: str, name: str) -> None:
        root = _cgroup_root(controller)
        assert root is not None, controller
        self.path = root / name
        self.path.mkdir()

    def lift(self) -> None:
        """No limit of memory any more."""
        for name, unlimited in (("memory.limit_in_bytes", "-1"), ("memory.max", "max")):
            if (self.path / name).exists():
                (self.path / name).write_text(unlimited)

    def close(self) -> None:
        """Whoever is still in it goes to the group above."""
        with contextlib.suppress(OSError):
            for pid in (self.path / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (self.path.parent / "cgroup.procs").write_text(pid)
            self.path.rmdir()


def _cgroup_root(controller: str) -> Path | None:
    first = _CGROUPS / controller
    if (first / "cgroup.procs").exists() and os.access(first, os.W_OK):
        return first
    with contextlib.suppress(OSError):
        if controller in (_CGROUPS / "cgroup.subtree_control").read_text().split() and os.access(_CGROUPS, os.W_OK):
            return _CGROUPS
    return None


def limit_memory(path: str, room: int) -> None:
    """A limit that is so many bytes above what the group uses now."""
    for used, limit in (("memory.usage_in_bytes", "memory.limit_in_bytes"), ("memory.current", "memory.max")):
        if (file := Path(path, used)).exists():
            Path(path, limit).write_text(str(int(file.read_text()) + room))


def limit_processes(path: str, room: int) -> None:
    """The calling process enters the group, which can have so many threads and processes more."""
    Path(path, "cgroup.procs").write_text(str(os.getpid()))
    Path(path, "pids.max").write_text(str(int(Path(path, "pids.current").read_text()) + room))


class Networks:
    """A network namespace for each rank, all connected by a switch in yet another one: nothing of it is seen from outside."""

    def __init__(self, name: str, num_ranks: int, subnet: int) -> None:
        self._names = [f"{name}-{rank}" for rank in range(num_ranks)]
        self._hub = f"{name}-hub"
        self.addresses = [f"10.231.{subnet}.{rank + 1}" for rank in range(num_ranks)]
        self.paths = [f"/run/netns/{each}" for each in self._names]
        try:
            self._make()
        except subprocess.CalledProcessError:
            self.close()
            raise

    def heal(self, rank: int) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "exec", self._names[rank], "tc", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        for name in (*self._names, self._hub):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)

    def _make(self) -> None:
        _ip("netns", "add", self._hub)
        _ip("-n", self._hub, "link", "add", "switch", "type", "bridge")
        _ip("-n", self._hub, "link", "set", "switch", "up")
        for rank, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", self._hub, "link", "add", f"p{rank}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", self._hub, "link", "set", f"p{rank}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[rank]}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "eth0", "up")


def lose_all_packets() -> None:
    """Whatever leaves the network namespace of the caller, from now on."""
    subprocess.run(["tc", "qdisc", "replace", "dev", "eth0", "root", *_DROP_ALL], check=True)


def enter_network(path: str) -> None:
    """The calling thread, and those it starts from now on."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")
    finally:
        os.close(descriptor)


def _why_no_networks() -> str:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs ip and tc"
    name = f"corpus-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", "lo", "root", *_DROP_ALL)
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces and a token bucket filter: {error.stderr.decode().strip()[:200]}"
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", name)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class SmallDisk:
    """A file system with next to no room."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "corpus", str(place)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)


class PausableDisk:
    """A file system whose server can be stopped."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.mkdir()
        command = [sys.executable, str(DISK), str(place)]
        self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._server.stdout is not None
        if self._server.stdout.readline().strip() != b"ready":
            raise RuntimeError(f"cannot serve a file system at {place}")
        self.pid = self._server.pid

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        subprocess.run(["umount", "-l", str(self.place)], check=False, capture_output=True)
        self._server.kill()  # whoever still reads gets an error
        self._server.wait()


class Clock:
    """The wall clock that the processes of one node see: a library answers in the place of libc."""

    def __init__(self, folder: Path, name: str) -> None:
        self.library = folder / "clock.so"
        if not self.library.exists():
            command = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(self.library), "-ldl"]
            subprocess.run(command, input=_CLOCK.encode(), check=True)
        self.path = folder / name
        self.path.write_bytes(struct.pack("d", 0.0))

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "CORPUS_CLOCK": str(self.path)}


def move_clock(path: str, seconds: float) -> None:
    with open(path, "r+b") as file:
        moved = struct.unpack("d", file.read(8))[0]
        file.seek(0)
        file.write(struct.pack("d", moved + seconds))
