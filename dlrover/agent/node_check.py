"""
The node check on this node: run the task of one phase, and say how it ended.

`CheckTask` starts the task's processes the way workers are started, warm where possible, in the small world that the
master chose, with a directory of their own for results and output; whatever happens, nothing of them is left when it
returns. `CheckRunner` holds what is wished against what runs: a level, like everything that the master wants. A newer
phase, or another wish, ends a task that still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec
from msgspec.structs import replace

from dlrover.agent.config import AgentConfig, Entry, EntryKind, Streams, WorkerLogConfig
from dlrover.agent.workers.group import Failed, Finished, PortOffer, WorkerGroup
from dlrover.agent.workers.output import WorkerOutput
from dlrover.agent.workers.process_tree import ProcessTree
from dlrover.agent.workers.socket import WorkerSocket
from dlrover.agent.workers.spawner import Spawner
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.check import MAX_CHECK_MESSAGE, CheckTerms, ExitClass
from dlrover.protocol.messages.job import Check, Micros, NodeRank, Round, StopCause, WorkerFailure, WorldSpec

log = logging.getLogger("dlrover.agent")

DEVICE_MEMORY = "dlrover.trainer.torch.node_check.device_memory"
EXIT_BUSY = 13
MEMORY_TIMEOUT = 60.0
"""Seconds. The program waits up to 30 s for memory to become free; a vendor's library may hang."""


@dataclass(frozen=True)
class CheckOutcome:
    """How the task of one phase ended on this node."""

    exit_class: ExitClass
    elapsed_ms: float = 0.0
    bandwidth_gbps: float = 0.0
    message: str = ""


class _Result(msgspec.Struct):
    """What each local rank writes. More fields than these may be there. The master refuses figures beyond these."""

    time: Annotated[float, msgspec.Meta(ge=0, le=86_400_000)]
    bandwidth_gbps: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class RunTask(Protocol):
    async def __call__(self, check: Check, node_rank: NodeRank, offer: PortOffer | None) -> CheckOutcome:
        """Nothing of the task is left when this returns, or is cancelled."""


class CheckRunner:
    """Makes the task that runs equal to the one that is wished."""

    def __init__(
        self,
        run_task: RunTask,
        *,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        ready: Callable[[], Awaitable[None]],
        on_outcome: Callable[[Round, CheckOutcome], None],
    ) -> None:
        """
        `start` makes a task of a coroutine, where a bug in it is seen. `ready` waits until the workers of this node have
        stopped: they hold the devices.
        """
        self._run_task = run_task
        self._start = start
        self._ready = ready
        self._on_outcome = on_outcome
        self._wanted: asyncio.Task[None] | None = None
        self._alive: set[asyncio.Task[None]] = set()
        """The wanted one, and those that are being stopped."""

    @property
    def is_settled(self) -> bool:
        return not self._alive

    def want(self, check: Check, node_rank: NodeRank, offer: PortOffer | None) -> None:
        """Run this phase's task, once. `offer` is our reserved port, given up when the task starts."""
        self.want_none()
        self._wanted = self._start(self._run(check, node_rank, offer, frozenset(self._alive)))
        self._alive.add(self._wanted)
        self._wanted.add_done_callback(self._alive.discard)

    def want_none(self) -> None:
        """A task is cancelled once: a second time would interrupt it in the middle of stopping its processes."""
        if self._wanted is not None:
            self._wanted.cancel()
            self._wanted = None

    async def settle(self) -> None:
        """Until nothing runs any more. Bounded by the stop grace, and by the task's timeout."""
        while self._alive:
            await asyncio.wait(self._alive)

    async def close(self) -> None:
        self.want_none()
        await self.settle()

    async def _run(
        self, check: Check, node_rank: NodeRank, offer: PortOffer | None, former: frozenset[asyncio.Task[None]]
    ) -> None:
        try:
            if former:
                await asyncio.wait(former)
            await self._ready()
            outcome = await self._run_task(check, node_rank, offer)
        finally:
            if offer is not None:
                offer.release()
        self._on_outcome(check.world.round, outcome)


