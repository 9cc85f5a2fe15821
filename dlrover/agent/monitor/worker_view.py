"""
Where the agent looks at a worker: its progress page, the memory its stacks are dumped into, and what the kernel says of it.

Everything here works on a worker that is stopped, stuck or dead. The one thing that needs its help is the dump of its Python stacks,
and that it gave none is told, too.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from dlrover.agent.monitor.links import Links, read_links
from dlrover.host.processes import RunningProcess, descendants, look_up
from dlrover.host.signals import send_signal
from dlrover.protocol.messages.watch import (
    MAX_FRAMES,
    MAX_TEXT,
    MAX_THREADS,
    Collective,
    ThreadStack,
    WorkerDump,
    WorkerProgress,
)
from dlrover.protocol.progress_page import ProgressPage, Reading

MAX_DUMP_BYTES = 1 << 20
MAX_CHILDREN = 32
MAX_RECORDED = 16
MAX_KERNEL_FRAMES = 32
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_DEAF_STATES = "TtZXx"
"""A process in one of these takes no signal now; one that waited until it is continued would come at a bad moment."""


class Facts(NamedTuple):
    """Of one process, from /proc."""

    state: str
    wait_channel: str = ""
    kernel_stack: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    io_bytes: int = 0
    major_faults: int = 0
    switches: int = 0


class WatchedWorker:
    """Of one worker, from before its fork until its group has ended."""

    def __init__(self, *, local_rank: int, global_rank: int) -> None:
        self.local_rank = local_rank
        self.global_rank = global_rank
        self.pid = 0
        self.page = ProgressPage()
        self._dump = os.memfd_create("dlrover-stacks", os.MFD_CLOEXEC)
        self._record = os.memfd_create("dlrover-collectives", os.MFD_CLOEXEC)
        self._asked_by, self._asks = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._asks, False)  # nobody may listen; the descriptor of the worker's end stays as it is
        self._dump_signal = 0
        """The last that it was asked with; 0: what it blocks tells nothing of its dump."""

    def environment(self) -> dict[str, str]:
        return {
            "DLROVER_PROGRESS_PAGE": self.page.path,
            "DLROVER_DUMP_FILE": f"/proc/{os.getpid()}/fd/{self._dump}",
            "DLROVER_RECORDER_FILE": f"/proc/{os.getpid()}/fd/{self._record}",
            "DLROVER_RECORDER_PIPE": f"/proc/{os.getpid()}/fd/{self._asked_by}",
        }

    def read(self) -> Reading:
        return self.page.read(time.monotonic_ns())

    def progress(self, *, is_stalled: bool = False, told_step: int | None = None) -> WorkerProgress:
        """`told_step`: from elsewhere, if the page has none."""
        now_ns = time.monotonic_ns()
        reading = self.page.read(now_ns)
        if not reading.pid:
            return WorkerProgress(
                local_rank=self.local_rank,
                global_rank=self.global_rank,
                pid=self.pid,
                step=told_step,
                has_hooks=False,
            )
        is_counting_anew = reading.reach.is_counting_anew
        return WorkerProgress(
            local_rank=self.local_rank,
            global_rank=self.global_rank,
            pid=self.pid,
            step=told_step if reading.step is None else reading.step,
            num_steps=reading.num_steps,
            is_step_comparable=reading.step is None or (reading.is_step_named and not is_counting_anew),
            model_step=reading.model_step,
            # A script that counts anew may well have restored its model in ways that nobody sees.
            model_start=None if is_counting_anew and not reading.model_start else reading.model_start,
            num_plain_steps=reading.num_plain_steps,
            plain_seconds=reading.plain_ns / 1e9,
            num_timed_steps=reading.num_timed_steps,
            timed_seconds=reading.timed_ns / 1e9,
            shape=reading.shape,
            phase=reading.phase,
            phase_seconds=reading.seconds_in_phase(now_ns),
            seconds={phase: ns / 1e9 for phase, ns in reading.phase_ns.items() if ns},
            has_hooks=reading.has_hooks,
            step_seconds=reading.step_seconds,
            collective=reading.collective,
            metrics=reading.metrics,
            is_stalled=is_stalled,
            digest=reading.digest,
            digest_step=reading.digest_step,
        )

    def ask_for_stacks(self) -> bool:
        """Whether the worker was asked: only one that listens, and whose script has not taken the signal for itself."""
        process = look_up(self.pid) if self.pid else None
        number = self.read().dump_signal
        if process is None or process.state in _DEAF_STATES or not number:
            return False
        masks = _signals(self.pid)
        if number not in masks.get("SigCgt", ()):
            return False  # its default is to kill
        self._dump_signal = 0 if number in masks["SigBlk"] else number
        os.ftruncate(self._dump, 0)
        return send_signal(process, number)

    def is_dumping(self) -> bool:
        """
        Whether the worker has yet to write its stacks, or the rest of them: it may not be scheduled for a while in the middle of it. The signal
        waits for it, and while its handler runs the kernel blocks it.
        """
        masks = _signals(self.pid) if self._dump_signal else {}
        return any(self._dump_signal in masks.get(name, ()) for name in ("SigPnd", "ShdPnd", "SigBlk"))

    def ask_for_collectives(self) -> bool:
        """Whether a thread of the worker was asked for torch's record; it answers if it gets to run."""
        process = look_up(self.pid) if self.pid else None
        if process is None or process.state in _DEAF_STATES or not self.read().has_recorder:
            return False
        os.ftruncate(self._record, 0)
        try:
            return os.write(self._asks, b"?") == 1
        except BlockingIOError:
            return False  # it has not answered thousands of questions

    @property
    def is_stopped(self) -> bool:
        try:
            process = look_up(self.pid) if self.pid else None
        except OSError:
            return False  # no descriptor to be had: who stands still is told of in any case
        return process is not None and process.state == "T"

    def num_dumped(self) -> int:
        return os.fstat(self._dump).st_size

    def has_recorded(self) -> bool:
        size = os.fstat(self._record).st_size
        return size > 0 and os.pread(self._record, 1, size - 1) == b"\n"

    def recorded(self) -> tuple[Collective, ...]:
        raw = os.pread(self._record, MAX_DUMP_BYTES, 0).splitlines()
        try:
            found = msgspec.json.decode(raw[-1], type=list[Collective]) if raw else []
        except msgspec.MsgspecError:
            return ()
        return tuple(found[-MAX_RECORDED:])

    def stacks(self) -> tuple[ThreadStack, ...]:
        raw = os.pread(self._dump, MAX_DUMP_BYTES, 0)
        return parse_stacks(raw.decode("utf-8", "replace"), self.read().main_thread)

    def facts(self) -> Facts:
        """What it used includes its children: a worker whose data loader works is not standing still."""
        if not self.pid:
            return Facts("X")
        own = read_facts(self.pid)
        children = [read_facts(child.pid) for child in descendants(self.pid)]
        return own._replace(
            cpu_seconds=own.cpu_seconds + sum(child.cpu_seconds for child in children),
            io_bytes=own.io_bytes + sum(child.io_bytes for child in children),
            major_faults=own.major_faults + sum(child.major_faults for child in children),
        )

    def dump(
        self,
        facts: Facts,
        threads: Sequence[ThreadStack],
        *,
        is_stalled: bool,
        native: Sequence[str] = (),
        read: Sequence[str] = (),
        recorded: Sequence[Collective] = (),
    ) -> WorkerDump:
        """`read`: frames of its main thread that were got without its help, in case it gave none."""
        links = read_links(self.pid) if self.pid else Links()
        source = "faulthandler" if threads else "py-spy" if read else "none"
        if read and not threads:
            threads = (ThreadStack(name="main", frames=tuple(read), is_main=True),)
        return WorkerDump(
            local_rank=self.local_rank,
            global_rank=self.global_rank,
            pid=self.pid,
            state=facts.state,
            wait_channel=facts.wait_channel,
            kernel_stack=facts.kernel_stack,
            cpu_seconds=facts.cpu_seconds,
            io_bytes=facts.io_bytes,
            major_faults=facts.major_faults,
            switches=facts.switches,
            threads=tuple(threads),
            native=tuple(native),
            recorded=tuple(recorded),
            progress=self.progress(is_stalled=is_stalled),
            data_cursor=self.read().cursor,
            children=describe_children(self.pid),
            source=source,
            addresses=links.addresses,
            unanswered=links.unanswered,
        )

    def close(self) -> None:
        self.page.close()
        for descriptor in (self._dump, self._record, self._asked_by, self._asks):
            os.close(descriptor)


