"""
Makes the workers of this node equal to a target: the workers of one world, or none.

The target is a level. The caller that sets it does not wait; `run` changes one thing at a time, stopping what should no longer run
before starting what should, and looks at the newest target again after each change. So a world that was superseded while
the old workers were still being stopped is never started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from dlrover.agent.workers.group import Failed, Finished, PortOffer
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.job import FailureKind, Round, StopCause, WorkerFailure, WorldSpec
from dlrover.protocol.messages.watch import Reach

log = logging.getLogger("dlrover.agent")


class DrivenGroup(Protocol):
    """What the driver needs of a `WorkerGroup`, whose docstrings say what it means."""

    @property
    def world(self) -> WorldSpec: ...

    @property
    def pids(self) -> tuple[int, ...]: ...

    @property
    def step(self) -> int | None: ...

    @property
    def lived(self) -> float: ...

    @property
    def reach(self) -> Reach: ...

    @property
    def may_be_mistaken(self) -> bool: ...

    async def start(self, offer: PortOffer | None) -> None: ...

    async def wait(self) -> Finished | Failed: ...

    async def await_alike(self) -> None: ...

    async def stop(self, cause: StopCause, with_signal: int) -> tuple[WorkerFailure, ...]: ...

    async def gone(self) -> None: ...

    def kill(self) -> None: ...


class WorkerDriver:
    """Owns the worker group. All others set targets and hear of outcomes."""

    def __init__(
        self,
        build: Callable[[WorldSpec], DrivenGroup],
        *,
        on_outcome: Callable[[Round, Finished | Failed], None],
        on_error: Callable[[DLRoverError], None],
        ready: Callable[[], Awaitable[None]] | None = None,
        prepare: Callable[[WorldSpec], Awaitable[None]] | None = None,
        on_stopped: Callable[[Round], None] | None = None,
    ) -> None:
        """
        `ready` is waited for before workers start: something else may still be running on this node. Then `prepare` is, which may
        bring what they need. `on_stopped` is told when no worker of a round is left, before others can start.
        """
        self._build = build
        self._on_outcome = on_outcome
        self._on_error = on_error
        self._ready = ready
        self._prepare = prepare
        self._on_stopped = on_stopped
        self._target: WorldSpec | None = None
        self._offer: PortOffer | None = None
        self._cause = StopCause.MEMBERSHIP
        self._signal = signal.SIGTERM
        self._is_patient = False
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._group: DrivenGroup | None = None
        self._starting: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        """Of stopped workers, whose memory and devices the kernel has not freed yet."""

    @property
    def running_round(self) -> Round:
        """Round whose workers were started and not yet ended, failed or stopped; 0 for none."""
        return self._group.world.round if self._group is not None else Round(0)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the workers that run."""
        return self._group.pids if self._group is not None else ()

    @property
    def is_wanted(self) -> bool:
        """Whether workers shall run, be they started already or not."""
        return self._target is not None

    @property
    def is_patient(self) -> bool:
        """Whether workers that are about to be stopped may still tell of a mistake in the script."""
        return self._is_patient and not self.is_settled

    @property
    def is_settled(self) -> bool:
        """Whether what runs equals the target, and nothing is left of what ran before."""
        return self._settled.is_set()

    def want(self, world: WorldSpec, offer: PortOffer | None) -> None:
        """Run the workers of this world. `offer` is our reserved port, given up when the workers start."""
        self._drop_offer()
        self._target, self._offer = world, offer
        if world.task is not None:
            # A process of an older version of the cluster: nothing in it is worth a farewell.
            self._cause, self._signal, self._is_patient = StopCause.FAILURE, signal.SIGKILL, False
        self._wake()

    def want_none(
        self, cause: StopCause, with_signal: signal.Signals = signal.SIGTERM, *, is_patient: bool = False
    ) -> None:
        """`is_patient`: first find out whether the script has a mistake, if that may be so."""
        self._drop_offer()
        self._target, self._cause, self._signal = None, cause, with_signal
        self._is_patient = is_patient and self._group is not None and self._group.may_be_mistaken
        self._wake()

    def kill(self) -> None:
        """SIGKILL what runs, at once. Its end is then reported like any other failure."""
        if self._group is not None:
            self._group.kill()

    async def settle(self) -> None:
        """
        Wait until what runs equals the target, and nothing is left of what ran before. Bounded by the stop grace of the workers.

        New workers do not wait for that: their group knows what they need of it.
        """
        await self._settled.wait()

    async def run(self) -> None:
        """Never returns; cancel it. Workers that still run then are killed at once."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                self._check_watcher()
                await self._approach()
                if self._leaving is not None and self._leaving.done():
                    self._leaving = None
                if not self._changed.is_set() and self._leaving is None:
                    self._settled.set()
        finally:
            self.kill()
            self._drop_offer()
            tasks = {task for task in (self._starting, self._watcher, self._leaving) if task is not None}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)  # a start that went on would fork workers that nobody watches

    async def _approach(self) -> None:
        if self._group is not None and self._group.world != self._target:
            await self._stop(self._group)
        if self._target is not None and self._group is None:
            await self._start(self._target)

    async def _start(self, world: WorldSpec) -> None:
        offer, self._offer = self._offer, None
        group = self._group = self._build(world)
        begun_at = time.monotonic()
        starting = self._starting = asyncio.create_task(self._begin(group, offer))
        starting.add_done_callback(lambda _: self._changed.set())
        # A start can take as long as the imports of a user's modules; a newer target need not wait for it.
        while not starting.done():
            await self._changed.wait()
            self._changed.clear()
            if self._target != world and not starting.done():
                starting.cancel()
                await asyncio.wait({starting})  # not `await starting`: that cannot tell its cancellation from ours
        self._starting = None
        if offer is not None:
            offer.release()  # a start that was cancelled before its first line has not done it
        if starting.cancelled():
            await self._stop(group)  # at once: should the very same world be wanted again, it needs a new group
            self._changed.set()
            return
        if self._target != world:
            self._changed.set()
        try:
            starting.result()
        except DLRoverError as error:  # nothing that another try could mend: no log directory, for example
            self.want_none(StopCause.FAILURE)
            self._on_error(error)
            return
        log.info(
            "started %d workers round=%d seconds=%.3f", world.local_world_size, world.round, time.monotonic() - begun_at
        )
        self._watcher = asyncio.create_task(self._watch(group))
        self._watcher.add_done_callback(lambda _: self._changed.set())

    async def _begin(self, group: DrivenGroup, offer: PortOffer | None) -> None:
        if self._ready is not None:
            await self._ready()
        if self._prepare is not None:
            await self._prepare(group.world)
        await group.start(offer)

    async def _watch(self, group: DrivenGroup) -> None:
        outcome = await group.wait()
        if group is not self._group or self._target != group.world:
            # Being stopped already. What failed by itself is told all the same: it may be the cause of it all.
            if isinstance(outcome, Failed):
                self._tell_late(group, tuple(f for f in outcome.failures if f.kind is not FailureKind.STOPPED_BY_US))
            return
        # The rest of a failed group goes at once, without asking anybody; a finished one is swept for what it left.
        is_failed = isinstance(outcome, Failed)
        self.want_none(StopCause.FAILURE if is_failed else StopCause.END_OF_JOB, is_patient=is_failed)
        self._on_outcome(group.world.round, outcome)

    async def _stop(self, group: DrivenGroup) -> None:
        begun_at = time.monotonic()
        if self._is_patient:
            await group.await_alike()
        cause = self._cause
        late = await group.stop(cause, self._signal)
        self._check_watcher()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._group = None
        if self._leaving is not None:
            self._leaving.cancel()  # the newer one waits for all that is left
        self._leaving = asyncio.create_task(group.gone())
        self._leaving.add_done_callback(lambda _: self._changed.set())
        if self._on_stopped is not None:
            self._on_stopped(group.world.round)
        self._tell_late(group, late)
        log.info(
            "stopped workers round=%d cause=%s seconds=%.3f",
            group.world.round,
            cause,
            time.monotonic() - begun_at,
        )

    def _check_watcher(self) -> None:
        """A bug in there must not leave a job that no process watches."""
        if self._watcher is not None and self._watcher.done() and not self._watcher.cancelled():
            self._watcher.result()

    def _tell_late(self, group: DrivenGroup, failures: tuple[WorkerFailure, ...]) -> None:
        if failures:
            self._on_outcome(group.world.round, Failed(failures, group.step, group.lived, group.reach))

    def _wake(self) -> None:
        self._settled.clear()
        self._changed.set()

    def _drop_offer(self) -> None:
        """Of a world that was never started: where HOST_PORTS has no other, the next round needs the port."""
        if self._offer is not None:
            self._offer.release()
            self._offer = None
