"""
The saver of a node: owns the segments of its workers, sums them, and writes to storage what was asked for.

Trainers copy and train on; everything slow happens here. What there is to do stands in the segments, so an agent that is started
again after a kill finds the saves that its predecessor did not finish. A slot that shall be written is pinned as soon as
we hear of it, in the order of the saves, and stays pinned until it is written: a later save takes another slot or is told that all are busy.

Written shards are told to the master, which says who commits when all are there (`DutyLine`). Without a master, or one that is away for
long, the writer of shard 0 waits for the manifests of the others and commits by itself. After a break the nodes decide with the master which
snapshot is worth writing; what may be is pinned before new workers start.

Nothing here can fail a job. Storage that cannot be written is reported once and tried again at the next save.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.checkpoints.break_points import (
    BreakPointSaves,
    Held,
    copied_slots,
    describe,
    in_order,
    pin_held,
    pin_newest_common,
)
from dlrover.agent.checkpoints.commits import NICENESS, NodeCommits, is_due, nice_pool
from dlrover.agent.checkpoints.requests import SlotRequests
from dlrover.agent.checkpoints.sums import SlotSums
from dlrover.agent.checkpoints.told_failures import ToldFailures
from dlrover.host.edges import logged
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.checkpoint import (
    HeldSnapshot,
    OpenSnapshots,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotTaken,
)
from dlrover.protocol.messages.job import Round, WorldSpec
from dlrover.snapshot.files.direct_io import WriteOptions
from dlrover.snapshot.memory.homes import Home, home_path, remove_empty_root
from dlrover.snapshot.memory.segment import PinnedSlot, SlotName
from dlrover.snapshot.storage.persist import (
    SaveRequest,
    of_present_history,
    persist,
    pin_newest,
    release,
)

log = logging.getLogger("dlrover.agent")

SAVING_FILE = "saving"
"""In the runtime directory while an agent that ends still writes: until when (monotonic seconds) it may."""


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
    """The same when the platform wants us gone; pods have 30 s."""
    bytes_per_second: float = 0.0
    """Limit of writing to storage while workers train; 0: none."""


class OwnHome:
    """The directory with the segments of this node's workers, owned by this agent from the moment when there is something in it."""

    def __init__(self, root: str, job: str, launch: str) -> None:
        self._root, self._job, self._launch = root, job, launch
        self._node_rank = 0
        self._is_refused = False
        self.path: Path | None = None
        self.home: Home | None = None
        """None: not owned."""

    def move_to(self, node_rank: int) -> bool:
        """Whether that is another directory than before, where a former agent may have left something."""
        path = home_path(self._root, self._job, self._launch, node_rank)
        if path == self.path:
            return False
        if self.home is not None:
            self.home.close()
        self.path, self.home, self._node_rank, self._is_refused = path, None, node_rank, False
        if path.is_dir():
            self.take()
        return self.home is not None

    def take(self) -> None:
        if self.home is not None or self._is_refused:
            return
        try:
            self.home = Home(self._root, self._job, self._launch, self._node_rank)
        except (OSError, DLRoverError) as error:
            self._is_refused = True
            log.error(
                "this agent could not register itself as the owner of its snapshots, so a later agent may not "
                "find them: %s",
                error,
            )

    def close(self, *, is_removing: bool) -> None:
        if self.home is not None and is_removing:
            self.home.remove()
            remove_empty_root(self._root)
        elif self.home is not None:
            self.home.close()
        self.home = None