def parse_stacks(text: str, main_thread: int) -> tuple[ThreadStack, ...]:
    """What `faulthandler` wrote. The main thread comes first and is never left out; half a line at the end is."""
    found: list[tuple[str, bool, list[str]]] = []
    for line in text.splitlines():
        if heading := _THREAD.match(line):
            identity = int(heading[2], 16)
            name = heading[3] or ("main" if identity == main_thread else f"0x{identity:x}")
            found.append((name, identity == main_thread, []))
        elif found and (frame := _FRAME.match(line)):
            frames = found[-1][2]
            if len(frames) < MAX_FRAMES:
                frames.append(f"{frame[1]}:{frame[2]} {frame[3]}"[:MAX_TEXT])
    found.sort(key=lambda each: not each[1])
    return tuple(
        ThreadStack(name=name[:MAX_TEXT], frames=tuple(frames), is_main=is_main)
        for name, is_main, frames in found[:MAX_THREADS]
    )


def read_facts(pid: int) -> Facts:
    """State `X` for a process that is gone."""
    process = look_up(pid)
    if process is None:
        return Facts("X")
    io = dict(line.split(": ", 1) for line in _read(f"/proc/{pid}/io").splitlines() if ": " in line)
    return Facts(
        state=process.state,
        wait_channel=_wait_channel(pid),
        kernel_stack=tuple(_read(f"/proc/{pid}/stack").splitlines()[:MAX_KERNEL_FRAMES]),
        cpu_seconds=process.cpu_seconds,
        io_bytes=int(io.get("rchar", "0")) + int(io.get("wchar", "0")),
        major_faults=process.major_faults,
        switches=_switches(pid),
    )