class CheckTask:
    """The real task, on the real processes of this node."""

    def __init__(self, config: AgentConfig, *, spawner: Spawner, tree: ProcessTree) -> None:
        self._config = config
        self._spawner = spawner
        self._tree = tree
        self._is_memory_checked = False

    async def __call__(self, check: Check, node_rank: NodeRank, offer: PortOffer | None) -> CheckOutcome:
        terms = self._config.terms.check
        assert terms is not None, "the master checks nodes of a job without a check"
        directory = tempfile.mkdtemp(prefix=f"check-{check.world.round}-", dir=self._config.runtime_dir)
        try:
            busy = await self._check_memory(terms, node_rank, directory)
            if busy is not None:
                return busy
            return await self._run(check, terms, node_rank, offer, directory)
        except DLRoverError as error:  # no log file can be made, for example
            return CheckOutcome(ExitClass.SETUP, message=str(error))
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    async def _check_memory(self, terms: CheckTerms, node_rank: NodeRank, directory: str) -> CheckOutcome | None:
        """Once for each agent. None: the devices are free, or that is unknown."""
        if self._is_memory_checked or terms.accelerator == "cpu":
            return None
        options = ("--accelerator", terms.accelerator, "--limit", str(terms.memory_limit))
        entry = Entry.of(EntryKind.MODULE, DEVICE_MEMORY, (*options, "--agent-pid", str(os.getpid())))
        outcome, words = await self._perform(entry, _alone(), node_rank, None, directory, MEMORY_TIMEOUT)
        self._is_memory_checked = True
        codes = [failure.exit_code for failure in outcome.failures] if isinstance(outcome, Failed) else []
        if EXIT_BUSY not in codes:
            return None
        log.warning("node check: %s", words)
        self._is_memory_checked = False  # the next phase, if there is one, shall not overlook it
        return CheckOutcome(ExitClass.COMPUTE, message=words[-MAX_CHECK_MESSAGE:])

    async def _run(
        self, check: Check, terms: CheckTerms, node_rank: NodeRank, offer: PortOffer | None, directory: str
    ) -> CheckOutcome:
        begun_at = time.monotonic()
        entry = Entry.of(EntryKind.MODULE, terms.module)
        outcome, words = await self._perform(entry, check.world, node_rank, offer, directory, terms.timeout)
        results = _read_results(directory, check.world.local_world_size)
        if len(results) == check.world.local_world_size:
            # Also after a failure: the work was done, and only taking things down went wrong.
            return CheckOutcome(
                ExitClass.OK, max(result.time for result in results), min(result.bandwidth_gbps for result in results)
            )
        if isinstance(outcome, Finished):
            return CheckOutcome(ExitClass.OK, (time.monotonic() - begun_at) * 1000)  # a module that writes no results
        if outcome is None:
            return CheckOutcome(ExitClass.COMMUNICATION, message=f"the task did not end within {terms.timeout:g} s")
        return CheckOutcome(class_of(outcome.failures), message=words[-MAX_CHECK_MESSAGE:])

    async def _perform(
        self,
        entry: Entry,
        world: WorldSpec,
        node_rank: NodeRank,
        offer: PortOffer | None,
        directory: str,
        timeout: float,
    ) -> tuple[Finished | Failed | None, str]:
        """How its processes ended (None: not in time), and the last words of one that failed."""
        config = replace(
            self._config,
            entry=entry,
            role="check",
            log=WorkerLogConfig(log_dir=os.path.join(directory, "log"), redirect_default=int(Streams.ALL)),
        )
        output = WorkerOutput(config.log, role=config.role, run_id="check", runtime_dir=directory)
        group = WorkerGroup(
            config,
            world,
            node_rank=node_rank,
            spawner=self._spawner,
            tree=self._tree,
            output=output,
            worker_socket=WorkerSocket(""),  # it has nothing to tell the agent or the master
            master_now=lambda: Micros(0),
            environ={
                "OMP_NUM_THREADS": "1",  # as workers get it; said here, or the group would warn of it each time
                **self._spawner.environ,
                "DLROVER_CHECK_DIR": directory,
                "NODE_RANK": str(node_rank),
            },
        )
        outcome: Finished | Failed | None = None
        try:
            async with asyncio.timeout(timeout):
                await group.start(offer)
                outcome = await group.wait()
        except TimeoutError:
            pass  # told by the outcome
        finally:
            await group.stop(StopCause.FAILURE)
            words = _last_words(outcome)
            output.close()
        return outcome, words


def class_of(failures: tuple[WorkerFailure, ...]) -> ExitClass:
    """What the exit codes of this node's processes say together. Anything else than ours may be any node's fault."""
    codes = [failure.exit_code for failure in failures]
    for exit_class in (ExitClass.COMPUTE, ExitClass.COMMUNICATION):
        if exit_class in codes:
            return exit_class
    return ExitClass.SETUP


def _last_words(outcome: Finished | Failed | None) -> str:
    """The task's own last line, or whatever is known of its end."""
    if not isinstance(outcome, Failed):
        return ""
    first = outcome.failures[0]
    lines = [line.strip() for line in first.log_tail.splitlines() if line.strip()]
    return lines[-1] if lines else first.message


def _read_results(directory: str, num_ranks: int) -> list[_Result]:
    results = []
    for local_rank in range(num_ranks):
        try:
            with open(os.path.join(directory, f"{local_rank}.json"), "rb") as file:
                results.append(msgspec.json.decode(file.read(), type=_Result))
        except (OSError, msgspec.MsgspecError):
            continue  # it failed before it could write, or wrote what cannot be
    return results


def _alone() -> WorldSpec:
    """For a program that talks to no other."""
    return WorldSpec(
        round=Round(0),
        group_rank=0,
        group_world_size=1,
        first_global_rank=0,
        local_world_size=1,
        world_size=1,
        coordinator="127.0.0.1:1",
        restart_count=0,
    )
