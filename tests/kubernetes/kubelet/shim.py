"""
One container: a process that prepares it, waits for it, and writes down how it ended.

Run as a file, with the standard library alone, in a session of its own: it outlives the kubelet, as a container runtime's
shim does, so that a kubelet that starts again finds the container running and its end on the disk.

The container is process 1 of a process namespace: when it ends the kernel ends all its descendants, and a SIGTERM for which it
has no handler does nothing. Its root is an overlay of the machine's root: it sees the machine's programs and its own writes.
"""

import ctypes
import json
import os
import select
import signal
import sys
import time

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_START_ERROR = 128
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    folder = sys.argv[1]
    with open(os.path.join(folder, "spec.json"), encoding="utf-8") as file:
        spec = json.load(file)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _check(_libc.unshare(_NEWPID), "unshare")
    error_end, child_error_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become_container(spec, child_error_end)
    os.close(child_error_end)
    with os.fdopen(error_end, "rb") as errors:  # closed without a word by a successful exec
        message = errors.read().decode(errors="replace")
    started_at = time.time()
    if message:
        os.waitpid(pid, 0)
        _write(folder, "exit.json", code=_START_ERROR, reason="StartError", message=message, started_at=0.0)
        return
    _write(folder, "started.json", pid=pid, started_at=started_at)
    os.close(1)  # tells the kubelet
    status = _wait(pid, spec["cgroup"])
    code = os.waitstatus_to_exitcode(status)
    code = 128 - code if code < 0 else code
    reason = "Completed" if code == 0 else "Error"
    if spec["cgroup"] and _num_oom_kills(spec["cgroup"]) > 0:
        reason = "OOMKilled"
    _write(folder, "exit.json", code=code, reason=reason, message="", started_at=started_at)


def _wait(pid: int, cgroup: str) -> int:
    """The container's wait status. Where the kernel ends one process for want of memory, the rest of the container follows."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    event = _oom_event(cgroup) if cgroup else -1
    if event >= 0:
        poll.register(event, select.POLLIN)
    while True:
        ready = [number for number, _ in poll.poll(1000 if cgroup else None)]
        if pidfd in ready:
            return os.waitpid(pid, 0)[1]
        if cgroup and _num_oom_kills(cgroup) > 0:
            # As `memory.oom.group` does, which kubelets set.
            os.kill(pid, signal.SIGKILL)
        if event in ready:
            os.read(event, 8)


def _oom_event(cgroup: str) -> int:
    """A descriptor that becomes readable at a lack of memory (cgroup v1); -1 where the kernel does it all (v2)."""
    control = os.path.join(cgroup, "memory.oom_control")
    if not os.path.exists(control):
        return -1
    event = _libc.eventfd(0, os.O_CLOEXEC)
    descriptor = os.open(control, os.O_RDONLY | os.O_CLOEXEC)
    with open(os.path.join(cgroup, "cgroup.event_control"), "w", encoding="ascii") as file:
        file.write(f"{event} {descriptor}")
    return event


def _num_oom_kills(cgroup: str) -> int:
    for name in ("memory.oom_control", "memory.events"):
        try:
            with open(os.path.join(cgroup, name), encoding="ascii") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def _become_container(spec: dict, error_end: int) -> None:
    try:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")  # no container without its shim
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if spec["cgroup"]:
            with open(os.path.join(spec["cgroup"], "cgroup.procs"), "w", encoding="ascii") as procs:
                procs.write("0")
        if spec["network"]:
            network = os.open(spec["network"], os.O_RDONLY | os.O_CLOEXEC)
            _check(_libc.setns(network, _NEWNET), "setns")
        _check(_libc.unshare(_NEWNS | _NEWUTS | _NEWIPC), "unshare")
        _build_root(spec)
        host = os.fsencode(spec["hostname"])
        _check(_libc.sethostname(host, len(host)), "sethostname")
        nothing = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.chdir(spec["directory"])
        argv = spec["argv"]
        if not argv:
            raise OSError(0, "no command specified")
        try:
            os.execvpe(argv[0], argv, spec["environ"])
        except OSError as error:
            # In the words of a container runtime.
            what = f'exec: "{argv[0]}": {error.strerror}'
            if isinstance(error, FileNotFoundError):
                what = f'exec: "{argv[0]}": executable file not found in $PATH'
            raise OSError(
                error.errno, f"failed to create containerd task: failed to start container: {what}"
            ) from error
    except OSError as error:
        os.write(error_end, (error.strerror or str(error)).encode())
    finally:
        os._exit(_START_ERROR)


def _build_root(spec: dict) -> None:
    _mount("", "/", "", _MS_REC | _MS_PRIVATE)
    mounts = [(_open_path(mount["source"]), mount) for mount in spec["mounts"]]
    images = [(_open_path(path), path) for path in spec["image_paths"]]
    devices = [(_open_path(f"/dev/{name}"), name) for name in _DEVICES]
    sys_descriptor = _open_path("/sys")
    base = spec["scratch"]
    _mount("tmpfs", base, "tmpfs")
    for name in ("upper", "work", "root"):
        os.mkdir(f"{base}/{name}")
    root = f"{base}/root"
    _mount("overlay", root, "overlay", data=f"lowerdir=/,upperdir={base}/upper,workdir={base}/work")
    os.mkdir(f"{root}/.old")
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], root.encode(), f"{root}/.old".encode()), "pivot_root")
    os.chdir("/")
    # From here on names are the container's; descriptors lead to what they named before.
    _mount("proc", "/proc", "proc")
    for target in ("/run", "/tmp", "/dev"):
        _mount("tmpfs", target, "tmpfs", data="mode=1777" if target == "/tmp" else "mode=755")
    _bind(sys_descriptor, "/sys", is_folder=True, flags=_MS_REC)
    for descriptor, name in devices:
        _bind(descriptor, f"/dev/{name}", is_folder=False)
    for link, to in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{to}", f"/dev/{link}")
    os.mkdir("/dev/pts")
    _mount("devpts", "/dev/pts", "devpts", data="newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", "/dev/ptmx")
    for descriptor, path in images:
        if not os.path.exists(path):
            _bind(descriptor, path, is_folder=os.path.isdir(f"/proc/self/fd/{descriptor}"))
    for descriptor, mount in mounts:
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")
        _bind(descriptor, mount["target"], is_folder=is_folder)
        if mount["read_only"]:
            _mount("", mount["target"], "", _MS_BIND | _MS_REMOUNT | _MS_RDONLY)
    _check(_libc.umount2(b"/.old", _MNT_DETACH), "umount")
    os.rmdir("/.old")


def _open_path(path: str) -> int:
    return os.open(path, os.O_PATH | os.O_CLOEXEC)


def _bind(descriptor: int, target: str, *, is_folder: bool, flags: int = 0) -> None:
    if is_folder:
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(f"/proc/self/fd/{descriptor}", target, "", _MS_BIND | flags)


def _mount(source: str, target: str, kind: str, flags: int = 0, *, data: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or 'bind'} on {target}")


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _write(folder: str, name: str, **values: object) -> None:
    """Whole or not at all: the kubelet may look at any moment."""
    values.setdefault("finished_at", time.time())
    path = os.path.join(folder, name)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(values, file)
    os.rename(f"{path}.new", path)


if __name__ == "__main__":
    main()
