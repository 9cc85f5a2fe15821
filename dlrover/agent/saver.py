"""
The saver of a node: owns the segments of its workers, sums them, and writes to storage what was asked for.

Trainers copy and train on; everything slow happens here. What there is to do stands in the segments, so an agent that is started
again after a kill finds the saves that its predecessor did not finish. A slot that shall be written is pinned as soon as
we hear of it, in the order of the saves, and stays pinned until it is written: a later save takes another slot or is told that all are busy.

Written shards are told to the master, which says who commits when all are there (`SaveLine`). Without a master, or one that is away for
long, the writer of shard 0 waits for the manifests of the others and commits by itself. After a break the nodes decide with the master which
snapshot is worth writing; what may be is pinned before new workers start.

Nothing here can fail a job. Storage that cannot be written is reported once and tried again at the next save.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.break_points import BreakPoints, Held, copied_slots, describe, in_order, pin_held
from dlrover.agent.save_line import Relay, SaveLine
from dlrover.protocol.checkpoint_messages import (
    CheckpointCommitted,
    CheckpointFailed,
    CheckpointSettled,
    CommitCheckpoint,
    HeldSnapshot,
    OpenSnapshots,
    SaveDuties,
    SaveRequested,
    ShardWritten,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotTaken,
    TrainerNews,
)
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages import Round, WorldSpec
from dlrover.snapshot.commit import ANOTHER_JOB, latest_step
from dlrover.snapshot.contents import decode_contents
from dlrover.snapshot.direct_io import WriteOptions
from dlrover.snapshot.index import Home, home_path, remove_empty_root
from dlrover.snapshot.persist import (
    SaveRequest,
    finish,
    give_up,
    of_present_history,
    persist,
    pin_newest,
    read_request,
    release,
    wait_until_complete,
)
from dlrover.snapshot.segment import PinnedSlot, SlotName
from dlrover.snapshot.summing import Summer

log = logging.getLogger("dlrover.agent")

NICENESS = 5
"""Of the threads that sum and write: the training goes first."""
SAVING_FILE = "saving"
"""In the runtime directory while an agent that ends still writes: until when (monotonic seconds) it may."""
DRAIN_MARGIN = 30.0
"""Seconds on top of the patience of a node that leaves, for its workers to stop before it writes."""
_TRIES = 4
"""The master waits once for the shards and up to three times for a committer, each for a save's timeout."""


class SaverConfig(Struct, frozen=True, kw_only=True):
    root: str
    """Directory of this user's segments, in shared memory."""
    job: str
    launch: str
    runtime_dir: str
    is_saving_at_break_points: bool = False
    patience_at_end: float = 600.0
    """Seconds for queued saves when the job ends by itself. They are what the user asked for, so they may take their time."""
    patience_at_signal: float = 25.0
    """The same when somebody wants us gone; pods have 30 s."""
    bytes_per_second: float = 0.0
    """Limit of writing to storage while workers train; 0: none."""


class SaveGivenUp(DLRoverError):
    """The job has given the save up, for a reason that may lie on another node."""


