"""
The conductor of a multi-role job: tells the core what happens in the cluster, and has done what the core decides.

It keeps nothing of its own. Killed at any moment, the next one reads the journal, asks again for what was under way, and watches what runs; nothing
restarts for that. Ray is not known here: a `Cluster` makes, runs, watches and ends instances.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from dlrover.protocol.errors import DLRoverError, Rejected
from dlrover.protocol.messages.identity import MICROS_PER_SECOND, Micros
from dlrover.unified.core.messages import (
    BundlesPlaced,
    Command,
    CreateInstance,
    Effect,
    EndInstance,
    EnsembleStatus,
    FinishEnsemble,
    InstanceBlamed,
    InstanceFailed,
    InstanceGone,
    InstanceId,
    InstanceReady,
    InstanceSucceeded,
    MachineReplaced,
    PlaceBundles,
    ReplaceMachine,
    RestartEnsemble,
    RunInstance,
    StopEnsemble,
)
from dlrover.unified.core.state import ALIVE
from dlrover.unified.store import DurableEnsemble, EnsembleJournal

log = logging.getLogger(__name__)


class InstanceBroken(DLRoverError):
    """The instance cannot be made, or its entry point raised."""

    def __init__(self, cause: str, traceback: str = "") -> None:
        super().__init__(cause)
        self.cause, self.traceback = cause, traceback


class InstanceCluster(Protocol):
    """Where instances live. Every call may come twice, by two conductors, and then does nothing new."""

    async def place(self) -> None:
        """Until there is room for all instances."""

    async def create(self, instance: InstanceId) -> None:
        """Until it is ready. Raises `InstanceBroken`. Never returns for one that is gone: `gone` tells."""

    async def run(self, instance: InstanceId) -> None:
        """Until its entry point has returned. Raises `InstanceBroken`. Never returns for one that is gone."""

    async def gone(self, instance: InstanceId) -> str:
        """Until its process is not there any more; the cause. Does not return before an instance is made that is still to come."""

    async def end(self, instance: InstanceId, *, is_kill: bool) -> None:
        """Ask it to end, or end it. An instance that is not there is never made after that."""

    async def replace_machine(self, instance: InstanceId) -> bool:
        """Until another machine stands for the one on which it ran. False: it is the same one."""


class Conductor:
    """One life of it. `conduct` returns when the job is over, and raises `Fenced` when another conductor has taken over."""

    def __init__(self, journal: EnsembleJournal, cluster: InstanceCluster, clock: Callable[[], Micros]) -> None:
        """`clock`: one that all machines of the cluster share, more or less."""
        self._journal = journal
        self._cluster = cluster
        self._clock = clock
        self._ensemble: DurableEnsemble | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._children: set[asyncio.Task[None]] = set()
        self._watched: set[InstanceId] = set()
        self._calls: dict[InstanceId, set[asyncio.Task[None]]] = {}
        """To make and to run instances: those of an instance that is gone are never answered."""
        self._has_decided = asyncio.Event()
        self._decided_by_core: asyncio.Future[None] | None = None
        self.has_begun = asyncio.Event()
        """It drives the job, and `status`, `stop` and `restart` may be called."""
        self.on_verdict: Callable[[str], None] = lambda sentence: None
        self._over: asyncio.Future[FinishEnsemble] = asyncio.get_running_loop().create_future()

    async def conduct(self, first: Command | None = None) -> FinishEnsemble:
        """`first` begins the job, if it has not begun."""
        ensemble = self._ensemble = DurableEnsemble.take_over(self._journal, self._clock(), first=first)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.has_begun.set()
                self._perform(ensemble.machine.open_effects())
                for instance, known in list(ensemble.machine.instances()):
                    if known.life in ALIVE:
                        self._watch(instance)
                timing = tasks.create_task(self._keep_time())
                over = await self._over
                timing.cancel()
                for task in list(self._children):
                    task.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group  # the first failure; the others are its followers
        return over

    @property
    def epoch(self) -> int:
        assert self._ensemble is not None, "it conducts nothing yet"
        return self._ensemble.epoch

    async def next_decision(self) -> None:
        """Until the core has decided something."""
        self._decided_by_core = self._decided_by_core or asyncio.get_running_loop().create_future()
        await asyncio.shield(self._decided_by_core)

    def status(self) -> EnsembleStatus:
        assert self._ensemble is not None, "it conducts nothing yet"
        return self._ensemble.machine.status()

    def stop(self, reason: str, exit_code: int = 0) -> bool:
        """False: the job ends already."""
        return self._tell(StopEnsemble(reason, exit_code))

    def restart(self, reason: str) -> bool:
        return self._tell(RestartEnsemble(reason))

    def blame(self, role: str, rank: int, reason: str) -> bool:
        """The newest life of an instance is the cause of what fails next. False: it is unknown, or it is too late."""
        assert self._ensemble is not None
        found = self._ensemble.machine.state.find(InstanceId(role, rank, 0))
        if found is None:
            return False
        return self._tell(InstanceBlamed(InstanceId(role, rank, found[1].incarnation), reason))

    def look_at_clock(self) -> None:
        """After it was set: time may have passed that the conductor did not wait for."""
        self._has_decided.set()

    # From the cluster to the core.

    def _tell(self, command: Command) -> bool:
        """False: it came too late. Raises `Fenced`."""
        ensemble = self._ensemble
        assert ensemble is not None
        try:
            outcome = ensemble.decide(command, self._now())
        except Rejected as error:
            log.info("a command was rejected command=%s reason=%s", type(command).__name__, error)
            return False
        for verdict in outcome.verdicts:
            log.info("%s", verdict)
            self.on_verdict(verdict)
        self._has_decided.set()
        if self._decided_by_core is not None:
            self._decided_by_core.set_result(None)
            self._decided_by_core = None
        self._perform(outcome.effects)
        return True

    def _now(self) -> Micros:
        """Clocks of two machines differ; the job's own never goes back."""
        assert self._ensemble is not None
        return Micros(max(self._clock(), self._ensemble.machine.state.now))

    async def _keep_time(self) -> None:
        assert self._ensemble is not None
        while True:
            self._has_decided.clear()
            for command in self._ensemble.machine.due(self._now()):
                self._tell(command)
            deadline = self._ensemble.machine.next_deadline()
            wait = None if deadline is None else max(0, deadline - self._now()) / MICROS_PER_SECOND
            try:
                async with asyncio.timeout(wait):
                    await self._has_decided.wait()
            except TimeoutError:
                continue

    # From the core to the cluster.

    def _perform(self, effects: tuple[Effect, ...] | list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PlaceBundles():
                    self._start(self._place())
                case CreateInstance(instance):
                    self._call(instance, self._cluster.create, InstanceReady)
                    self._watch(instance)  # after it: the cluster knows then that the instance is still to come
                case RunInstance(instance):
                    self._call(instance, self._cluster.run, InstanceSucceeded)
                case EndInstance(instance, is_kill):
                    self._start(self._cluster.end(instance, is_kill=is_kill))
                case ReplaceMachine(instance):
                    self._start(self._replace_machine(instance))
                case FinishEnsemble():
                    if not self._over.done():
                        self._over.set_result(effect)

    async def _place(self) -> None:
        await self._cluster.place()
        self._tell(BundlesPlaced())

    async def _replace_machine(self, instance: InstanceId) -> None:
        self._tell(MachineReplaced(instance, await self._cluster.replace_machine(instance)))

    def _call(
        self,
        instance: InstanceId,
        call: Callable[[InstanceId], Coroutine[Any, Any, None]],
        then: type[InstanceReady | InstanceSucceeded],
    ) -> None:
        calls = self._calls.setdefault(instance, set())
        calls.add(task := self._start(self._await_answer(instance, call, then)))
        task.add_done_callback(calls.discard)

    async def _await_answer(
        self,
        instance: InstanceId,
        call: Callable[[InstanceId], Coroutine[Any, Any, None]],
        then: type[InstanceReady | InstanceSucceeded],
    ) -> None:
        try:
            await call(instance)
        except InstanceBroken as error:
            self._tell(InstanceFailed(instance, error.cause, error.traceback))
        else:
            self._tell(then(instance))

    def _watch(self, instance: InstanceId) -> None:
        if instance not in self._watched:
            self._watched.add(instance)
            self._start(self._await_end(instance))

    async def _await_end(self, instance: InstanceId) -> None:
        cause = await self._cluster.gone(instance)
        self._watched.discard(instance)
        self._tell(InstanceGone(instance, cause))
        for call in self._calls.pop(instance, set()):
            call.cancel()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None
        self._children.add(task := self._tasks.create_task(work))
        task.add_done_callback(self._children.discard)
        return task
