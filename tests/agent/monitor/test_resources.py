"""What a node uses, what it may use, what its log says of it, and helpers that never answer."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import textwrap
import threading
from pathlib import Path

import psutil
import pytest

from dlrover.agent.monitor.limits import MemoryShare, ResourceLimits
from dlrover.agent.monitor.probe import Probe, is_remote
from dlrover.agent.monitor.resources import LONGEST, SHORTEST, USUAL, ResourceMonitor, next_period, read_network
from dlrover.agent.workers.failures import Evidence, describe_failure
from dlrover.agent.workers.log_patterns import find_node_error, log_lines, tail_lines
from dlrover.agent.workers.process_tree import Exit
from dlrover.host.processes import descendants as children
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId
from dlrover.protocol.messages.watch import NodeEvent, ProcessSample, ResourceReport, WatchObservation
from dlrover.protocol.units import in_bytes
from tests.agent.lab import start_process, until


class Clocks:
    def __init__(self) -> None:
        self.steady, self.wall = 0.0, 1000.0

    def __call__(self) -> tuple[float, float]:
        return self.steady, self.wall

    def pass_(self, seconds: float, jump: float = 0.0) -> None:
        self.steady += seconds
        self.wall += seconds + jump


def monitor(tmp_path: Path, clocks: Clocks, observed: list[WatchObservation], **changes: object) -> ResourceMonitor:
    values = {
        "workers": dict,
        "paths": [str(tmp_path)],
        "observe": observed.append,
        "who": lambda: (NodeId(3), Incarnation(2)),
        "clocks": clocks,
    }
    return ResourceMonitor(**(values | changes))  # type: ignore[arg-type]


async def test_a_node_tells_what_it_and_each_worker_use(tmp_path: Path) -> None:
    clocks, observed = Clocks(), list[WatchObservation]()
    code = "import os, sys; x = bytearray(50_000_000); print(flush=True); os.read(0, 1)\nfor i in range(3_000_000): pass\nprint(flush=True); os.read(0, 1)"
    worker = start_process(sys.executable, "-c", code, stdin=-1, stdout=-1)
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        await asyncio.to_thread(worker.stdout.readline)
        watching = monitor(tmp_path, clocks, observed, workers=lambda: {worker.pid: 5})
        assert await watching.sample() is None
        worker.stdin.write("x")
        worker.stdin.flush()
        await asyncio.to_thread(worker.stdout.readline)
        clocks.pass_(1.0)
        report = await watching.sample()
    finally:
        worker.kill()
        worker.communicate()
    assert report is not None
    samples = {sample.global_rank: sample for sample in report.workers}
    assert set(samples) == {5, -1}
    assert 50_000_000 < samples[5].memory_bytes < 500_000_000
    assert 0.01 < samples[5].cpu < 100
    assert report.cpu >= samples[5].cpu
    assert 0 < report.cores <= len(os.sched_getaffinity(0))
    assert 0 < report.memory_bytes <= report.memory_limit_bytes
    assert report.memory_limit_bytes == ResourceLimits().memory().limit_bytes
    assert report.disk_free_bytes is not None
    assert report.shm_limit_bytes == psutil.disk_usage("/dev/shm").total
    assert report.clock_jump == 0.0
    clocks.pass_(5.0, jump=-30.0)
    report = await watching.sample()
    assert report is not None
    assert report.clock_jump == pytest.approx(-30.0)
    assert [each.name for each in observed if isinstance(each, NodeEvent)] == ["clock-jump"]


async def test_a_device_that_nobody_can_read_is_told_of_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    for name, is_there in (("nvidiactl", True), ("davinci_manager", False)):
        clocks = Clocks()
        watching = monitor(tmp_path, clocks, [], device_files=[str(tmp_path / name)])
        await watching.sample()
        clocks.pass_(1.0)
        report = await watching.sample()
        assert report is not None
        assert (report.has_devices, report.devices) == (is_there, ())


def report(memory: int = 10, cpu: float = 1.0, **changes: object) -> ResourceReport:
    return ResourceReport(
        node=NodeId(1),
        incarnation=Incarnation(1),
        cpu=cpu,
        cores=4.0,
        memory_bytes=in_bytes(memory),
        memory_limit_bytes=in_bytes(100),
        **changes,
    )  # type: ignore[arg-type]


def test_a_node_is_asked_often_while_memory_runs_out_and_seldom_while_nothing_happens() -> None:
    assert next_period(None, report(), SHORTEST) == USUAL
    assert next_period(report(), report(), USUAL) == 1.5 * USUAL
    assert next_period(report(), report(), LONGEST) == LONGEST
    assert next_period(report(), report(95), LONGEST) == SHORTEST
    assert next_period(report(10), report(30), 10.0) == SHORTEST  # full in 35 s
    assert next_period(report(cpu=0.1), report(cpu=3.9), LONGEST) == USUAL
    assert next_period(report(), report(troubles=("GPU is lost",)), LONGEST) == SHORTEST
    small, large = ((ProcessSample(global_rank=1, memory_bytes=in_bytes(size)),) for size in (900, 925))
    assert next_period(report(workers=small), report(workers=large), LONGEST) == SHORTEST
    assert next_period(report(workers=large), report(workers=small), LONGEST) == LONGEST


def pids_of_children() -> set[tuple[int, int]]:
    return {(process.pid, process.started_at_ticks) for process in children(os.getpid())}


async def until_reaped(before: set[tuple[int, int]]) -> None:
    """And until the event loop has heard so, from a thread in some versions: else it would take the process for a leaked one."""

    def is_so() -> bool:
        is_waited_for = any("waitpid" in thread.name for thread in threading.enumerate())
        return pids_of_children() <= before and not is_waited_for

    await until(is_so)
    await asyncio.sleep(0)


async def test_a_driver_that_does_not_answer_is_told_of_and_not_asked_again(tmp_path: Path) -> None:
    before = pids_of_children()
    count = tmp_path / "asked"
    code = f"import sys, time\nfor line in sys.stdin: open({str(count)!r}, 'a').write('x'); time.sleep(600)"
    probe = Probe((sys.executable, "-c", code), timeout=1.0)
    watching = monitor(tmp_path, Clocks(), [], probe=probe)
    await watching.sample()
    second = await asyncio.wait_for(watching.sample(), 5.0)
    assert second is not None
    assert "did not answer" in second.troubles[0]
    assert len(count.read_text() if count.exists() else "x") == 1
    await until_reaped(before)


async def test_a_probe_tells_of_disks_and_survives_rubbish(tmp_path: Path) -> None:
    before = pids_of_children()
    probe = Probe(timeout=30.0)
    answer = await probe.ask([str(tmp_path), str(tmp_path / "none")])
    assert answer.disk_free_bytes[str(tmp_path)] > 0
    assert any("none" in trouble for trouble in answer.troubles)
    probe.close()
    rubbish = Probe((sys.executable, "-c", "input(); print('rubbish', flush=True); input()"), timeout=30.0)
    assert "cannot be measured" in (await rubbish.ask([])).troubles[0]
    await until_reaped(before)


async def test_a_probe_is_not_deceived_by_modules_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json.py", "logging.py", "tokenize.py"):
        (tmp_path / name).write_text("raise SystemExit('the training script keeps its own module here')")
    monkeypatch.chdir(tmp_path)
    before = pids_of_children()
    probe = Probe(timeout=30.0)
    assert str(tmp_path) in (await probe.ask([str(tmp_path)])).disk_free_bytes
    probe.close()
    await until_reaped(before)


def test_remote_file_systems_are_known_by_their_mounts(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda / ext4 rw 0 0\nhost:/x /data nfs4 rw 0 0\nx /data/fast ext4 rw 0 0\n")
    assert is_remote("/data/a", str(mounts))
    assert not is_remote("/data/fast/a", str(mounts))
    assert not is_remote("/database", str(mounts))


def put(root: Path, **files: str) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)


def test_limits_of_version_2_are_those_of_the_narrowest_above_us(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.write_text("0::/pod/box\n")
    put(tmp_path / "fs/pod", memory__max="1000000\n", memory__current="600000\n", memory__stat="inactive_file 100000\n")
    put(tmp_path / "fs/pod/box", memory__max="max\n", memory__current="5\n", cpu__max="50000 100000\n")
    limits = ResourceLimits(str(group), str(tmp_path / "fs"))
    assert limits.memory() == MemoryShare(500000, 1000000)
    assert limits.cores() == 0.5


def test_limits_of_version_1_are_found_too(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.write_text("0::/\n5:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n")
    put(
        tmp_path / "fs/memory",  # as a container sees it: its own at the top
        memory__limit_in_bytes="2000000\n",
        memory__usage_in_bytes="900000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 400000\n",
    )
    put(tmp_path / "fs/cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    limits = ResourceLimits(str(group), str(tmp_path / "fs"))
    assert limits.memory() == MemoryShare(500000, 2000000)
    assert limits.cores() == len(os.sched_getaffinity(0))


def test_without_any_limit_the_machine_is_it(tmp_path: Path) -> None:
    used, limit = ResourceLimits(str(tmp_path / "none"), str(tmp_path)).memory()
    assert used is None
    assert limit > 1 << 28


def test_the_loopback_is_no_network(tmp_path: Path) -> None:
    table = tmp_path / "dev"
    table.write_text("head\nhead\n  lo: 9 9 0 0 0 0 0 0 9 9\neth0: 100 2 0 0 0 0 0 0 30 4\n")
    assert read_network(str(table)) == (100, 30)


def test_the_last_lines_are_whole_in_order_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number} {'x' * (number % 300)}\n" for number in range(20_000)))
    lines = tail_lines(str(file), 5000)
    assert [int(line.split()[1]) for line in lines] == list(range(15_000, 20_000))
    file.write_bytes(b"\xff\x00 binary\nlast without end")
    assert tail_lines(str(file), 5) == ["\\xff\x00 binary", "last without end"]
    file.write_bytes(b"y" * 1_000_000)
    assert len(tail_lines(str(file), 5, max_bytes=1000)[0]) == 1000
    assert tail_lines(str(tmp_path / "none"), 5) == tail_lines(str(tmp_path), 5) == []


def test_a_log_that_names_a_broken_node_says_so(tmp_path: Path) -> None:
    texts = ("error code is 507035", "my own words")
    assert find_node_error(["all well", "x my own words y"], texts) == "x my own words y"
    assert find_node_error(["FAILURE_NODE_ERRORS=#my own words#"], texts) == ""
    assert find_node_error(["NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus."])
    assert find_node_error(["NVRM: Xid (PCI:0000:18:00): 31, pid=1, MMU fault"]) == ""  # the program's own fault
    assert find_node_error(["NCCL WARN remote process exited"]) == ""
    log = tmp_path / "log"
    log.write_text("my own words\nDLRover agent started with: x\nall well\n")
    assert find_node_error(log_lines("", str(log)), texts) == ""  # of a former run
    ended = Exit(1, 1, None, False, 0.0)
    log.write_text("and then my own words\n")
    evidence = Evidence(
        global_rank=0, local_rank=0, exit=ended, exited_at=Micros(1), training_log=str(log), node_errors=texts
    )
    assert describe_failure(evidence).node_error == "and then my own words"
    tail = textwrap.dedent("Traceback (most recent call last):\nValueError: GPU is lost\n")
    built_in = Evidence(global_rank=0, local_rank=0, exit=ended, exited_at=Micros(1), log_tail=tail)
    assert describe_failure(built_in).node_error == "ValueError: GPU is lost"


async def test_a_shortage_of_descriptors_is_told_and_passes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else nobody would ever hear of this node's memory again."""
    clocks = Clocks()
    watching = monitor(tmp_path, clocks, [])
    assert await watching.sample() is None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        found = [await watching.sample() for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [None, None]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "The resources of this node cannot be measured now"
    ]
    assert await watching.sample() is not None