def describe_children(pid: int) -> tuple[str, ...]:
    """A line for each process below the worker."""
    if not pid:
        return ()
    return tuple(map(_describe, descendants(pid)[:MAX_CHILDREN]))


def _describe(process: RunningProcess) -> str:
    facts = read_facts(process.pid)
    name = _read(f"/proc/{process.pid}/comm").strip()
    return f"{process.pid} {facts.state} {facts.wait_channel or '-'} cpu={facts.cpu_seconds:.2f} {name}"[:MAX_TEXT]


def _switches(pid: int) -> int:
    """Of the main thread, voluntary ones."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("voluntary_ctxt_switches:"):
            return int(line.split()[1])
    return 0


def _wait_channel(pid: int) -> str:
    channel = _read(f"/proc/{pid}/wchan").strip()
    return "" if channel == "0" else channel[:MAX_TEXT]


def _signals(pid: int) -> dict[str, frozenset[int]]:
    """By what the kernel calls them: those that wait for the main thread (SigPnd) or any (ShdPnd), that it blocks, that are handled."""
    masks = {}
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, text = line.partition(":")
        if name in ("SigPnd", "ShdPnd", "SigBlk", "SigCgt"):
            mask = int(text, 16)
            masks[name] = frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)
    return masks


def _read(path: str) -> str:
    """Empty if it is gone, or not for us: the kernel stack is the superuser's."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(65536)
    except OSError:
        return ""
