"""
What this node uses: processors, memory, disk, network, shared memory and devices, of the job as a whole and of each worker.

Read from /proc and the cgroup, which never wait; what could wait is asked by `probe`. The period adapts: often while memory runs out,
seldom while nothing changes. Also notices when the wall clock was moved.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from dlrover.agent.monitor.limits import ResourceLimits
from dlrover.agent.monitor.probe import DEVICE_FILES, Probe, ProbeAnswer, is_remote, needs_probe
from dlrover.host.processes import descendants, look_up
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import MAX_TEXT, NodeEvent, ProcessSample, ResourceReport, WatchObservation
from dlrover.protocol.units import MIB

log = logging.getLogger("dlrover.agent")

SHORTEST, USUAL, LONGEST = 2.0, 10.0, 30.0
"""Seconds between two reports."""
CLOCK_JUMP = 0.5
"""Seconds. Slewing, as time services do it, moves the clock by less than a hundredth of that in a period."""
_GROWTH_BYTES, _GROWTH = 20 * MIB, 0.02
"""Of a worker between two reports: more is worth a second look soon."""
_MAX_WORKERS = 256
_MAX_TROUBLES = 16


class Use(NamedTuple):
    """Of one process, since its start."""

    started_at_ticks: int
    cpu: float
    resident_bytes: int
    read_bytes: int
    written_bytes: int


class _Counters(NamedTuple):
    at: float
    processes: dict[int, Use]
    parents: dict[int, int]
    network_in: int
    network_out: int
    clock_offset: float


class ResourceMonitor:
    def __init__(
        self,
        *,
        workers: Callable[[], Mapping[int, int]],
        paths: Sequence[str],
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        shm: str = "/dev/shm",
        probe: Probe | None = None,
        limits: ResourceLimits | None = None,
        device_files: Sequence[str] = DEVICE_FILES,
        clocks: Callable[[], tuple[float, float]] = lambda: (time.monotonic(), time.time()),
    ) -> None:
        """`workers`: pid to global rank. `paths`: whose disks may fill. `clocks`: monotonic and wall."""
        self._workers = workers
        known = dict.fromkeys(os.path.abspath(path) for path in paths if path)
        self._remote = [path for path in known if is_remote(path)]
        self._local = [path for path in known if path not in self._remote]
        self._observe, self._who = observe, who
        self._shm = shm
        self._probe = probe or (Probe() if needs_probe(self._remote) else None)
        self._limits = limits or ResourceLimits()
        self._has_devices = any(map(os.path.exists, device_files))
        self._clocks = clocks
        self._before: _Counters | None = None
        self._told: ResourceReport | None = None
        self._trouble = ""

    async def run(self) -> None:
        """Never returns; cancel it."""
        period = SHORTEST  # the first rates need two readings
        try:
            while True:
                report = await self.sample()
                if report is not None and report.node >= 0:
                    self._observe(report)
                    period = next_period(self._told, report, period)
                    self._told = report
                await asyncio.sleep(period)
        finally:
            if self._probe is not None:
                self._probe.close()

    async def sample(self) -> ResourceReport | None:
        """None the first time: there is nothing to compare with. Or it cannot be known now."""
        answer = ProbeAnswer() if self._probe is None else await self._probe.ask(self._remote)
        node, incarnation = self._who()
        try:
            before, now = self._before, self._read()
            self._before = now
            if before is None:
                return None
            report = self._report(before, now, answer, node, incarnation)
        except OSError as error:  # no descriptor to be had, perhaps
            trouble = error.strerror or str(error)
            if trouble != self._trouble:
                log.warning("The resources of this node cannot be measured now: %s", trouble)
            self._trouble = trouble
            return None
        self._trouble = ""
        if report.clock_jump and node >= 0:
            text = f"the wall clock was changed by {report.clock_jump:+.1f} s"
            log.warning("%s", text)
            self._observe(NodeEvent(node=node, incarnation=incarnation, level="warn", name="clock-jump", text=text))
        return report

    def _read(self) -> _Counters:
        own_pid = os.getpid()
        parents = {process.pid: process.parent_pid for process in descendants(own_pid)}
        processes = {pid: use for pid in (own_pid, *parents) if (use := read_use(pid)) is not None}
        received, sent = read_network()
        steady, wall = self._clocks()
        return _Counters(steady, processes, parents, received, sent, wall - steady)

    def _report(
        self, before: _Counters, now: _Counters, answer: ProbeAnswer, node: NodeId, incarnation: Incarnation
    ) -> ResourceReport:
        elapsed = max(now.at - before.at, 1e-3)
        deltas = {pid: _since(before.processes.get(pid), use) for pid, use in now.processes.items()}
        memory = self._limits.memory()
        resident = sum(use.resident_bytes for use in now.processes.values())
        shm_used, shm_size = _disk_use(self._shm)
        free = [free for path in self._local if (free := _disk_free(path)) is not None]
        free += answer.disk_free_bytes.values()
        jump = now.clock_offset - before.clock_offset
        return ResourceReport(
            node=node,
            incarnation=incarnation,
            cpu=sum(delta.cpu for delta in deltas.values()) / elapsed,
            cores=self._limits.cores(),
            memory_bytes=resident if memory.used_bytes is None else memory.used_bytes,
            memory_limit_bytes=memory.limit_bytes,
            shm_bytes=shm_used,
            shm_limit_bytes=shm_size,
            disk_free_bytes=min(free, default=None),
            disk_read_bytes_per_second=sum(delta.read_bytes for delta in deltas.values()) / elapsed,
            disk_write_bytes_per_second=sum(delta.written_bytes for delta in deltas.values()) / elapsed,
            network_in_bytes_per_second=max(0, now.network_in - before.network_in) / elapsed,
            network_out_bytes_per_second=max(0, now.network_out - before.network_out) / elapsed,
            workers=self._samples(now, deltas, elapsed),
            devices=answer.devices,
            has_devices=self._has_devices or bool(answer.devices),
            troubles=tuple(text[:MAX_TEXT] for text in answer.troubles[:_MAX_TROUBLES]),
            clock_jump=jump if abs(jump) > CLOCK_JUMP else 0.0,
        )

    def _samples(self, now: _Counters, deltas: Mapping[int, Use], elapsed: float) -> tuple[ProcessSample, ...]:
        ranks = dict(list(self._workers().items())[:_MAX_WORKERS])
        trees: dict[int, list[int]] = {rank: [] for rank in (*ranks.values(), -1)}
        for pid in deltas:
            above = pid
            while above in now.parents and above not in ranks:
                above = now.parents[above]
            trees[ranks.get(above, -1)].append(pid)
        return tuple(_sample(rank, pids, now, deltas, elapsed) for rank, pids in trees.items() if pids)


def next_period(before: ResourceReport | None, now: ResourceReport, period: float) -> float:
    """Seconds until the next report."""
    limit = now.memory_limit_bytes or float("inf")
    if now.memory_bytes > 0.9 * limit or now.troubles != (() if before is None else before.troubles):
        return SHORTEST
    if before is None:
        return USUAL
    if _has_grown(before.workers, now.workers):
        return SHORTEST  # once, or does it leak?
    growth = (now.memory_bytes - before.memory_bytes) / period
    if growth > 0 and (limit - now.memory_bytes) / growth < 120:
        return SHORTEST  # full within two minutes
    is_moving = abs(now.memory_bytes - before.memory_bytes) > 0.02 * limit or abs(now.cpu - before.cpu) > 0.25 * max(
        now.cores, 1.0
    )
    return USUAL if is_moving else min(max(period, USUAL) * 1.5, LONGEST)


def _has_grown(before: Sequence[ProcessSample], now: Sequence[ProcessSample]) -> bool:
    """Some worker, by more than the noise."""
    former = {sample.global_rank: sample.memory_bytes for sample in before}
    grown = ((sample.memory_bytes, former.get(sample.global_rank, sample.memory_bytes)) for sample in now)
    return any(after - then > max(_GROWTH_BYTES, _GROWTH * then) for after, then in grown)


def read_use(pid: int) -> Use | None:
    """None: it is gone."""
    process = look_up(pid)
    if process is None:
        return None
    read_bytes = written_bytes = 0
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            for row in file:
                name, _, value = row.partition(b": ")
                if name == b"read_bytes":
                    read_bytes = int(value)
                elif name == b"write_bytes":
                    written_bytes = int(value)
    except OSError:
        pass  # of another user by now
    return Use(
        started_at_ticks=process.started_at_ticks,
        cpu=process.cpu_seconds,
        resident_bytes=process.resident_bytes,
        read_bytes=read_bytes,
        written_bytes=written_bytes,
    )


def read_network(path: str = "/proc/net/dev") -> tuple[int, int]:
    """Bytes in and out over all interfaces but the loopback."""
    received = sent = 0
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            rows = file.read().splitlines()[2:]
    except OSError:
        return 0, 0
    for row in rows:
        name, _, counts = row.partition(":")
        words = counts.split()
        if name.strip() != "lo" and len(words) >= 9:
            received += int(words[0])
            sent += int(words[8])
    return received, sent


def _since(before: Use | None, now: Use) -> Use:
    if before is None or before.started_at_ticks != now.started_at_ticks:
        return now  # began in between: all of it
    return now._replace(
        cpu=max(0.0, now.cpu - before.cpu),
        read_bytes=max(0, now.read_bytes - before.read_bytes),
        written_bytes=max(0, now.written_bytes - before.written_bytes),
    )


def _sample(rank: int, pids: Sequence[int], now: _Counters, deltas: Mapping[int, Use], elapsed: float) -> ProcessSample:
    return ProcessSample(
        global_rank=rank,
        cpu=sum(deltas[pid].cpu for pid in pids) / elapsed,
        memory_bytes=sum(now.processes[pid].resident_bytes for pid in pids),
        processes=len(pids),
    )


def _disk_free(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _disk_use(path: str) -> tuple[int, int]:
    try:
        status = os.statvfs(path)
    except OSError:
        return 0, 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize, status.f_blocks * status.f_frsize
