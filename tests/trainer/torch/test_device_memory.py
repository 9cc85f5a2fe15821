"""Is the memory of the devices free? Through stand-ins for the vendors' libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dlrover.trainer.torch.node_check import device_memory
from dlrover.trainer.torch.node_check.device_memory import (
    EXIT_BUSY,
    AclReader,
    DeviceMemory,
    MemoryFindings,
    NvmlReader,
    TorchReader,
    check,
    reader_for,
)

GIB = 2**30


class Readings:
    """Gives one list of devices after the other, the last for ever; time passes only in pauses."""

    def __init__(self, *shares: list[float]) -> None:
        self.shares = list(shares)
        self.now = 0.0

    def read(self) -> list[DeviceMemory]:
        shares = self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]
        return [DeviceMemory(index, round(share * 80 * GIB), 80 * GIB) for index, share in enumerate(shares)]

    def check(self, **options: Any) -> MemoryFindings:
        def pause(seconds: float) -> None:
            self.now += seconds

        return check(self, now=lambda: self.now, pause=pause, **options)


def test_free_devices_are_found_free_at_once() -> None:
    readings = Readings([0.0, 0.29])
    assert readings.check() == MemoryFindings(2, [])
    assert readings.now == 0


def test_a_busy_device_is_named() -> None:
    readings = Readings([0.0, 0.3])
    findings = readings.check(patience=30)
    assert [device.index for device in findings.busy] == [1]
    assert readings.now == 30
    assert findings.sentence(0.3).startswith("Device memory: basic GPU check failed. On device")
    assert "device 1 (30% used)" in findings.sentence(0.3)


def test_memory_of_a_predecessor_that_was_just_killed_is_waited_for() -> None:
    readings = Readings([0.9], [0.9], [0.0])
    assert readings.check(patience=30).busy == []
    assert readings.now == 1.0


def test_the_limit_can_be_chosen() -> None:
    assert Readings([0.5]).check(limit=0.6).busy == []
    assert Readings([0.0]).check(patience=0).busy == []
    assert DeviceMemory(0, 5, 0).used_share == 0, "a device that does not tell its size is not busy"


def test_nvml_without_what_our_own_processes_use() -> None:
    calls: list[str] = []
    processes = [SimpleNamespace(pid=7, usedGpuMemory=30 * GIB), SimpleNamespace(pid=8, usedGpuMemory=None)]
    nvml = SimpleNamespace(
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda device: SimpleNamespace(used=32 * GIB, total=80 * GIB),
        nvmlDeviceGetComputeRunningProcesses=lambda device: processes if device == 0 else [],
    )
    devices = NvmlReader(nvml, lambda pid: True).read()
    assert [device.used_bytes for device in devices] == [2 * GIB, 32 * GIB]
    assert calls == ["init", "shutdown"]


class StandInAcl:
    def __init__(self, code: int = 0) -> None:
        self.calls: list[str] = []
        self.rt = SimpleNamespace(
            get_device_count=lambda: (2, 0),
            set_device=lambda index: self._call(f"set {index}"),
            get_mem_info=lambda kind: (16 * GIB, 64 * GIB, code),
            reset_device=lambda index: self._call(f"reset {index}"),
        )

    def init(self) -> int:
        return self._call("init")

    def finalize(self) -> int:
        return self._call("finalize")

    def _call(self, name: str) -> int:
        self.calls.append(name)
        return 0


def test_acl() -> None:
    acl = StandInAcl()
    assert AclReader(acl).read() == [DeviceMemory(index, 48 * GIB, 64 * GIB) for index in range(2)]
    assert acl.calls == ["init", "set 0", "reset 0", "set 1", "reset 1", "finalize"]
    failing = StandInAcl(code=507033)
    with pytest.raises(OSError, match=r"acl\.rt\.get_mem_info answered 507033"):
        AclReader(failing).read()
    assert failing.calls[-2:] == ["reset 0", "finalize"]


def test_devices_that_only_torch_knows() -> None:
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 1, mem_get_info=lambda index: (60 * GIB, 64 * GIB)
    )
    assert TorchReader(SimpleNamespace(cuda=cuda)).read() == [DeviceMemory(0, 4 * GIB, 64 * GIB)]
    assert TorchReader(SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))).read() == []


def test_what_cannot_be_asked_is_skipped() -> None:
    assert reader_for("mthreads.com/gpu", lambda pid: False) is None
    assert reader_for("ascend-npu", lambda pid: False) is None, "its library is not installed here"


def test_as_a_program_without_devices() -> None:
    command = [sys.executable, "-m", "dlrover.trainer.torch.node_check.device_memory", "--accelerator", "ascend-npu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"num_devices": 0, "busy": []}
    assert "nothing to check" in done.stderr
    done = subprocess.run([*command, "--limit", "30"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "between 0 and 1" in done.stderr


@pytest.mark.parametrize(("used", "code"), [(1, 0), (40, EXIT_BUSY)])
def test_as_a_program_with_a_device(
    used: int, code: int, capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vendor's library is found the way any is: on the path."""
    (tmp_path / "acl.py").write_text(
        "from types import SimpleNamespace\n"
        "def init(): return 0\n"
        "def finalize(): return 0\n"
        "rt = SimpleNamespace(get_device_count=lambda: (1, 0), set_device=lambda i: 0, reset_device=lambda i: 0,\n"
        f"    get_mem_info=lambda kind: (64 - {used}, 64, 0))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acl", raising=False)
    try:
        assert device_memory.main(["--accelerator", "ascend-npu", "--patience", "0"]) == code
    finally:
        sys.modules.pop("acl", None)
    assert json.loads(capsys.readouterr().out)["num_devices"] == 1


def test_our_own_processes_are_known_by_their_ancestors() -> None:
    is_own = device_memory._descends_from(os.getpid())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert is_own(child.pid)
        child.terminate()
    assert is_own(os.getpid())
    assert not is_own(os.getppid())
    assert not device_memory._descends_from(0)(os.getpid())
