"""
Looks at the workers: when the master wants to see what all of them are doing, and when some of them do not end.

Workers write their stacks themselves; the stacks of those that cannot answer are read from outside. Each order of the master is taken up
once and given up at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from dlrover.agent.monitor.native_stacks import NativeStacks
from dlrover.agent.monitor.worker_view import Facts, WatchedWorker
from dlrover.agreed.stall_thresholds import StallWatch
from dlrover.protocol.messages.job import MAX_MESSAGE_BYTES, Incarnation, Micros, NodeId, Round
from dlrover.protocol.messages.watch import (
    LookTaken,
    NodeEvent,
    SendTail,
    ShowNotice,
    TailSent,
    TakeLook,
    WatchObservation,
    WatchOrder,
    WorkerDump,
)

log = logging.getLogger("dlrover.agent")

STACKS_TIMEOUT = 1.0
"""Seconds for workers to write their stacks. One that holds the interpreter lock writes them all the same; one that is stopped never."""
_DUMP_LOOK = 0.02
_CANNOT_ANSWER = "TD"
"""Stopped, or inside the kernel: others have to read its stack. No other program can read a process that a debugger holds (t)."""
_RECORD_TIMEOUT = 0.3
_MAX_ORDERS = 256


@dataclass(frozen=True)
class WatchedRound:
    """The workers of this node that are watched now."""

    number: Round
    workers: list[WatchedWorker]
    stalls: StallWatch


class WorkerLooks:
    """Of one agent. `connect` names the master for which it looks."""

    def __init__(self, now: Callable[[], WatchedRound], *, stacks_timeout: float) -> None:
        self._now = now
        self._stacks_timeout = stacks_timeout
        self._native = NativeStacks()
        self._observe: Callable[[WatchObservation], None] = lambda _observation: None
        self._who: Callable[[], tuple[NodeId, Incarnation]] = lambda: (NodeId(-1), Incarnation(0))
        self._master_now: Callable[[], Micros] | None = None
        self._orders: dict[int, None] = {}
        """Numbers of those that were taken up, oldest first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.read_tail: Callable[[int, int], tuple[str, str]] | None = None
        """Gives the last that the worker of a local rank printed, up to so many bytes, and a note about it. May block."""

    def connect(
        self,
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        master_now: Callable[[], Micros] | None = None,
    ) -> None:
        self._observe, self._who, self._master_now = observe, who, master_now

    def cancel(self) -> None:
        """The workers that are looked at have ended, or the agent ends."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

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
            log.info("order %d arrived after its deadline and is ignored", order.id)
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
        local = next(
            (worker.local_rank for worker in self._now().workers if worker.global_rank == order.global_rank), None
        )
        text, note = "", f"rank {order.global_rank} does not run on this node now"
        if local is not None and self.read_tail is not None:
            text, note = await asyncio.to_thread(self.read_tail, local, order.max_bytes)
        node, incarnation = self._who()
        self._observe(TailSent(node=node, incarnation=incarnation, request=order.request, text=text, note=note))

    async def _take_look(self, order: TakeLook) -> None:
        for number in range(2):
            is_current = order.round == self._now().number
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
                    await self._native.sample(
                        [worker.pid for worker in self._now().workers if worker.pid], within=left - 0.3
                    )
                await asyncio.sleep(max(0.0, began_at + left - time.monotonic()))

    async def dump(self, *, is_second: bool = False) -> tuple[WorkerDump, ...]:
        """
        What all workers are doing now.

        Writing stacks takes a worker some processor time and output. What it used is therefore read after the first dump and before the
        second, so that between the two only its own doings count.
        """
        workers = list(self._now().workers)
        facts = [worker.facts() for worker in workers]
        asked = [worker for worker in workers if worker.ask_for_stacks()]
        recording = [worker for worker in workers if worker.ask_for_collectives()]
        await _written(asked, within=self._stacks_timeout)
        await _recorded(recording)
        deaf = [worker.pid for worker, known in zip(workers, facts, strict=True) if known.state in _CANNOT_ANSWER]
        read = await self._native.read_deaf(deaf, within=self._stacks_timeout)
        if not is_second:
            facts = [_later_use(before, worker.facts()) for before, worker in zip(facts, workers, strict=True)]
        stalled = self._now().stalls.stalled
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
        workers = [worker for worker in self._now().workers if worker.pid in pids]
        if workers:
            self._spawn(self._log_stuck(workers))

    async def _log_stuck(self, workers: list[WatchedWorker]) -> None:
        asked = [worker for worker in workers if worker.ask_for_stacks()]
        await _written(asked, within=self._stacks_timeout)
        node, incarnation = self._who()
        for worker in workers:
            dump = worker.dump(worker.facts(), worker.stacks() if worker in asked else (), is_stalled=True)
            text = describe(dump)
            log.warning("global rank %d did not end in time and will be killed: %s", worker.global_rank, text)
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
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


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
