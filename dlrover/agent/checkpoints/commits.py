"""
From written shards to a checkpoint: what this node tells the master of its saves, and what it does when it is told.

With a master every written shard is reported, and the agent that is asked commits. Without one, or when it says nothing for long, the writer of
shard 0 waits for the others' manifests and commits by the files. However an attempt ends, the trainers of this node hear of it, and people
once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor

from msgspec.structs import replace

from dlrover.agent.checkpoints.break_points import BreakPointSaves
from dlrover.agent.checkpoints.duties import DutyLine, DutyRelay
from dlrover.host.edges import logged
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.checkpoint import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSettled,
    CommitCheckpoint,
    SaveDuties,
    SaveRequested,
    ShardWritten,
    SnapshotFailed,
    TrainerNews,
)
from dlrover.protocol.messages.job import Round
from dlrover.snapshot.storage.manifest import ManifestInvalid
from dlrover.snapshot.storage.newest import newest_step
from dlrover.snapshot.storage.persist import SaveRequest, finish, give_up, wait_until_complete

log = logging.getLogger("dlrover.agent")

NICENESS = 5
"""Of the threads that sum and write: the training goes first."""
STOPPING = 30.0
"""Seconds on top of the patience of a node that leaves, for its workers to stop before it writes."""
SHORTEST_COMMIT = 60.0
_TRIES = 4
"""The master waits once for the shards and up to three times for a committer, each for a save's timeout."""

Key = tuple[str, str]
"""Directory and attempt."""


class SaveGivenUp(DLRoverError):
    """The job has given the save up, for a reason that may lie on another node."""


