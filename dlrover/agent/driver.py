"""
Makes the workers of this node equal to a target: the workers of one world, or none.

The target is a level. Whoever sets it does not wait; `run` changes one thing at a time, stopping what should no longer run
before starting what should, and looks at the newest target again after each change. So a world that was superseded while
the old workers were still being stopped is never started.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable

from dlrover.agent.worker_group import Failed, Finished, PortOffer, WorkerGroup
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages import FailureKind, Round, StopCause, WorkerFailure, WorldSpec

log = logging.getLogger("dlrover.agent")


class WorkerDriver:
    """Owns the worker group. Everybody else sets targets and hears of outcomes."""

    def __init__(
        self,
        build: Callable[[WorldSpec], WorkerGroup],
        *,
        on_outcome: Callable[[Round, Finished | Failed], None],
        on_error: Callable[[DLRoverError], None],
    ) -> None:
        self._build = build
        self._on_outcome = on_outcome
        self._on_error = on_error
        self._target: WorldSpec | None = None
        self._offer: PortOffer | None = None
        self._cause = StopCause.MEMBERSHIP
        self._signal = signal.SIGTERM
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._group: WorkerGroup | None = None
        self._watcher: asyncio.Task[None] | None = None

    @property
    def running_round(self) -> Round:
        """Round whose workers were started and not yet ended, failed or stopped; 0 for none."""
        return self._group.world.round if self._group is not None else Round(0)

    def want(self, world: WorldSpec, offer: PortOffer | None) -> None:
        """Run the workers of this world. `offer` is our reserved port, given up when the workers start."""
        self._target, self._offer = world, offer
        self._wake()

    def want_none(self, cause: StopCause, with_signal: signal.Signals = signal.SIGTERM) -> None:
        self._target, self._cause, self._signal = None, cause, with_signal
        self._wake()

    def kill(self) -> None:
        """SIGKILL what runs, at once. Its end is then reported like any other failure."""
        if self._group is not None:
            self._group.kill()

    async def settle(self) -> None:
        """Wait until what runs equals the target. Bounded by the stop grace of the workers."""
        await self._settled.wait()

    async def run(self) -> None:
        """Never returns; cancel it. Workers that still run then are killed at once."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._watcher is not None and self._watcher.done() and not self._watcher.cancelled():
                    self._watcher.result()  # a bug in there must not leave a job that nobody watches
                await self._approach()
                if not self._changed.is_set():
                    self._settled.set()
        finally:
            self.kill()

    async def _approach(self) -> None:
        if self._group is not None and self._group.world != self._target:
            await self._stop(self._group)
        if self._target is not None and self._group is None:
            await self._start(self._target)

    async def _start(self, world: WorldSpec) -> None:
        offer, self._offer = self._offer, None
        group = self._group = self._build(world)
        begun_at = time.monotonic()
        starting = asyncio.create_task(group.start(offer))
        # A start can take as long as the imports of a user's modules; a newer target need not wait for it.
        while not starting.done() and self._target == world:
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({starting, changed}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
            if self._target == world:
                self._changed.clear()
        if not starting.done():
            starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            if not starting.cancelled():
                raise  # it is we who are cancelled
            return
        except DLRoverError as error:  # nothing that another try could mend: no log directory, for example
            self._group = self._target = None
            self._on_error(error)
            return
        log.info(
            "started %d workers round=%d seconds=%.3f", world.local_world_size, world.round, time.monotonic() - begun_at
        )
        self._watcher = asyncio.create_task(self._watch(group))
        self._watcher.add_done_callback(lambda _: self._changed.set())

    async def _watch(self, group: WorkerGroup) -> None:
        outcome = await group.wait()
        if group is not self._group or self._target != group.world:
            # Being stopped already. What failed by itself is told all the same: it may be the cause of it all.
            if isinstance(outcome, Failed):
                self._tell_late(group, tuple(f for f in outcome.failures if f.kind is not FailureKind.STOPPED_BY_US))
            return
        # The rest of a failed group goes at once, without asking anybody; a finished one is swept for what it left.
        self.want_none(StopCause.FAILURE if isinstance(outcome, Failed) else StopCause.END_OF_JOB)
        self._on_outcome(group.world.round, outcome)

    async def _stop(self, group: WorkerGroup) -> None:
        begun_at = time.monotonic()
        late = await group.stop(self._cause, self._signal)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._group = None
        self._tell_late(group, late)
        log.info(
            "stopped workers round=%d cause=%s seconds=%.3f",
            group.world.round,
            self._cause,
            time.monotonic() - begun_at,
        )

    def _tell_late(self, group: WorkerGroup, failures: tuple[WorkerFailure, ...]) -> None:
        if failures:
            self._on_outcome(group.world.round, Failed(failures, group.step, group.lived))

    def _wake(self) -> None:
        self._settled.clear()
        self._changed.set()
