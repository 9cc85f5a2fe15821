"""`dlrover-run --check-env`: what is there, what is missing, and what it would be needed for."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import NamedTuple

from dlrover.snapshot.copy.copying import Copier


class EnvFinding(NamedTuple):
    name: str
    is_there: bool
    value: str
    needed_for: str
    is_essential: bool = False


def print_table() -> int:
    """0 if the essentials are there, else 1."""
    findings = list(look())
    rows = [("", "what", "found", "needed for")]
    for finding in findings:
        mark = "ok" if finding.is_there else ("MISSING" if finding.is_essential else "-")
        rows.append((mark, finding.name, finding.value, finding.needed_for))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    missing = [finding.name for finding in findings if finding.is_essential and not finding.is_there]
    if missing:
        print(f"\nMissing for any job: {', '.join(missing)}.")
        return 1
    return 0


def look() -> Iterator[EnvFinding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield EnvFinding(
        "python", sys.version_info >= (3, 11), f"{version} ({sys.executable})", "every job (3.11 or newer)", True
    )
    yield EnvFinding("linux kernel", _is_kernel_enough(), platform.release(), "every job (5.4 or newer)", True)
    has_pidfd = _works(lambda: os.close(os.pidfd_open(os.getpid())))
    yield EnvFinding(
        "pidfd", has_pidfd, "yes" if has_pidfd else "no", "noticing ended workers at once (otherwise by SIGCHLD)"
    )
    for name, needed_for in (("msgspec", "messages"), ("grpcio", "master and agent")):
        yield _package(name, needed_for, is_essential=True)
    yield _package("torch", "training with PyTorch, warm workers")
    yield _package("psutil", "the node check: which device memory is in use", is_essential=True)
    yield _package("numpy", "most training scripts")
    yield from _shared_memory()
    yield _streaming_copy()
    yield _cgroup()
    yield _devices()
    yield _package("aiohttp", "jobs on Kubernetes: master and operator (extra: k8s)")
    yield _package("PyYAML", "Kubernetes from outside a cluster: kubeconfig (extra: k8s)")
    yield _package("ray", "jobs on Ray (extra: ray)")
    py_spy = shutil.which("py-spy")
    yield EnvFinding("py-spy", py_spy is not None, py_spy or "", "native stacks of hanging workers")


def _package(name: str, needed_for: str, *, is_essential: bool = False) -> EnvFinding:
    """By its metadata: importing torch to learn its version would take seconds."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return EnvFinding(name, False, "", needed_for, is_essential)
    module = {"grpcio": "grpc", "PyYAML": "yaml"}.get(name, name)
    is_there = importlib.util.find_spec(module) is not None
    return EnvFinding(
        name, is_there, version if is_there else f"{version}, but not importable", needed_for, is_essential
    )


def _streaming_copy() -> EnvFinding:
    copier = Copier(1)
    is_there = copier.is_streaming
    copier.close()
    return EnvFinding("streaming copy", is_there, "yes" if is_there else "no", "saves to memory at full speed")


def _shared_memory() -> Iterator[EnvFinding]:
    try:
        usage = os.statvfs("/dev/shm")
    except OSError:
        yield EnvFinding("/dev/shm", False, "", "snapshots in memory, DataLoader workers")
        return
    free, total = (blocks * usage.f_frsize / 2**30 for blocks in (usage.f_bavail, usage.f_blocks))
    yield EnvFinding("/dev/shm", True, f"{free:.1f} of {total:.1f} GiB free", "snapshots in memory, DataLoader workers")


def _cgroup() -> EnvFinding:
    needed_for = "recognising workers that were killed for lack of memory"
    for version, paths in (
        ("v2", ("/sys/fs/cgroup/memory.max",)),
        ("v1", ("/sys/fs/cgroup/memory/memory.limit_in_bytes",)),
    ):
        is_version = os.path.exists("/sys/fs/cgroup/cgroup.controllers") == (version == "v2")
        for path in paths:
            text = _read(path)
            if is_version and text:
                is_limited = text != "max" and int(text) < 1 << 60
                limit = f"limit {int(text) / 2**30:.1f} GiB" if is_limited else "no memory limit"
                return EnvFinding("cgroup", True, f"{version}, {limit}", needed_for)
    if os.path.isdir("/sys/fs/cgroup"):
        return EnvFinding("cgroup", True, "mounted, no memory limit found", needed_for)
    return EnvFinding("cgroup", False, "", needed_for)


def _devices() -> EnvFinding:
    count = sum(1 for name in _list("/dev") if name.startswith("nvidia") and name[6:].isdigit())
    if count == 0:
        count = len(_list("/dev/dri")) and sum(1 for name in _list("/dev/dri") if name.startswith("render"))
    return EnvFinding("accelerators", count > 0, f"{count} device files" if count else "none", "training on devices")


def _is_kernel_enough() -> bool:
    parts = platform.release().split(".")
    try:
        return (int(parts[0]), int(parts[1].split("-")[0])) >= (5, 4)
    except (ValueError, IndexError):
        return False


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except (OSError, AttributeError):
        return False
    return True


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _list(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