class Saver:
    """One per agent. All methods are called by the event loop; storage and sums are left to threads."""

    def __init__(self, config: SaverConfig) -> None:
        self._config = config
        self._own = OwnHome(config.root, config.job, config.launch)
        self._known: set[str] = set()
        """Attempt and shard of what is being written or was."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """One save after the other, in the order in which they were asked for: two writers would only share the disk."""
        self._failures = ToldFailures()
        self.sums = SlotSums(lambda message: self._failures.tell("sums", message))
        self._world: WorldSpec | None = None
        self._breaks = BreakPointSaves()
        self._promised: Held = []
        self._newest: dict[str, int] = {}
        """By segment: newest step that this round's workers saved."""
        self._requests = SlotRequests(self._failures.tell)
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._writer = nice_pool("dlrover-persist")
        self.commits = NodeCommits(
            self._breaks, self._turn, self._stop, run=self._run, patience_at_signal=config.patience_at_signal
        )
        """Say to the master and to the workers of this node what became of a save."""
        (Path(config.runtime_dir) / SAVING_FILE).unlink(missing_ok=True)  # of an agent that was killed while it saved

    def home_for(self, node_rank: int) -> str:
        """Where this node's workers shall put their segments. What a former agent left there is ours from here on."""
        if self._own.move_to(node_rank):
            self._adopt()
        return str(self._own.path)

    def enter(self, world: WorldSpec) -> None:
        """The workers of this world are about to start."""
        self._world, self._newest = world, {}

    @property
    def newest_step(self) -> int | None:
        """The newest step that all saving workers of this node have in memory, as far as they told."""
        return min(self._newest.values(), default=None)

    def has_whole_state(self) -> bool:
        """Whether some snapshot here has the pieces of all ranks, or there is none at all."""
        if self._own.home is None:
            return True
        found: dict[int, set[int]] = {}
        num_shards = 0
        for shard in self._own.home.snapshots():
            for name in of_present_history(shard.slots):
                pinned = pin_newest(name.path, name.slot, name.generation)
                request = None if pinned is None else self._requests.read(pinned)
                if pinned is not None:
                    release(pinned)
                if request is not None:
                    found.setdefault(request.step, set()).add(request.shard)
                    num_shards = request.num_shards
        return not found or any(len(pieces) == num_shards for pieces in found.values())

    def on_open(self, message: OpenSnapshots) -> None:
        if self._own.path is not None and message.home == str(self._own.path):
            self._own.take()
            try:
                if self._requests.name_place(message.place):
                    self._adopt()
            except DLRoverError as error:
                log.warning("%s", error)
        self.commits.greet()

    def on_saved(self, message: SnapshotSaved) -> SnapshotTaken | None:
        if self._own.path is None or Path(message.path).parent != self._own.path:
            return None  # not of our directory: whoever it is, it is not our worker
        self._requests.is_own_from(message.path, message.generation)
        taken = None
        if message.is_storage:
            pinned = pin_newest(message.path, message.slot, message.generation)
            if pinned is None:
                log.warning(
                    "step %d is not written to storage, because a newer save overwrote its snapshot first",
                    message.step,
                )
            else:
                self._enqueue(pinned)
                taken = SnapshotTaken(path=message.path, generation=message.generation)
        self._newest[message.path] = message.step
        self.sums.add(SlotName(message.generation, message.step, 0, message.path, message.slot))
        self.sums.start()
        return taken

    def on_failed(self, message: SnapshotFailed) -> None:
        """A worker could not save at all; the master shows it. The worker has said it aloud itself."""
        self._run(self.commits.tell_of(message), f"failure of step {message.step}")

    def break_point(self) -> None:
        """The workers have failed or go: write their newest common snapshot, if the user wants that."""
        self._adopt()  # a trainer may have been killed between its save and its word to us
        if not self._config.is_saving_at_break_points or self._own.home is None:
            return
        if self._world is None or self._world.group_world_size == 1:
            for pinned in pin_newest_common(self._own.home):
                log.info("save at break point: step %d is written to storage", pinned.record.step)
                self._enqueue(pinned)
            return
        # Other nodes hold the other shards: ask the master, holding what may be wanted. Without it, write all there is.
        held = self._pin_held()
        for pinned, _request in self._promised:
            release(pinned)  # pinned again just above
        self._promised = []
        if held:
            round_ = self._world.round
            self._run(self._write_decided(round_, held), f"break point of round {round_}")

    def promise(self) -> tuple[HeldSnapshot, ...]:
        """This node leaves for good: what it will write of its memory while it goes. It is held from now on."""
        if not self._config.is_saving_at_break_points or self._world is None or self._world.group_world_size < 2:
            return ()
        self._promised += self._pin_held()
        return describe([(pinned, request) for pinned, request in self._promised if request.is_writer])

    def _pin_held(self) -> Held:
        if self._own.home is None:
            return []
        slots = [name for shard in self._own.home.snapshots() for name in of_present_history(shard.slots)]
        own = pin_held(slots, self._requests.read, lambda request: _key(request) in self._known)
        copies = pin_held(
            copied_slots(self._own.home.path), self._requests.read, lambda request: _key(request) in self._known
        )
        # Of others' snapshots only what we are told to: their own node may write them, too.
        return in_order([*own, *((pinned, replace(request, is_writer=False)) for pinned, request in copies)])

    async def _write_decided(self, round_: Round, held: Held) -> None:
        for pinned, request in await self._breaks.choose(self.commits.line, round_, held):
            if _key(request) in self._known:
                release(pinned)
                continue
            log.info("save at break point: step %d is written to storage", request.step)
            self._start(pinned, request, is_adopted=False)

    async def drain(self, *, is_hurried: bool) -> bool:
        """Finish what is queued, within the patience. False: something is lost, and the log says what."""
        self._hurry.set()
        self._adopt()
        if not self._tasks:
            return True
        patience = self._config.patience_at_signal if is_hurried else self._config.patience_at_end
        mark = Path(self._config.runtime_dir) / SAVING_FILE
        write_mark(mark, time.monotonic() + patience)
        log.info("this agent waits for %d saves before it ends", len(self._tasks))
        left = await _wait_for(self._tasks, until=time.monotonic() + patience)
        if left:
            log.error(
                "%d checkpoints were not finished within %.0f s and are lost (%s), because storage is too "
                "slow. Checkpoints that were committed before are kept.",
                len(left),
                patience,
                ", ".join(sorted(task.get_name() for task in left)),
            )
            self._stop.set()
            await asyncio.wait(left, timeout=1.0)
        mark.unlink(missing_ok=True)
        return not left

    def close(self, *, is_removing: bool = False) -> None:
        """Let go; with `is_removing` the segments go as well, otherwise they are for the next agent or the launcher."""
        self._stop.set()
        self.commits.close()
        self._own.close(is_removing=is_removing)
        self._writer.shutdown(wait=False, cancel_futures=True)
        self.sums.close()

    def _adopt(self) -> None:
        """What stands in the segments to be written, and we did not hear of: a former agent did, or none."""
        if self._own.home is None:
            return
        for shard in self._own.home.snapshots():
            for name in shard.slots:
                self.sums.add(name)
                pinned = pin_newest(name.path, name.slot, name.generation)
                if pinned is not None:
                    self._enqueue(pinned, is_adopted=True)
        self.sums.start()

    def _enqueue(self, pinned: PinnedSlot, *, is_adopted: bool = False) -> None:
        """Takes the pin over."""
        request = self._requests.read(pinned)
        is_wanted = request is not None and request.is_writer and _key(request) not in self._known
        if request is None or not is_wanted or (is_adopted and not request.is_storage):
            release(pinned)
            return
        self._start(pinned, request, is_adopted)

    def _start(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        self._known.add(_key(request))
        self._run(self._save(pinned, request, is_adopted), f"save of step {request.step}")

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        """Something that the end of this agent has to wait for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        text = "The checkpoint of step %d was not written because of a bug in DLRover. Training continues."
        with logged(log, text, request.step):  # a bug here must neither be silent nor end the job
            loop = asyncio.get_running_loop()
            begun_at = time.monotonic()
            try:
                async with self._turn:
                    try:
                        if is_adopted and not await loop.run_in_executor(self._writer, is_due, request):
                            return
                        limit = self._config.bytes_per_second or None
                        options = WriteOptions(nice=NICENESS, bytes_per_second=limit, hurry=self._hurry)
                        round_ = Round(pinned.record.round)
                        is_foreign = self._requests.is_foreign(pinned)
                        digest = await loop.run_in_executor(
                            self._writer,
                            lambda: persist(pinned, request, options=options, stop=self._stop, is_foreign=is_foreign),
                        )
                    finally:
                        release(pinned)
                await self.commits.settle(request, round_, digest, begun_at, is_adopted=is_adopted)
            except (OSError, DLRoverError) as error:
                self._known.discard(_key(request))  # a break point may try it again
                self._failures.tell(
                    f"{type(error).__name__} {getattr(error, 'errno', '')}{getattr(error, 'code', '')} {request.directory}",
                    f"the checkpoint of step {request.step} in {request.directory} was not written: {error}. "
                    "Training continues, and the next save starts as usual.",
                )
                await self.commits.tell_failure(request, error)
                return
            self._failures.forget(begun_at)
            log.info(
                "step %d was written to %s in %.2f s", request.step, request.directory, time.monotonic() - begun_at
            )


async def _wait_for(tasks: set[asyncio.Task[None]], *, until: float) -> set[asyncio.Task[None]]:
    """Those that are left then. One may begin others: a break point is decided first and written then."""
    while tasks and time.monotonic() < until:
        await asyncio.wait(tasks, timeout=until - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
    return set(tasks)


def _key(request: SaveRequest) -> str:
    return f"{request.attempt}/{request.shard}"


def write_mark(path: Path, until: float) -> None:
    """Whole at every instant: launcher and platform read it while we renew it."""
    partial = path.with_suffix(".part")
    try:
        partial.write_text(f"{until:.3f}", encoding="ascii")
        partial.rename(path)
    except OSError as error:
        log.warning(
            "the agent could not record the deadline of the last saves, so the launcher may end before they "
            "are in storage: %s",
            error,
        )