class NodeCommits:
    """Owned by the saver, in its event loop."""

    def __init__(
        self,
        breaks: BreakPointSaves,
        turn: asyncio.Lock,
        stop: threading.Event,
        *,
        run: Callable[[Coroutine[None, None, None], str], None],
        patience_at_signal: float,
    ) -> None:
        """`turn` is held while this node writes, `stop` is set when it has to end; `run` begins what that end has to wait for."""
        self._breaks, self._turn, self._stop, self._run = breaks, turn, stop, run
        self._patience_of_leavers = patience_at_signal + STOPPING
        self.tell_trainers: Callable[[TrainerNews], None] = lambda news: None
        self.line: DutyLine | None = None
        self._listening: asyncio.Task[None] | None = None
        self._requests: dict[Key, tuple[SaveRequest, float]] = {}
        """What was written here and is not settled, and when that began."""
        self._request: SaveRequested | None = None
        """A storage save is wanted, and none was committed since we heard of it."""
        # Not the thread that writes: while one save waits for other nodes the next may be written, and another be committed.
        self._pool = nice_pool("dlrover-commit", 2)

    def report_to(self, relay: DutyRelay) -> None:
        self.line = DutyLine(relay, self._on_duties, self._breaks.lose)

    def greet(self) -> None:
        """A worker begins to save."""
        self._listen()
        if self._request is not None:
            self.tell_trainers(self._request)  # whom it was told to is gone

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def settle(
        self, request: SaveRequest, round_: Round, digest: str, begun_at: float, *, is_adopted: bool
    ) -> None:
        """The shard is written: see to it that the attempt becomes a checkpoint. Raises when it does not."""
        key = (request.directory, request.attempt)
        settled = None
        if self.line is not None and round_ > 0:
            self._listen()
            self._requests[key] = (request, begun_at)
            settled = await self.line.report(
                _written(request, round_, digest), patience=_TRIES * max(request.save_timeout, SHORTEST_COMMIT)
            )
            self._requests.pop(key, None)
        if settled is not None:
            if not settled.is_committed:
                raise SaveGivenUp(settled.reason)
            return
        if not request.is_committer:
            return
        await self._in_thread(self._commit_by_files, request, is_adopted)
        self.tell_trainers(_outcome(request, "", time.monotonic() - begun_at))
        if self.line is not None:
            await self.line.tell(
                CheckpointCommitted(
                    directory=request.directory,
                    attempt=request.attempt,
                    step=request.step,
                    round=round_,
                    is_by_files=True,
                )
            )

    async def tell_failure(self, request: SaveRequest, error: Exception) -> None:
        """So that people hear of it, no process waits for this shard, and what was staged does not stay."""
        self.tell_trainers(_outcome(request, str(error), 0.0))
        is_over = isinstance(error, SaveGivenUp)
        if self.line is not None and not is_over:
            is_over = await self.line.tell(
                CheckpointFailed(
                    directory=request.directory,
                    attempt=request.attempt,
                    step=request.step,
                    reason=str(error) or type(error).__name__,
                    shard=request.shard,
                    num_shards=request.num_shards,
                )
            )
        if is_over:
            async with self._turn:  # this node may still be writing another shard of it
                await self._in_thread(give_up, request)

    async def tell_of(self, failed: SnapshotFailed) -> None:
        """A worker could not even copy its state."""
        if self.line is None:
            return
        self._listen()
        await self.line.tell(
            CheckpointFailed(
                directory=failed.directory,
                attempt=f"memory-{failed.step}",
                step=failed.step,
                reason=failed.reason,
                shard=0,
            )
        )

    # What the master wants.

    def _listen(self) -> None:
        if self.line is not None and self._listening is None:
            self._listening = asyncio.create_task(self.line.run(), name="save duties")

    def _on_duties(self, duties: SaveDuties) -> None:
        for settled in duties.settled:
            self._on_settled(settled)
        for duty in duties.commits:
            self._run(self._obey(duty), f"commit of step {duty.step}")
        self._breaks.hear(duties.persists)
        if duties.request is not None:
            self._request = duties.request
            self.tell_trainers(duties.request)

    def _on_settled(self, settled: CheckpointSettled) -> None:
        request, begun_at = self._requests.get((settled.directory, settled.attempt), (None, 0.0))
        seconds = 0.0 if request is None else time.monotonic() - begun_at
        self.tell_trainers(replace(settled, seconds=seconds))
        if settled.is_committed and self._request is not None and settled.number > self._request.number:
            self._request = None

    async def _obey(self, duty: CommitCheckpoint) -> None:
        """Commit what all shards were reported of."""
        assert self.line is not None, "the master was heard"
        told = None
        with logged(log, "Step %d was not committed because of a bug in DLRover. Training continues.", duty.step):
            told = await self._commit_on(duty)
        if told is not None:
            await self.line.tell(told)

    async def _commit_on(self, duty: CommitCheckpoint) -> CheckpointCommitted | CheckpointFailed:
        request, _begun_at = self._requests.get((duty.directory, duty.attempt), (None, 0.0))
        try:
            if request is None:
                raise SaveGivenUp(
                    "the agent that should commit this save has no record of it; the next save starts as usual"
                )
            await self._in_thread(self._commit_as_told, request, duty)
        except (OSError, DLRoverError) as error:
            reason = str(error) or type(error).__name__
            return CheckpointFailed(
                directory=duty.directory,
                attempt=duty.attempt,
                step=duty.step,
                reason=reason,
                num_shards=duty.num_shards,
            )
        return CheckpointCommitted(directory=duty.directory, attempt=duty.attempt, step=duty.step)

    def _commit_as_told(self, request: SaveRequest, duty: CommitCheckpoint) -> None:
        if duty.is_waiting:
            patience = min(request.save_timeout, self._patience_of_leavers)
            wait_until_complete(request, wait=self._stop.wait, patience=patience)
        # The master may not know yet what such a model contains beyond what was confirmed.
        data_state = "" if request.claims else duty.data_state or request.data_state
        finish(request, digest=duty.digest, is_newest=duty.is_newest, data_state=data_state)

    def _commit_by_files(self, request: SaveRequest, is_adopted: bool) -> None:
        try:
            wait_until_complete(request, wait=self._stop.wait)
        except (TimeoutError, DLRoverError):
            give_up(request)
            raise
        if is_adopted and not is_due(request):
            give_up(request)  # a newer one was on its way: the tracker must not go back
            return
        finish(request, data_state=request.data_state)

    async def _in_thread(self, work: Callable[..., object], *arguments: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)


def is_due(request: SaveRequest) -> bool:
    """Whether a save that an earlier agent was asked for is still to be done: nothing as new has been committed."""
    try:
        newest = newest_step(request.open_storage(), request.directory)
    except ManifestInvalid:  # what is there cannot be restored
        return True
    return newest is None or newest < request.step


def nice_pool(name: str, num_threads: int = 1) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_be_nice)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _written(request: SaveRequest, round_: Round, digest: str) -> ShardWritten:
    return ShardWritten(
        directory=request.directory,
        target=request.target,
        step=request.step,
        attempt=request.attempt,
        shard=request.shard,
        num_shards=request.num_shards,
        round=round_,
        digest=digest,
        save_timeout=request.save_timeout,
    )


def _outcome(request: SaveRequest, reason: str, seconds: float) -> CheckpointSettled:
    return CheckpointSettled(
        step=request.step,
        attempt=request.attempt,
        is_committed=not reason,
        reason=reason,
        directory=request.directory,
        seconds=seconds,
    )
