"""
Watches the workers of this node: how far they are, who stands still, and, when the master wants to look, what all of them are doing.

No page is looked at more often than a stall could begin: the next look is due when the first worker could have been in a phase for longer
than it has learned to expect. Nothing here acts on workers. What is found goes to the master, which sees all nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from dlrover.agent.config import WatchConfig
from dlrover.agent.monitor.collectors import Collectors
from dlrover.agent.monitor.native_stacks import NativeStacks
from dlrover.agent.monitor.resources import ResourceMonitor
from dlrover.agent.monitor.worker_view import Facts, WatchedWorker
from dlrover.agreed.reach import NOTHING_TOLD, furthest
from dlrover.agreed.stall_thresholds import PhaseBook, SeenPage, StallWatch
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, Incarnation, Micros, NodeId, Round, WorldSpec
from dlrover.protocol.messages.watch import (
    LookTaken,
    NodeEvent,
    Phase,
    ProgressReport,
    Reach,
    SendTail,
    ShowNotice,
    StepShape,
    TailSent,
    TakeLook,
    WatchObservation,
    WatchOrder,
    WorkerDump,
)
from dlrover.protocol.progress_page import DEATH_NOTICE_AT

log = logging.getLogger("dlrover.agent")

STACKS_TIMEOUT = 1.0
"""Seconds for workers to write their stacks. One that holds the interpreter lock writes them all the same; one that is stopped never."""
_DUMP_LOOK = 0.02
_CANNOT_ANSWER = "TD"
"""Stopped, or inside the kernel: others have to read its stack. No other program can read a process that a debugger holds (t)."""
_RECORD_TIMEOUT = 0.3
_MAX_ORDERS = 256
_LONGEST_WAIT = 60.0
_MAX_METRICS_FILE = 65536


class FirstStep(NamedTuple):
    """Training goes on."""

    round: Round
    step: int | None
    """None: no report gave it a number that could be compared with those of earlier rounds."""


class WorkerWatch:
    """One per agent. The worker groups register their workers here; the agent connects it to the master."""

    def __init__(
        self,
        config: WatchConfig,
        *,
        runtime_dir: str = "",
        book: PhaseBook | None = None,
        disks: Sequence[str] | None = None,
        stacks_timeout: float = STACKS_TIMEOUT,
    ) -> None:
        """
        `disks`: paths whose file systems the job writes to; None: the resources of this node are not watched. `stacks_timeout`: seconds for
        workers to write their stacks, and for reading the stacks of those that do not answer, from outside.
        """
        self._stacks_timeout = stacks_timeout
        self._config = config
        self._metrics_file = ""
        if runtime_dir and config.has_step_file:
            self._metrics_file = os.path.join(runtime_dir, "runtime_metrics.json")
        self._book = book or PhaseBook()
        self._native = NativeStacks()
        self._round = Round(0)
        self._workers: list[WatchedWorker] = []
        self._stalls = StallWatch(self._book)
        self._changed = asyncio.Event()
        self._observe: Callable[[WatchObservation], None] = lambda _observation: None
        self._who: Callable[[], tuple[NodeId, Incarnation]] = lambda: (NodeId(-1), Incarnation(0))
        self._master_now: Callable[[], Micros] | None = None
        self._orders: dict[int, None] = {}
        """Numbers of those that were taken up, oldest first."""
        self._looks: set[asyncio.Task[None]] = set()
        self._told_step: int | None = None
        self._is_step_counted = False
        """As workers of this or an earlier round have found out."""
        self.read_tail: Callable[[int, int], tuple[str, str]] | None = None
        """Gives the last that the worker of a local rank printed, up to so many bytes, and a note about it. May block."""
        self._monitor: ResourceMonitor | None = None
        self._collectors: Collectors | None = None
        if disks is not None:
            self._monitor = ResourceMonitor(
                workers=lambda: {worker.pid: worker.global_rank for worker in self._workers if worker.pid},
                paths=disks,
                observe=lambda observation: self._observe(observation),
                who=lambda: self._who(),
            )

    def collect(self, load: Callable[[], Mapping[str, Any]]) -> None:
        """Have these measure beside us."""
        self._collectors = Collectors(
            load, observe=lambda observation: self._observe(observation), who=lambda: self._who()
        )

    def connect(
        self,
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        master_now: Callable[[], Micros] | None = None,
    ) -> None:
        self._observe, self._who, self._master_now = observe, who, master_now

    # The workers of a round.

    def open_round(self, world: WorldSpec) -> None:
        self.close_round()
        self._round = world.round
        self._stalls = StallWatch(self._book)
        self._told_step = None
        if self._metrics_file and os.path.exists(self._metrics_file):
            os.unlink(self._metrics_file)  # of the round before: its step may have been lost
        self._workers = [
            WatchedWorker(local_rank=local, global_rank=world.first_global_rank + local)
            for local in range(world.local_world_size)
        ]
        self._changed.set()

    def environment(self, local_rank: int) -> dict[str, str]:
        """What that worker needs to be watched."""
        if local_rank >= len(self._workers):
            return {}
        return {
            **self._workers[local_rank].environment(),
            "DLROVER_NODE_PAGES": ",".join(worker.page.path for worker in self._workers),
            "DLROVER_DUMP_SIGNAL": str(self._config.dump_signal),
            "DLROVER_PROGRESS_HOOKS": "1" if self._config.has_hooks else "0",
            "DLROVER_CANARY_EVERY": str(self._config.canary_every),
            "DLROVER_STEP_COUNTED": "1" if self._is_step_counted else "0",
        }

    def death_page(self, local_rank: int) -> tuple[int, int] | None:
        """Descriptor and place at which that worker holds its `death_notice`."""
        if local_rank >= len(self._workers):
            return None
        return self._workers[local_rank].page.descriptor, DEATH_NOTICE_AT

    def started(self, local_rank: int, pid: int) -> None:
        if local_rank < len(self._workers):
            self._workers[local_rank].pid = pid
        self._changed.set()

    def close_round(self) -> None:
        """All workers have ended. What they taught stays, and what they did last is told."""
        self.report()
        readings = [worker.read() for worker in self._workers]
        self._book.close_round([{phase: reading.buckets(phase) for phase in Phase} for reading in readings])
        told = [reading.is_step_counted for reading in readings if reading.is_step_counted is not None]
        self._is_step_counted = all(told) if told else self._is_step_counted
        for look in self._looks:
            look.cancel()
        self._looks.clear()
        for worker in self._workers:
            worker.close()
        self._workers = []

    # Progress.

    def report(self) -> None:
        """Tell the master how far each worker is."""
        if not self._workers:
            return
        node, incarnation = self._who()
        stalled = self._stalls.stalled
        self._read_metrics_file()
        self._observe(
            ProgressReport(
                node=node,
                incarnation=incarnation,
                round=self._round,
                workers=tuple(
                    worker.progress(
                        is_stalled=worker.local_rank in stalled,
                        told_step=self._told_step if worker.local_rank == 0 else None,
                    )
                    for worker in self._workers
                ),
            )
        )

    def named_step(self, round_: Round) -> int | None:
        """Greatest step in this round that a script or its checkpoint gave a number to: one that can be compared with other rounds."""
        if round_ != self._round:
            return None
        self._read_metrics_file()
        readings = [worker.read() for worker in self._workers]
        steps = [reading.step for reading in readings if reading.is_step_named]
        return max((step for step in (*steps, self._told_step) if step is not None), default=None)

    def reach(self, round_: Round) -> Reach:
        """The furthest of each count that workers of this round told."""
        readings = [worker.read().reach for worker in self._workers] if round_ == self._round else []
        return functools.reduce(furthest, readings, NOTHING_TOLD)

    def shape(self, round_: Round, global_rank: int) -> StepShape | UnsetType:
        """What that worker of the round told of its steps, also after its end."""
        told = (each.read().shape for each in self._workers if each.global_rank == global_rank)
        return next(told, UNSET) if round_ == self._round else UNSET

    def is_before_step(self, local_rank: int, *, is_young: bool) -> bool:
        """
        Whether that worker is known not to have made a step. Hooks count them. Without hooks (torch is not imported, or the worker has not
        begun yet) a young worker has made none.
        """
        if not self._config.has_hooks or local_rank >= len(self._workers) or self._told_step is not None:
            return False
        reading = self._workers[local_rank].read()
        return (reading.has_hooks or is_young) and reading.step is None and not reading.num_steps

    def first_step(self, after: Round) -> FirstStep | None:
        """The first that the workers of a later round have done; None: there is none yet."""
        if self._round <= after:
            return None
        self._read_metrics_file()
        done = [reading for reading in (worker.read() for worker in self._workers) if reading.num_steps]
        named = [reading.step - reading.num_steps + 1 for reading in done if reading.is_step_named and reading.step]
        if done:
            return FirstStep(self._round, min(named) if named else None)
        return None if self._told_step is None else FirstStep(self._round, self._told_step)

    def _read_metrics_file(self) -> None:
        if not self._metrics_file:
            return
        try:
            with open(self._metrics_file, encoding="utf-8", errors="replace") as file:
                said = json.loads(file.read(_MAX_METRICS_FILE))
        except (OSError, ValueError):
            return  # none, or just being written
        step = said.get("step") if isinstance(said, dict) else None
        if isinstance(step, int) and not isinstance(step, bool) and 0 < step < 1 << 62:
            self._told_step = step

    async def run(self) -> None:
        """Never returns; cancel it."""
        beside = [] if self._monitor is None else [asyncio.create_task(self._monitor.run(), name="resources")]
        if self._collectors is not None:
            beside.append(asyncio.create_task(self._collectors.run(), name="collectors"))
        try:
            while True:
                self._changed.clear()
                wait = self._look_at_pages()
                try:
                    async with asyncio.timeout(wait):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in (*self._looks, *beside):
                task.cancel()

    def _look_at_pages(self) -> float | None:
        """Seconds until it is due again; None: until something changes."""
        seen = {}
        for worker in self._workers:
            reading = worker.read()
            if worker.pid and reading.pid:
                stands = time.monotonic() - reading.since_ns / 1e9 >= self._book.least
                seen[worker.local_rank] = SeenPage(
                    phase=reading.phase,
                    since=reading.since_ns / 1e9,
                    num_changes=reading.num_changes,
                    has_stepped=reading.step is not None,
                    counts=reading.buckets(reading.phase),
                    is_stopped=stands and worker.is_stopped,
                )
        if not self._workers:
            return None
        has_changed, wait = self._stalls.see(seen, time.monotonic())
        if has_changed:
            stalled = [self._workers[rank].global_rank for rank in self._stalls.stalled]
            log.info("stalled ranks: %s", stalled or "none")
            self.report()
        return min(wait, _LONGEST_WAIT)

    # Looks.

    def attached(self) -> None:
        """To another master, perhaps, which numbers its orders anew. None comes twice over two streams."""
        self._orders.clear()

    def take_order(self, order: WatchOrder) -> None:
        if order.id in self._orders:
            return
        self._orders[order.id] = None
        if len(self._orders) > _MAX_ORDERS:
            del self._orders[next(iter(self._orders))]
        left = self._time_left(order)
        if left <= 0:
            log.info("order %d came after its deadline and is ignored", order.id)
            return
        match order.order:
            case TakeLook():
                self._spawn(_within(left, self._take_look(order.order)))
            case SendTail():
                self._spawn(_within(left, self._send_tail(order.order)))
            case ShowNotice():
                log.warning("%s", order.order.text)

    def _time_left(self, order: WatchOrder) -> float:
        """Seconds until the master gives it up. Who was stopped for a while reads orders that are long over."""
        if not order.at or self._master_now is None:
            return order.expires_in
        return order.expires_in - max(0.0, (self._master_now() - order.at) / 1e6)

    async def _send_tail(self, order: SendTail) -> None:
        local = next((worker.local_rank for worker in self._workers if worker.global_rank == order.global_rank), None)
        text, note = "", f"rank {order.global_rank} is not here now"
        if local is not None and self.read_tail is not None:
            text, note = await asyncio.to_thread(self.read_tail, local, order.max_bytes)
        node, incarnation = self._who()
        self._observe(TailSent(node=node, incarnation=incarnation, request=order.request, text=text, note=note))

    async def _take_look(self, order: TakeLook) -> None:
        for number in range(2):
            is_current = order.round == self._round
            workers: tuple[WorkerDump, ...] = ()
            began_at = time.monotonic()
            if is_current:
                workers = fit_into_look(await self.dump(is_second=number == 1))
            node, incarnation = self._who()
            self._observe(
                LookTaken(node=node, incarnation=incarnation, look=order.look, number=number, workers=workers)
            )
            if number == 0:
                left = max(order.again_after, 0.1)
                if is_current:
                    await self._native.sample([worker.pid for worker in self._workers if worker.pid], within=left - 0.3)
                await asyncio.sleep(max(0.0, began_at + left - time.monotonic()))

    async def dump(self, *, is_second: bool = False) -> tuple[WorkerDump, ...]:
        """
        What all workers are doing now.

        Writing stacks takes a worker some processor time and output. What it used is therefore read after the first dump and before the
        second, so that between the two only its own doings count.
        """
        workers = list(self._workers)
        facts = [worker.facts() for worker in workers]
        asked = [worker for worker in workers if worker.ask_for_stacks()]
        recording = [worker for worker in workers if worker.ask_for_collectives()]
        await _written(asked, within=self._stacks_timeout)
        await _recorded(recording)
        deaf = [worker.pid for worker, known in zip(workers, facts, strict=True) if known.state in _CANNOT_ANSWER]
        read = await self._native.read_deaf(deaf, within=self._stacks_timeout)
        if not is_second:
            facts = [_later_use(before, worker.facts()) for before, worker in zip(facts, workers, strict=True)]
        stalled = self._stalls.stalled
        return tuple(
            worker.dump(
                known,
                worker.stacks() if worker in asked else (),
                is_stalled=worker.local_rank in stalled,
                native=self._native.of(worker.pid) if is_second else (),
                read=read.get(worker.pid, ()),
                recorded=worker.recorded() if worker in recording else (),
            )
            for worker, known in zip(workers, facts, strict=True)
        )

    def note_stuck(self, pids: Sequence[int]) -> None:
        """These will be killed soon because they do not end: write down what they are doing."""
        workers = [worker for worker in self._workers if worker.pid in pids]
        if workers:
            self._spawn(self._log_stuck(workers))

    async def _log_stuck(self, workers: list[WatchedWorker]) -> None:
        asked = [worker for worker in workers if worker.ask_for_stacks()]
        await _written(asked, within=self._stacks_timeout)
        node, incarnation = self._who()
        for worker in workers:
            dump = worker.dump(worker.facts(), worker.stacks() if worker in asked else (), is_stalled=True)
            text = describe(dump)
            log.warning("global rank %d does not end and will be killed: %s", worker.global_rank, text)
            self._observe(
                NodeEvent(
                    node=node,
                    incarnation=incarnation,
                    level="warn",
                    name="stuck-worker",
                    text=text[:2048],
                    rank=worker.global_rank,
                )
            )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)


def fit_into_look(dumps: tuple[WorkerDump, ...]) -> tuple[WorkerDump, ...]:
    """As one message can carry them: of very many workers with many threads only the main ones, which say who waits for whom."""
    if len(msgspec.msgpack.encode(dumps)) <= MAX_MESSAGE_BYTES // 2:
        return dumps
    return tuple(replace(dump, threads=tuple(each for each in dump.threads if each.is_main)) for dump in dumps)


async def _within(seconds: float, coroutine: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await coroutine


def describe(dump: WorkerDump) -> str:
    """On a few lines, for a log."""
    main = next((thread for thread in dump.threads if thread.is_main), None)
    lines = [f"pid {dump.pid} state {dump.state} in {dump.wait_channel or 'no wait'}, stacks from {dump.source}"]
    lines += [f"  {frame}" for frame in (main.frames[:12] if main is not None else ())]
    return "\n".join([*lines, *(f"  child {child}" for child in dump.children[:8])])


async def _written(workers: Sequence[WatchedWorker], *, within: float) -> None:
    """Until the dumps of these are complete: there, growing no more, and no handler at work on them."""
    sizes = [0] * len(workers)
    until = time.monotonic() + within
    while workers and time.monotonic() < until:
        await asyncio.sleep(_DUMP_LOOK)
        now = [worker.num_dumped() for worker in workers]
        if now == sizes and all(now) and not any(worker.is_dumping() for worker in workers):
            return
        sizes = now


async def _recorded(workers: Sequence[WatchedWorker]) -> None:
    """Until these have answered, or had their time: one whose main thread holds the interpreter lock never does."""
    until = time.monotonic() + _RECORD_TIMEOUT
    while time.monotonic() < until:
        if all(worker.has_recorded() for worker in workers):
            return
        await asyncio.sleep(_DUMP_LOOK)


def _later_use(before: Facts, after: Facts) -> Facts:
    """State and wait channel from before we disturbed it, use of resources from after."""
    return before._replace(
        cpu_seconds=max(before.cpu_seconds, after.cpu_seconds),
        io_bytes=max(before.io_bytes, after.io_bytes),
        major_faults=max(before.major_faults, after.major_faults),
        switches=max(before.switches, after.switches),
    )