class Saver:
    """One per agent. All methods are called by the event loop; storage and sums are left to threads."""

    def __init__(self, config: SaverConfig) -> None:
        self._config = config
        self._home: Home | None = None
        self._path: Path | None = None
        self._is_home_refused = False
        self._known: set[str] = set()
        """Attempt and shard of what is being written or was."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """One save after the other, in the order in which they were asked for: two writers would only share the disk."""
        self._to_sum: dict[str, SlotName] = {}
        """By segment: only the newest slot is worth it."""
        self._summing: asyncio.Task[None] | None = None
        self._reported: set[str] = set()
        self.on_summed: Callable[[SlotName], None] | None = None
        """Told of each slot that has its checksums, so that copies can be made."""
        self.tell_trainers: Callable[[TrainerNews], None] = lambda news: None
        """How the workers of this node are told."""
        self._line: SaveLine | None = None
        self._listening: asyncio.Task[None] | None = None
        self._requests: dict[tuple[str, str], tuple[SaveRequest, float]] = {}
        """By directory and attempt: what was written here and is not settled, and when that began."""
        self._world: WorldSpec | None = None
        self._breaks = BreakPoints()
        self._promised: Held = []
        self._request: SaveRequested | None = None
        """Somebody wants a storage save, and none was committed since we heard of it."""
        self._newest: dict[str, int] = {}
        """By segment: newest step that this round's workers saved."""
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._writer = _pool("dlrover-persist")
        # Apart: while it waits for other nodes the next save may be written. Two, for one may wait while the other is told to commit.
        self._committer = _pool("dlrover-commit", 2)
        self._summer = _pool("dlrover-sums")
        self._sums = Summer()
        (Path(config.runtime_dir) / SAVING_FILE).unlink(missing_ok=True)  # of an agent that was killed while it saved

    def home_for(self, node_rank: int) -> str:
        """Where this node's workers shall put their segments. What a former agent left there is ours from here on."""
        path = home_path(self._config.root, self._config.job, self._config.launch, node_rank)
        if path != self._path:
            if self._home is not None:
                self._home.close()
            self._path, self._home, self._is_home_refused = path, None, False
            if path.is_dir():
                self._own_home(node_rank)
                self._adopt()
        return str(path)

    def report_to(self, relay: Relay) -> None:
        """From here on the master is told, and asked who commits."""
        self._line = SaveLine(relay, self._on_duties, self._breaks.lose)

    def enter(self, world: WorldSpec) -> None:
        """The workers of this world are about to start."""
        self._world, self._newest = world, {}

    @property
    def newest_step(self) -> int | None:
        """The newest step that all saving workers of this node have in memory, as far as they told."""
        return min(self._newest.values(), default=None)

    def on_open(self, message: OpenSnapshots) -> None:
        self._listen()
        if self._path is not None and message.home == str(self._path):
            self._own_home(int(self._path.name.rsplit("-", 1)[1]))
        if self._request is not None:
            self.tell_trainers(self._request)  # whom it was told to is gone

    def on_saved(self, message: SnapshotSaved) -> SnapshotTaken | None:
        if self._path is None or Path(message.path).parent != self._path:
            return None  # not of our directory: whoever it is, it is not our worker
        taken = None
        if message.is_storage:
            pinned = pin_newest(message.path, message.slot, message.generation)
            if pinned is None:
                log.warning("the snapshot of step %d was overwritten before it could be written", message.step)
            else:
                self._enqueue(pinned)
                taken = SnapshotTaken(path=message.path, generation=message.generation)
        self._newest[message.path] = message.step
        name = SlotName(message.generation, message.step, 0, message.path, message.slot)
        self._to_sum[message.path] = name
        self._start_summing()
        return taken

    def on_failed(self, message: SnapshotFailed) -> None:
        """A worker could not save at all; the master shows it. The worker has said it aloud itself."""
        if self._line is None:
            return
        self._listen()
        failed = CheckpointFailed(
            directory=message.directory,
            attempt=f"memory-{message.step}",
            step=message.step,
            reason=message.reason,
            shard=0,
        )
        self._run(self._tell(self._line, failed), f"failure of step {message.step}")

    async def _tell(self, line: SaveLine, failed: CheckpointFailed) -> None:
        await line.tell(failed)

    def break_point(self) -> None:
        """The workers have failed or go: write their newest common snapshot, if the user wants that."""
        self._adopt()  # a trainer may have been killed between its save and its word to us
        if not self._config.is_saving_at_break_points or self._home is None:
            return
        if self._world is not None and self._world.group_world_size > 1:
            self._break_together(self._world)
        else:
            self._break_alone(self._home)

    def _break_alone(self, home: Home) -> None:
        by_shard = {each.global_rank: of_present_history(each.slots) for each in home.snapshots()}
        steps = [{slot.step for slot in slots} for slots in by_shard.values()]
        common = set.intersection(*steps) if steps else set()
        if not common:
            return
        newest = max(common)
        for slots in by_shard.values():
            name = max(slot for slot in slots if slot.step == newest)
            pinned = pin_newest(name.path, name.slot, name.generation)
            if pinned is not None:
                log.info("break point: step %d is written to storage", newest)
                self._enqueue(pinned)

    def promise(self) -> tuple[HeldSnapshot, ...]:
        """This node leaves for good: what it will write of its memory while it goes. It is held from now on."""
        if not self._config.is_saving_at_break_points or self._world is None or self._world.group_world_size < 2:
            return ()
        self._promised += self._pin_held()
        return describe([(pinned, request) for pinned, request in self._promised if request.is_writer])

    def _break_together(self, world: WorldSpec) -> None:
        """Other nodes hold the other shards: ask the master, holding what may be wanted. Without it, write all there is."""
        held = self._pin_held()
        for pinned, _request in self._promised:
            release(pinned)  # pinned again just above
        self._promised = []
        if held:
            self._run(self._write_decided(world.round, held), f"break point of round {world.round}")

    def _pin_held(self) -> Held:
        if self._home is None:
            return []
        slots = [name for shard in self._home.snapshots() for name in of_present_history(shard.slots)]
        own = pin_held(slots, self._read, lambda request: _key(request) in self._known)
        copies = pin_held(copied_slots(self._home.path), self._read, lambda request: _key(request) in self._known)
        # Of others' snapshots only what we are told to: their own node may write them, too.
        return in_order([*own, *((pinned, replace(request, is_writer=False)) for pinned, request in copies)])

    async def _write_decided(self, round_: Round, held: Held) -> None:
        for pinned, request in await self._breaks.choose(self._line, round_, held):
            if _key(request) in self._known:
                release(pinned)
                continue
            log.info("break point: step %d is written to storage", request.step)
            self._start(pinned, request, is_adopted=False)

    async def drain(self, *, is_hurried: bool) -> None:
        """Finish what is queued, within the patience; tell what is lost."""
        self._hurry.set()
        self._adopt()
        if not self._tasks:
            return
        patience = self._config.patience_at_signal if is_hurried else self._config.patience_at_end
        mark = Path(self._config.runtime_dir) / SAVING_FILE
        _write_mark(mark, time.monotonic() + patience)
        log.info("waiting for %d saves before this agent ends", len(self._tasks))
        left = await self._wait_for_tasks(time.monotonic() + patience)
        if left:
            log.error(
                "%d checkpoints could not be finished within %.0f s and are lost; storage is too slow. What was committed "
                "before stays.",
                len(left),
                patience,
            )
            self._stop.set()
            await asyncio.wait(left, timeout=1.0)
        mark.unlink(missing_ok=True)

    def close(self, *, is_removing: bool = False) -> None:
        """Let go; with `is_removing` the segments go as well, otherwise they are for the next agent or the launcher."""
        self._stop.set()
        if self._listening is not None:
            self._listening.cancel()
        if self._home is not None and is_removing:
            self._home.remove()
            remove_empty_root(self._config.root)
        elif self._home is not None:
            self._home.close()
        self._home = None
        for pool in (self._writer, self._committer, self._summer):
            pool.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_tasks(self, until: float) -> set[asyncio.Task[None]]:
        """One may begin others: a break point is decided first and written then."""
        while self._tasks and time.monotonic() < until:
            await asyncio.wait(self._tasks, timeout=until - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
        return set(self._tasks)

    def _own_home(self, node_rank: int) -> None:
        if self._home is not None or self._is_home_refused:
            return
        try:
            self._home = Home(self._config.root, self._config.job, self._config.launch, node_rank)
        except (OSError, DLRoverError) as error:
            self._is_home_refused = True
            log.error("snapshots are kept, but nobody owns them: %s", error)

    def _adopt(self) -> None:
        """What stands in the segments to be written, and we did not hear of: a former agent did, or nobody."""
        if self._home is None:
            return
        for shard in self._home.snapshots():
            for name in shard.slots:
                self._to_sum[name.path] = name
                pinned = pin_newest(name.path, name.slot, name.generation)
                if pinned is not None:
                    self._enqueue(pinned, is_adopted=True)
        self._start_summing()

    def _enqueue(self, pinned: PinnedSlot, *, is_adopted: bool = False) -> None:
        """Takes the pin over."""
        request = self._read(pinned)
        is_wanted = request is not None and request.is_writer and _key(request) not in self._known
        if request is None or not is_wanted or (is_adopted and not request.is_storage):
            release(pinned)
            return
        self._start(pinned, request, is_adopted)

    def _read(self, pinned: PinnedSlot) -> SaveRequest | None:
        try:
            return read_request(decode_contents(pinned.sections()))
        except DLRoverError as error:
            self._report("unreadable", f"a snapshot cannot be written: {error}")
            return None

    def _start(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        self._known.add(_key(request))
        self._run(self._save(pinned, request, is_adopted), f"save {request.step}")

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        """Something that the end of this agent has to wait for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        loop = asyncio.get_running_loop()
        begun_at = time.monotonic()
        try:
            async with self._turn:
                try:
                    is_due = not is_adopted or await loop.run_in_executor(self._writer, _is_due, request)
                    if not is_due:
                        return
                    limit = self._config.bytes_per_second or None
                    options = WriteOptions(nice=NICENESS, bytes_per_second=limit, hurry=self._hurry)
                    round_ = Round(pinned.record.round)
                    digest = await loop.run_in_executor(
                        self._writer, lambda: persist(pinned, request, options=options, stop=self._stop)
                    )
                finally:
                    release(pinned)
            await self._settle(request, round_, digest, is_adopted, begun_at)
        except (OSError, DLRoverError) as error:
            self._known.discard(_key(request))  # a break point may try it again
            self._report(
                f"{type(error).__name__} {getattr(error, 'errno', '')}{getattr(error, 'code', '')} {request.directory}",
                f"the checkpoint of step {request.step} in {request.directory} was not written: {error}. "
                "Training goes on, and the next save is tried as usual.",
            )
            await self._tell_failure(request, error)
            return
        except Exception:  # the root of a task: a bug here must neither be silent nor end the job
            log.exception(
                "bug in the saver: the checkpoint of step %d was not written. Training goes on.", request.step
            )
            return
        self._reported = {
            key for key in self._reported if ANOTHER_JOB in key
        }  # it goes on, however often we are quicker
        log.info("step %d is in %s after %.2f s", request.step, request.directory, time.monotonic() - begun_at)

    async def _settle(
        self, request: SaveRequest, round_: Round, digest: str, is_adopted: bool, begun_at: float
    ) -> None:
        """The shard is written: see to it that the attempt becomes a checkpoint. Raises when it does not."""
        settled = None
        if self._line is not None and round_ > 0:
            self._listen()
            self._requests[(request.directory, request.attempt)] = (request, begun_at)
            written = ShardWritten(
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
            settled = await self._line.report(written, patience=_TRIES * max(request.save_timeout, 60.0))
        if settled is not None:
            self._requests.pop((request.directory, request.attempt), None)
            if settled.is_committed:
                return
            if request.is_committer:
                async with self._turn:  # this node may still be writing another shard of it
                    await asyncio.get_running_loop().run_in_executor(self._committer, give_up, request)
            raise SaveGivenUp(settled.reason)
        self._requests.pop((request.directory, request.attempt), None)
        if not request.is_committer:
            return
        await asyncio.get_running_loop().run_in_executor(self._committer, self._commit, request, is_adopted)
        self.tell_trainers(_outcome(request, "", time.monotonic() - begun_at))
        if self._line is not None:
            told = CheckpointCommitted(
                directory=request.directory,
                attempt=request.attempt,
                step=request.step,
                round=round_,
                is_by_files=True,
            )
            await self._line.tell(told)

    async def _tell_failure(self, request: SaveRequest, error: Exception) -> None:
        """So that people hear of it and nobody waits for this shard."""
        self.tell_trainers(_outcome(request, str(error), 0.0))
        if self._line is None or isinstance(error, SaveGivenUp):
            return
        failed = CheckpointFailed(
            directory=request.directory,
            attempt=request.attempt,
            step=request.step,
            reason=str(error) or type(error).__name__,
            shard=request.shard,
            num_shards=request.num_shards,
        )
        await self._line.tell(failed)

    # What the master wants.

    def _listen(self) -> None:
        if self._line is not None and self._listening is None:
            self._listening = asyncio.create_task(self._line.run(), name="save duties")

    def _on_duties(self, duties: SaveDuties) -> None:
        for settled in duties.settled:
            self._on_settled(settled)
        for duty in duties.commits:
            self._run(self._obey(duty), f"commit {duty.step}")
        self._breaks.hear(duties.persists)
        if duties.request is not None:
            self._request = duties.request
            self.tell_trainers(duties.request)

    def _on_settled(self, settled: CheckpointSettled) -> None:
        request, begun_at = self._requests.pop((settled.directory, settled.attempt), (None, 0.0))
        seconds = 0.0 if request is None else time.monotonic() - begun_at
        self.tell_trainers(replace(settled, seconds=seconds))
        if settled.is_committed and self._request is not None and settled.number > self._request.number:
            self._request = None

    async def _obey(self, duty: CommitCheckpoint) -> None:
        """Commit what all shards were reported of."""
        assert self._line is not None, "the master was heard"
        request, _begun_at = self._requests.get((duty.directory, duty.attempt), (None, 0.0))
        try:
            if request is None:
                raise SaveGivenUp("the node that was to commit knows nothing of the save any more")
            await asyncio.get_running_loop().run_in_executor(self._committer, self._commit_as_told, request, duty)
        except (OSError, DLRoverError) as error:
            reason = str(error) or type(error).__name__
            failed = CheckpointFailed(
                directory=duty.directory,
                attempt=duty.attempt,
                step=duty.step,
                reason=reason,
                num_shards=duty.num_shards,
            )
            await self._line.tell(failed)
            return
        except Exception:  # the root of a task: a bug here must neither be silent nor end the job
            log.exception("bug in the saver: step %d was not committed. Training goes on.", duty.step)
            return
        await self._line.tell(CheckpointCommitted(directory=duty.directory, attempt=duty.attempt, step=duty.step))

    def _commit_as_told(self, request: SaveRequest, duty: CommitCheckpoint) -> None:
        if duty.is_waiting:
            patience = min(request.save_timeout, self._config.patience_at_signal + DRAIN_MARGIN)
            wait_until_complete(request, wait=self._stop.wait, patience=patience)
        finish(request, digest=duty.digest, is_newest=duty.is_newest)

    def _commit(self, request: SaveRequest, is_adopted: bool) -> None:
        """By the files alone."""
        try:
            wait_until_complete(request, wait=self._stop.wait)
        except (TimeoutError, DLRoverError):
            give_up(request)
            raise
        if is_adopted and not _is_due(request):
            give_up(request)  # a newer one was on its way: the tracker must not go back
            return
        finish(request)

    def _start_summing(self) -> None:
        if self._to_sum and (self._summing is None or self._summing.done()):
            self._summing = asyncio.create_task(self._sum(), name="sums")

    async def _sum(self) -> None:
        loop = asyncio.get_running_loop()
        while self._to_sum:
            _path, name = self._to_sum.popitem()
            try:
                is_summed = await loop.run_in_executor(self._summer, self._sums.sum, name)
                if is_summed and self.on_summed is not None:
                    self.on_summed(name)
            except OSError as error:
                self._report("sums", f"a snapshot could not be summed: {error}")

    def _report(self, key: str, message: str) -> None:
        """Once, until a save succeeds again."""
        if key in self._reported:
            log.info("%s", message)
        else:
            self._reported.add(key)
            log.error("%s", message)


def _is_due(request: SaveRequest) -> bool:
    """Whether a save that an earlier agent was asked for is still to be done: nothing as new has been committed."""
    newest = latest_step(request.open_storage(), request.directory)
    return newest is None or newest < request.step


def _key(request: SaveRequest) -> str:
    return f"{request.attempt}/{request.shard}"


def _outcome(request: SaveRequest, reason: str, seconds: float) -> CheckpointSettled:
    return CheckpointSettled(
        step=request.step,
        attempt=request.attempt,
        is_committed=not reason,
        reason=reason,
        directory=request.directory,
        seconds=seconds,
    )


def _pool(name: str, num_threads: int = 1) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=_be_nice)


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _write_mark(path: Path, until: float) -> None:
    try:
        path.write_text(f"{until:.3f}")
    except OSError as error:
        log.warning("the launcher cannot be told to wait for us: %s", error)
