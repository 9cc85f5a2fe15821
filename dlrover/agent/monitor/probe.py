"""
Asks what may never answer: device drivers, and disks behind a network. In a process of its own.

A driver call that does not return keeps its process in the kernel, where no signal reaches it; a thread of the agent that was caught so
would keep the agent from ending. So `Probe` starts `python -m dlrover.agent.monitor.probe`, asks it over a pipe and waits for each answer with
a deadline. A process that misses it is left behind, killed if it can be, and not asked again: that it does not answer is itself the news.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.protocol.messages.watch import MAX_TEXT, DeviceSample

_MAX_DEVICES = 64
_MAX_ANSWER = 1 << 18
_READABLE = ("/dev/nvidiactl", "/dev/davinci_manager")
DEVICE_FILES = (*_READABLE, "/dev/kfd", "/dev/dxg", "/dev/accel", "/dev/dri/renderD128")
"""Of accelerators, also of those that nothing here can read."""
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gluster", "gpfs", "beegfs", "9p", "afs")


class ProbeAnswer(Struct, frozen=True, kw_only=True):
    devices: tuple[DeviceSample, ...] = ()
    disk_free_bytes: dict[str, int] = {}
    troubles: tuple[str, ...] = ()


def needs_probe(paths: Sequence[str]) -> bool:
    return any(map(os.path.exists, _READABLE)) or any(map(is_remote, paths))


def is_remote(path: str, mounts: str = "/proc/self/mounts") -> bool:
    """Whether asking the file system of this path could wait for another machine."""
    best, kind = "", ""
    with open(mounts, encoding="utf-8", errors="replace") as file:
        for line in file:
            words = line.split(" ")
            where = words[1].replace("\\040", " ")
            if len(where) >= len(best) and (path == where or path.startswith(where.rstrip("/") + "/")):
                best, kind = where, words[2]
    return kind.startswith(_NETWORK_FILE_SYSTEMS)


class Probe:
    """The agent's end. `ask` never takes longer than its deadline."""

    def __init__(self, command: Sequence[str] = (), *, timeout: float = 10.0) -> None:
        self._command = tuple(command) or (sys.executable, "-P", "-m", "dlrover.agent.monitor.probe")
        self._timeout = timeout
        self._transport: asyncio.SubprocessTransport | None = None
        self._lines = _Lines()
        self.trouble = ""
        """Why it is not asked any more; empty while it is."""

    async def ask(self, paths: Sequence[str]) -> ProbeAnswer:
        if self.trouble:
            return ProbeAnswer(troubles=(self.trouble,))
        try:
            async with asyncio.timeout(self._timeout):
                return await self._ask(paths)
        except TimeoutError:
            self._give_up(
                f"a driver or a disk did not answer within {self._timeout:g} s; devices are not measured any more"
            )
        except (OSError, msgspec.MsgspecError) as error:
            self._give_up(f"devices cannot be measured: {type(error).__name__}: {error}")
        return ProbeAnswer(troubles=(self.trouble,))

    async def _ask(self, paths: Sequence[str]) -> ProbeAnswer:
        if self._transport is None:
            loop = asyncio.get_running_loop()
            self._lines = _Lines()
            self._transport, _ = await loop.subprocess_exec(
                lambda: self._lines, *self._command, stderr=asyncio.subprocess.DEVNULL
            )
        stdin: Any = self._transport.get_pipe_transport(0)
        stdin.write(json.dumps(list(paths)).encode() + b"\n")
        return msgspec.json.decode(await self._lines.next(), type=ProbeAnswer)

    def _give_up(self, trouble: str) -> None:
        self.trouble = trouble[:MAX_TEXT]
        self.close()

    def close(self) -> None:
        """Kills it, and does not wait for its end: it may be beyond the reach of signals."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None


class _Lines(asyncio.SubprocessProtocol):
    """The answers, one line each; at most one is awaited."""

    def __init__(self) -> None:
        self._buffer = b""
        self._is_over = False
        self._news = asyncio.Event()

    async def next(self) -> bytes:
        """Raises OSError when there will be none."""
        while b"\n" not in self._buffer:
            if self._is_over or len(self._buffer) > _MAX_ANSWER:
                raise OSError("the process that measures them has ended or sent too much")
            self._news.clear()
            await self._news.wait()
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._buffer += data
        self._news.set()

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._is_over = True
        self._news.set()


# In the other process.


def read_nvidia() -> tuple[list[DeviceSample], list[str]]:
    try:
        import pynvml as nvml  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return [], []
    devices, troubles = [], []
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        return [], [f"NVML: {error}"]
    for index in range(min(count, _MAX_DEVICES)):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            devices.append(
                DeviceSample(
                    index=index,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    used_memory_bytes=memory.used,
                    total_memory_bytes=memory.total,
                    utilization=float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
                    temperature=float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
                )
            )
        except nvml.NVMLError as error:
            # "GPU is lost" among them: the device is there, and sick.
            devices.append(DeviceSample(index=index, health=str(error)))
            troubles.append(f"GPU {index}: {error}")
    return devices, troubles


def read_ascend() -> tuple[list[DeviceSample], list[str]]:
    """Through the vendor's Python library, if it is installed. Not tried on a device yet."""
    try:
        import acl  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError:
        return [], []
    devices, troubles = [], []
    acl.init()
    count, code = acl.rt.get_device_count()
    if code:
        return [], [f"ACL: devices cannot be counted (code {code})"]
    for index in range(min(count, _MAX_DEVICES)):
        code = acl.rt.set_device(index)
        free, total, second = acl.rt.get_mem_info(1) if not code else (0, 0, code)
        if second:
            devices.append(DeviceSample(index=index, health=f"ACL error {second}"))
            troubles.append(f"NPU {index}: ACL error {second}")
            continue
        use: Any = acl.rt.get_device_utilization_rate(index) if hasattr(acl.rt, "get_device_utilization_rate") else None
        utilization = float(use[0].get("cube_utilization", 0.0)) if use else 0.0
        devices.append(
            DeviceSample(
                index=index,
                name="npu",
                used_memory_bytes=total - free,
                total_memory_bytes=total,
                utilization=utilization,
            )
        )
    return devices, troubles


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _answer(paths: Sequence[str], readers: Sequence[Callable[[], tuple[list[DeviceSample], list[str]]]]) -> ProbeAnswer:
    devices: list[DeviceSample] = []
    troubles: list[str] = []
    for reader in readers:
        found, problems = reader()
        devices += found
        troubles += problems
    free = {}
    for path in paths:
        try:
            status = os.statvfs(path)
        except OSError as error:
            troubles.append(f"{path}: {error.strerror}")
        else:
            free[path] = status.f_bavail * status.f_frsize
    return ProbeAnswer(devices=tuple(devices), disk_free_bytes=free, troubles=tuple(troubles))


def main() -> None:
    from dlrover.host.lifeline import follow_parent

    if not follow_parent(signal.SIGKILL):
        return
    for line in sys.stdin.buffer:
        answer = _answer(json.loads(line), (read_nvidia, read_ascend))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
