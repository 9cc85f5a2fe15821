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
from collections.abc import Callable, Coroutine
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from dlrover.agent.checkpoints.break_points import BreakPointSaves, Held, copied_slots, describe, in_order, pin_held
from dlrover.agent.checkpoints.commits import NICENESS, NodeCommits, is_due, nice_pool
from dlrover.agent.checkpoints.duties import DutyRelay
from dlrover.host.edges import logged
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.checkpoint import (
    HeldSnapshot,
    OpenSnapshots,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotTaken,
    TrainerNews,
)
from dlrover.protocol.messages.job import Round, WorldSpec
from dlrover.snapshot.files.direct_io import WriteOptions
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.homes import Home, home_path, remove_empty_root
from dlrover.snapshot.memory.segment import PinnedSlot, SlotName
from dlrover.snapshot.storage.persist import (
    SaveRequest,
    of_present_history,
    persist,
    pin_newest,
    read_request,
    release,
)
from dlrover.snapshot.storage.places import NotNamed, SavePlaces
from dlrover.snapshot.storage.summing import Summer

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
        self._reported: dict[str, float] = {}
        """Kinds of failures, and when people were told of each."""
        self.on_summed: Callable[[SlotName], None] | None = None
        """Told of each slot that has its checksums, so that copies can be made."""
        self._world: WorldSpec | None = None
        self._breaks = BreakPointSaves()
        self._promised: Held = []
        self._newest: dict[str, int] = {}
        """By segment: newest step that this round's workers saved."""
        self._places = SavePlaces()
        self._own_from: dict[str, int] = {}
        """By segment: the first generation that a worker of this node told us of. What is older may have come from another node."""
        self._has_refused = False
        """Whether something of another node waits for a worker of this node to name the same."""
        self._stop = threading.Event()
        self._hurry = threading.Event()
        self._writer = nice_pool("dlrover-persist")
        self._summer = nice_pool("dlrover-sums")
        self._commits = NodeCommits(
            self._breaks, self._turn, self._stop, run=self._run, patience_at_signal=config.patience_at_signal
        )
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

    def report_to(self, relay: DutyRelay) -> None:
        """From here on the master is told, and asked who commits."""
        self._commits.report_to(relay)

    def tell_trainers_by(self, tell: Callable[[TrainerNews], None]) -> None:
        """How the workers of this node are told."""
        self._commits.tell_trainers = tell

    def enter(self, world: WorldSpec) -> None:
        """The workers of this world are about to start."""
        self._world, self._newest = world, {}

    @property
    def newest_step(self) -> int | None:
        """The newest step that all saving workers of this node have in memory, as far as they told."""
        return min(self._newest.values(), default=None)

    def has_whole_state(self) -> bool:
        """Whether some snapshot here has the pieces of all ranks, or there is none at all."""
        if self._home is None:
            return True
        found: dict[int, set[int]] = {}
        num_shards = 0
        for shard in self._home.snapshots():
            for name in of_present_history(shard.slots):
                pinned = pin_newest(name.path, name.slot, name.generation)
                request = None if pinned is None else self._read(pinned)
                if pinned is not None:
                    release(pinned)
                if request is not None:
                    found.setdefault(request.step, set()).add(request.shard)
                    num_shards = request.num_shards
        return not found or any(len(pieces) == num_shards for pieces in found.values())

    def on_open(self, message: OpenSnapshots) -> None:
        if self._path is not None and message.home == str(self._path):
            self._own_home(int(self._path.name.rsplit("-", 1)[1]))
            self._name_place(message.place)
        self._commits.greet()

    def on_saved(self, message: SnapshotSaved) -> SnapshotTaken | None:
        if self._path is None or Path(message.path).parent != self._path:
            return None  # not of our directory: whoever it is, it is not our worker
        self._own_from.setdefault(message.path, message.generation)
        taken = None
        if message.is_storage:
            pinned = pin_newest(message.path, message.slot, message.generation)
            if pinned is None:
                log.warning(
                    "step %d does not reach storage: a newer save overwrote its snapshot before it was written",
                    message.step,
                )
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
        self._run(self._commits.tell_of(message), f"failure of step {message.step}")

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
        for pinned, request in await self._breaks.choose(self._commits.line, round_, held):
            if _key(request) in self._known:
                release(pinned)
                continue
            log.info("break point: step %d is written to storage", request.step)
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
        log.info("waiting for %d saves before this agent ends", len(self._tasks))
        left = await self._wait_for_tasks(time.monotonic() + patience)
        if left:
            log.error(
                "%d checkpoints could not be finished within %.0f s and are lost (%s); storage is too slow. What was committed "
                "before stays.",
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
        self._commits.close()
        if self._home is not None and is_removing:
            self._home.remove()
            remove_empty_root(self._config.root)
        elif self._home is not None:
            self._home.close()
        self._home = None
        for pool in (self._writer, self._summer):
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
            log.error(
                "this agent cannot register as the owner of its snapshots, so a later agent may not find them: %s",
                error,
            )

    def _adopt(self) -> None:
        """What stands in the segments to be written, and we did not hear of: a former agent did, or none."""
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

    def _name_place(self, place: bytes) -> None:
        """A worker of this node says where it saves. What another node sent before may be allowed by that."""
        try:
            if place and self._places.add(place) and self._has_refused:
                self._has_refused = False
                self._adopt()
        except DLRoverError as error:
            log.warning("%s", error)

    def _read(self, pinned: PinnedSlot) -> SaveRequest | None:
        try:
            request = read_request(decode_contents(pinned.sections()))
            return self._places.restrict(request) if request is not None and self._is_foreign(pinned) else request
        except NotNamed as error:
            self._has_refused = True
            self._report(f"not named {error}", f"step {pinned.record.step} is not written by this node: {error}")
            return None
        except DLRoverError as error:
            self._report("unreadable", f"a snapshot cannot be written: {error}")
            return None

    def _is_foreign(self, pinned: PinnedSlot) -> bool:
        """Whether the slot came from another node. A worker may have saved into the file since: it told us from which generation on."""
        own_from = self._own_from.get(str(pinned.segment.path))
        return pinned.segment.owner.local_rank < 0 and (own_from is None or pinned.record.generation < own_from)

    def _start(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        self._known.add(_key(request))
        self._run(self._save(pinned, request, is_adopted), f"save of step {request.step}")

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        """Something that the end of this agent has to wait for."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _save(self, pinned: PinnedSlot, request: SaveRequest, is_adopted: bool) -> None:
        text = "bug in the saver: the checkpoint of step %d was not written. Training goes on."
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
                        is_foreign = self._is_foreign(pinned)
                        digest = await loop.run_in_executor(
                            self._writer,
                            lambda: persist(pinned, request, options=options, stop=self._stop, is_foreign=is_foreign),
                        )
                    finally:
                        release(pinned)
                await self._commits.settle(request, round_, digest, begun_at, is_adopted=is_adopted)
            except (OSError, DLRoverError) as error:
                self._known.discard(_key(request))  # a break point may try it again
                self._report(
                    f"{type(error).__name__} {getattr(error, 'errno', '')}{getattr(error, 'code', '')} {request.directory}",
                    f"the checkpoint of step {request.step} in {request.directory} was not written: {error}. "
                    "Training goes on, and the next save is tried as usual.",
                )
                await self._commits.tell_failure(request, error)
                return
            self._reported = {
                key: at
                for key, at in self._reported.items()
                if at > begun_at  # storage failed while this save only waited for the others
                or ErrorCode.ANOTHER_JOB in key  # it goes on, however often we are quicker
            }
            log.info("step %d is in %s after %.2f s", request.step, request.directory, time.monotonic() - begun_at)

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
                self._report("sums", f"the checksums of a snapshot could not be made: {error}")

    def _report(self, key: str, message: str) -> None:
        """Once, until a save that began later succeeds."""
        if key in self._reported:
            log.info("%s", message)
        else:
            self._reported[key] = time.monotonic()
            log.error("%s", message)


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
            "the agent cannot write the deadline of the last saves, so the launcher may end before they are in "
            "storage: %s",
            error,
        )
