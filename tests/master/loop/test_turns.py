"""
What happens inside and between the loop's turns, with a disk and a clock that do as they are told.

The core and the journal are real; streams note what is sent into them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio

from dlrover.core.commit_order import RecordBatch
from dlrover.core.job import Job
from dlrover.core.outcome import Origin, Outcome
from dlrover.master.clock import MasterClock
from dlrover.master.diagnosis.driver import WatchDriver
from dlrover.master.journal.journal import Fenced
from dlrover.master.journal.journal_thread import JournalThread
from dlrover.master.loop.loop import MasterLoop
from dlrover.master.loop.stalls import PULSE, LoopWatch
from dlrover.master.loop.turn import COMING_BACK
from dlrover.master.service import end_job
from dlrover.protocol.errors import Unavailable
from dlrover.protocol.messages.frames import Answer, Beat, FromMaster, Push, Refusal, Request
from dlrover.protocol.messages.job import (
    MAX_REQUESTS_IN_WORK,
    AgentCommand,
    AskStatus,
    Attach,
    Attached,
    Command,
    DeadlinePassed,
    Desired,
    Done,
    ExitReason,
    FailureKind,
    Heartbeat,
    Incarnation,
    JobStatus,
    JobTerms,
    JoinRendezvous,
    LeaveJob,
    LeaveReason,
    Limits,
    Micros,
    NodeId,
    NodeRank,
    Ping,
    Query,
    Reply,
    ReportFailure,
    Round,
    Run,
    StopJob,
    Wait,
    WorkerFailure,
)
from dlrover.protocol.rpc.server import AgentStream

T = TypeVar("T")

QUICK = JobTerms(limits=Limits(min_nodes=1, max_nodes=3, first_call=0.0, last_call=0.0))


class Time:
    """Stands still until it is told to move."""

    def __init__(self) -> None:
        self._ns = 0
        self.num_reads = 0

    def read(self) -> int:
        self.num_reads += 1
        return self._ns

    def move(self, seconds: float) -> None:
        self._ns += int(seconds * 1e9)


class Disk(JournalThread):
    """A real journal that can be held, refused, or slow."""

    is_open: asyncio.Event
    """Cleared: a write waits before it begins."""
    is_writing: asyncio.Event
    watch: Time
    seconds_per_write = 0.0
    is_full = False

    async def append(self, batch: RecordBatch) -> None:
        await self._pass()
        if self.is_full:
            raise Unavailable("The disk is full.", 1.0)
        await super().append(batch)

    async def check_fence(self) -> None:
        await self._pass()
        await super().check_fence()

    async def probe(self, size_bytes: int) -> None:
        if self.is_full:
            raise Unavailable("The disk is full.", 1.0)
        await super().probe(size_bytes)

    async def _pass(self) -> None:
        self.is_writing.set()
        await self.is_open.wait()
        self.watch.move(self.seconds_per_write)


class Stream(AgentStream):
    """One agent, as far as the loop can tell."""

    def __init__(self, master_loop: MasterLoop) -> None:
        super().__init__("a test")
        self._master_loop = master_loop
        self._num_sent = 0
        self._sequence = 0
        self._replies: dict[int, asyncio.Future[Answer | Refusal]] = {}
        self.pushed: list[Desired] = []
        self.attached = Attached(
            node=NodeId(-1),
            node_rank=NodeRank(-1),
            incarnation=Incarnation(-1),
            master_epoch=0,
            job_name="",
            now=Micros(0),
            desired=Desired(number=0, master_epoch=0, wish=Wait("")),
        )

    def send(self, parcel: FromMaster) -> None:
        match parcel:
            case Answer(id=number) | Refusal(id=number):
                self._replies[number].set_result(parcel)
            case Push(desired=desired):
                self.pushed.append(desired)

    def ask(self, body: AgentCommand | Query, *, sequence: int | None = None) -> asyncio.Future[Answer | Refusal]:
        self._num_sent += 1
        if sequence is None and not isinstance(body, Attach | Query):
            self._sequence += 1
            sequence = self._sequence
        self._replies[self._num_sent] = asyncio.get_running_loop().create_future()
        self._master_loop.receive(self, [Request(id=self._num_sent, body=body, sequence=sequence or 0)])
        return self._replies[self._num_sent]

    async def attach(
        self, launch: str, *, incarnation: int = 0, rank: int | None = None, terms: JobTerms = QUICK
    ) -> Attached:
        answer = await soon(self.ask(an_attach(launch, incarnation=incarnation, rank=rank, terms=terms)))
        assert isinstance(answer, Answer), answer
        assert isinstance(answer.body, Attached)
        self.attached = answer.body
        return answer.body

    def a_join(self, *, round_number: int = 1) -> JoinRendezvous:
        me = self.attached
        return JoinRendezvous(
            node=me.node,
            incarnation=me.incarnation,
            round=Round(round_number),
            local_world_size=1,
            offer=f"host-{me.node}:{self._num_sent}",
        )

    def leave(self) -> asyncio.Future[Answer | Refusal]:
        me = self.attached
        return self.ask(LeaveJob(node=me.node, incarnation=me.incarnation, reason=LeaveReason.PREEMPTED))

    def beat(self) -> None:
        self._master_loop.receive(
            self, [Beat(Heartbeat(node=self.attached.node, incarnation=self.attached.incarnation))]
        )

    def close(self) -> None:
        self._master_loop.closed(self)


def an_attach(launch: str, *, incarnation: int = 0, rank: int | None = None, terms: JobTerms = QUICK) -> Attach:
    return Attach(
        launch=launch,
        host=f"host-{launch}",
        terms=terms,
        local_world_size=1,
        node_rank=None if rank is None else NodeRank(rank),
        incarnation=Incarnation(incarnation),
    )


async def soon(waited: Awaitable[T]) -> T:
    return await asyncio.wait_for(waited, 10)


class Room:
    """A loop at work. However slow the machine is, it stands still only when it is told to."""

    def __init__(
        self, master_loop: MasterLoop, disk: Disk, watch: Time, pulse: Time, working: asyncio.Future[None]
    ) -> None:
        self.master_loop = master_loop
        self.disk = disk
        self.watch = watch
        self._pulse = pulse
        self.working = working

    def stream(self) -> Stream:
        return Stream(self.master_loop)

    async def status(self) -> JobStatus:
        status = await soon(self.master_loop.ask(AskStatus()))
        assert isinstance(status, JobStatus)
        return status

    async def turn(self) -> None:
        """One at least."""
        await soon(self.master_loop.ask(Ping()))

    async def hold_a_write(self) -> asyncio.Future[Reply]:
        """A turn that stays in its write until `disk.is_open` is set: what comes meanwhile waits for the next one."""
        self.disk.is_open.clear()
        self.disk.is_writing.clear()
        held = asyncio.ensure_future(self.master_loop.ask(Ping()))
        await soon(self.disk.is_writing.wait())
        return held

    def stand_still(self, seconds: float) -> None:
        """As if the process were stopped: what was sent meanwhile is unread. The clock of the job is moved apart from this."""
        self._pulse.move(PULSE + seconds)

    async def wait_until_written(self) -> None:
        """The journal is tried once a second; the turn after that serves again."""
        async with asyncio.timeout(10):
            while self.master_loop._durable.is_failing:
                self.watch.move(1.0)
                await self.turn()


MakeRoom = Callable[..., Awaitable[Room]]


@pytest_asyncio.fixture
async def make_room(tmp_path: Path) -> AsyncIterator[MakeRoom]:
    rooms: list[Room] = []

    async def make(*, make_job: Callable[[Job], Job] = lambda job: job) -> Room:
        watch, pulse = Time(), Time()
        disk = await Disk.open(tmp_path / "journal.sqlite", job_name="job")
        assert isinstance(disk, Disk)
        disk.is_open, disk.is_writing, disk.watch = asyncio.Event(), asyncio.Event(), watch
        disk.is_open.set()
        stalls = LoopWatch(lambda: pulse.read() / 1e9)
        clock = MasterClock(monotonic=watch.read)
        master_loop = MasterLoop(disk, make_job(await disk.restore()), clock, job_name="job", stalls=stalls)
        await master_loop.begin(disk.master_epoch)
        rooms.append(Room(master_loop, disk, watch, pulse, asyncio.ensure_future(master_loop.run())))
        return rooms[-1]

    yield make
    for room in rooms:
        room.disk.is_open.set()
        room.working.cancel()
        results = await asyncio.gather(room.working, return_exceptions=True)
        await room.disk.close()
        assert isinstance(results[0], asyncio.CancelledError), results


async def test_a_level_that_is_not_durable_is_not_pushed_by_a_heartbeat(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    attached = await agent.attach("a")
    room.watch.move(3.0)  # the level of the attach was not acknowledged: the next heartbeat brings it again
    room.disk.is_open.clear()
    room.disk.is_writing.clear()
    joining = agent.ask(agent.a_join())
    await soon(room.disk.is_writing.wait())  # the join is decided, a world formed, and not a byte of it is on disk
    agent.beat()
    assert agent.pushed == [attached.desired]
    room.disk.is_full = True
    room.disk.is_open.set()
    assert isinstance(await soon(joining), Refusal)
    assert agent.pushed == [attached.desired]


async def test_a_node_that_is_told_something_leaves_and_is_replaced_in_one_batch(make_room: MakeRoom) -> None:
    room = await make_room()
    first, second, third = room.stream(), room.stream(), room.stream()
    await first.attach("a")
    await second.attach("b", rank=1)
    held = await room.hold_a_write()
    told, left = second.ask(second.a_join()), second.leave()
    replaced = third.ask(an_attach("c", rank=1))
    room.disk.is_open.set()
    await soon(held)
    assert [getattr(await soon(reply), "body", None) for reply in (told, left)] == [Done(), Done()]
    answer = await soon(replaced)
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, Attached)
    assert answer.body.node_rank == 1
    second.beat()  # it has not heard of its own end yet
    assert [node.host for node in (await room.status()).nodes] == ["host-a", "host-c"]


async def test_no_deadline_passes_while_the_disk_is_full(make_room: MakeRoom) -> None:
    """One node waits for the other, whose attach and join come again only when the disk is writable again."""
    terms = JobTerms(limits=Limits(min_nodes=2, max_nodes=2, join_timeout=60.0))
    room = await make_room()
    first, second = room.stream(), room.stream()
    await first.attach("a", terms=terms)
    assert isinstance(await soon(first.ask(first.a_join())), Answer)
    room.disk.is_full = True
    refusal = await soon(second.ask(an_attach("b", terms=terms)))
    assert isinstance(refusal, Refusal)
    assert refusal.retry_after
    room.watch.move(300.0)
    await room.turn()
    room.disk.is_full = False
    await room.wait_until_written()
    await second.attach("b", terms=terms)
    room.watch.move(1.0)
    assert isinstance(await soon(second.ask(second.a_join())), Answer)
    status = await room.status()
    assert (status.end, status.round) == (None, 1)


async def test_who_was_refused_by_a_full_disk_may_come_again_before_a_deadline_passes(make_room: MakeRoom) -> None:
    room = await make_room()
    agent, again = room.stream(), room.stream()
    attached = await agent.attach("a")
    agent.close()
    await room.turn()
    room.watch.move(4.9)  # in a moment it is given up
    room.disk.is_full = True
    assert isinstance(await soon(again.ask(an_attach("a", incarnation=attached.incarnation))), Refusal)
    room.disk.is_full = False
    await room.wait_until_written()
    room.watch.move(2.0)
    await room.turn()
    back = await again.attach("a", incarnation=attached.incarnation)
    assert (back.node, back.incarnation) == (attached.node, attached.incarnation)


async def test_a_node_that_stays_away_is_given_up_after_a_full_disk(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    room.disk.is_full = True
    agent.close()
    refused = room.stream().ask(an_attach("b"))
    assert isinstance(await soon(refused), Refusal)
    room.disk.is_full = False
    await room.wait_until_written()
    room.watch.move(COMING_BACK / 1e6 + 5.1)
    await room.turn()
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["gone"]


async def test_failures_are_put_in_order_although_the_clock_stood_still(make_room: MakeRoom) -> None:
    """The agents count on from the time they were told: one before the disk was full, the other after it."""
    terms = JobTerms(limits=Limits(min_nodes=2, max_nodes=2))
    room = await make_room()
    early, late = room.stream(), room.stream()
    await early.attach("a", terms=terms)
    begin = early.attached.now
    room.disk.is_full = True
    assert isinstance(await soon(late.ask(an_attach("b", terms=terms))), Refusal)
    room.watch.move(100.0)
    room.disk.is_full = False
    await room.wait_until_written()
    await late.attach("b", terms=terms)
    stood_still = room.master_loop._clock.stood_still
    assert stood_still >= 100_000_000
    for agent in (early, late):
        assert isinstance(await soon(agent.ask(agent.a_join())), Answer)
    failed_at = late.attached.now
    reports = [(late, failed_at + 2_000_000, 1), (early, failed_at + 1_000_000 + stood_still, 0)]
    for agent, exited_at, rank in reports:
        failure = WorkerFailure(
            global_rank=rank, local_rank=0, pid=1, kind=FailureKind.EXCEPTION, exited_at=Micros(exited_at), message=""
        )
        me = agent.attached
        report = ReportFailure(node=me.node, incarnation=me.incarnation, round=Round(1), failures=(failure,), lived=1.0)
        assert isinstance(await soon(agent.ask(report)), Answer)
    incident = room.master_loop.job.state.restarts.incident
    assert incident is not None
    assert incident.first.failure.global_rank == 0
    assert begin < incident.first.failure.exited_at < failed_at + 2_000_000


async def test_deadlines_pass_however_slow_the_disk_and_however_many_ask(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    room.disk.seconds_per_write = 0.37
    agent.close()
    for _ in range(30):
        await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["gone"]


async def test_silence_is_found_however_slow_the_disk(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    room.disk.seconds_per_write = 0.9
    for _ in range(75):
        await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["gone"]


async def test_a_node_is_not_missed_before_it_was_told_that_it_is_attached(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    room.disk.seconds_per_write = 45.0
    await agent.attach("a")
    room.disk.seconds_per_write = 0.0
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["alive"]
    room.watch.move(40.1)
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["gone"]


async def test_a_node_that_beats_is_not_given_up(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    for _ in range(30):
        room.watch.move(5.0)
        agent.beat()
        await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["alive"]


async def test_a_master_that_was_starved_blames_nobody_for_it(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    room.watch.move(45.0)
    room.stand_still(45.0)
    await room.turn()
    agent.beat()  # it was on its way all the time
    for _ in range(8):
        room.watch.move(5.0)
        await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["alive"]


async def test_a_silent_node_that_its_neighbour_lost_is_given_up_sooner(make_room: MakeRoom) -> None:
    """Only the neighbour's report can have made it short: nobody else is given up after so little silence."""
    terms = JobTerms(limits=Limits(min_nodes=2, max_nodes=2))
    room = await make_room()
    first, silent, spare = agents = [room.stream() for _ in range(3)]
    for agent, launch in zip(agents, "abc", strict=True):
        await agent.attach(launch, terms=terms)
    for agent in (first, silent):
        assert isinstance(await soon(agent.ask(agent.a_join())), Answer)
    assert isinstance(await soon(spare.ask(spare.a_join(round_number=2))), Answer)
    room.watch.move(10.0)
    first.beat()
    lost = WorkerFailure(
        global_rank=0, local_rank=0, pid=1, kind=FailureKind.PEER_LOST, exited_at=Micros(0), message="reset by peer"
    )
    me = first.attached
    report = ReportFailure(node=me.node, incarnation=me.incarnation, round=Round(1), failures=(lost,), lived=1.0)
    assert isinstance(await soon(first.ask(report)), Answer)
    assert isinstance(await soon(first.ask(first.a_join(round_number=2))), Answer)
    room.watch.move(2.1)  # with what was before, more than the suspicion and less than the silence
    await room.turn()
    wish = spare.pushed[-1].wish
    assert isinstance(wish, Run)
    assert (wish.world.round, wish.world.group_world_size) == (2, 2)
    status = await room.status()
    assert status.num_restarts == 1
    assert [node.status for node in status.nodes if node.node == silent.attached.node] == ["gone"]


async def test_what_came_before_a_deadline_was_looked_at_is_decided_before_it(make_room: MakeRoom) -> None:
    room = await make_room()
    agent, again = room.stream(), room.stream()
    attached = await agent.attach("a")
    agent.close()
    await room.turn()
    held = await room.hold_a_write()
    back = again.ask(an_attach("a", incarnation=attached.incarnation))
    room.watch.move(5.05)
    room.disk.is_open.set()
    await soon(held)
    answer = await soon(back)
    assert isinstance(answer, Answer)
    assert isinstance(answer.body, Attached)
    assert answer.body.incarnation == attached.incarnation


async def test_a_master_that_stood_still_during_a_write_gives_that_time_back(make_room: MakeRoom) -> None:
    room = await make_room()
    agent, again = room.stream(), room.stream()
    attached = await agent.attach("a")
    agent.close()
    await room.turn()
    held = await room.hold_a_write()
    room.watch.move(5.05)
    room.stand_still(0.3)
    room.disk.is_open.set()
    await soon(held)
    await room.turn()
    back = await again.attach("a", incarnation=attached.incarnation)
    assert back.incarnation == attached.incarnation


@pytest.mark.parametrize(("stall", "status"), [(5.1, "disconnected"), (4.9, "gone")])
async def test_a_stream_that_ends_after_a_long_stall_of_the_master_says_nothing_about_its_node(
    make_room: MakeRoom, stall: float, status: str
) -> None:
    """The agents closed it because we were mute. The node may be busy just now, and has the window of a master start."""
    room = await make_room()
    agent = room.stream()
    await agent.attach("a")
    room.stand_still(stall)
    agent.close()
    await room.turn()
    room.watch.move(7.0)
    await room.turn()
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == [status]


async def test_a_master_that_nobody_reaches_gives_nobody_up_until_all_had_time_to_come_back(
    make_room: MakeRoom,
) -> None:
    room = await make_room()
    first, second = room.stream(), room.stream()
    await first.attach("a")
    await second.attach("b")
    for _ in range(10):
        room.watch.move(10.0)
        await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["alive", "alive"]
    for _ in range(7):
        first.beat()
        await room.turn()
        room.watch.move(5.0)
    assert [node.status for node in (await room.status()).nodes] == ["alive", "alive"]
    for _ in range(3):
        first.beat()
        room.watch.move(5.0)
        await room.turn()
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["alive", "gone"]


async def test_a_stream_that_ends_before_its_attach_is_durable_leaves_no_node_behind(make_room: MakeRoom) -> None:
    room = await make_room()
    agent = room.stream()
    room.disk.is_open.clear()
    room.disk.is_writing.clear()
    attaching = agent.ask(an_attach("a"))
    await soon(room.disk.is_writing.wait())
    agent.close()
    room.disk.is_open.set()
    await soon(attaching)
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["disconnected"]
    room.watch.move(5.1)
    await room.turn()
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["gone"]


async def test_the_launcher_stops_a_busy_master(make_room: MakeRoom) -> None:
    room = await make_room()
    held = await room.hold_a_write()
    asking = [asyncio.ensure_future(room.master_loop.ask(Ping())) for _ in range(MAX_REQUESTS_IN_WORK + 10)]
    await asyncio.sleep(0)
    assert room.master_loop.num_in_work >= MAX_REQUESTS_IN_WORK
    stopping = asyncio.ensure_future(end_job(room.master_loop))
    await asyncio.sleep(0)
    room.disk.is_open.set()
    await soon(stopping)
    await soon(held)
    await soon(asyncio.gather(*asking, return_exceptions=True))
    assert (await soon(room.master_loop.finished)).reason is ExitReason.STOPPED_BY_USER


async def test_the_launcher_stops_a_master_with_a_full_disk_as_soon_as_there_is_room(make_room: MakeRoom) -> None:
    room = await make_room()
    room.disk.is_full = True
    with pytest.raises(Unavailable):
        await soon(room.master_loop.ask(StopJob()))
    stopping = asyncio.ensure_future(end_job(room.master_loop))
    await room.turn()
    assert not room.master_loop.finished.done()
    room.disk.is_full = False
    await room.wait_until_written()
    await soon(stopping)
    assert (await soon(room.master_loop.finished)).reason is ExitReason.STOPPED_BY_USER


class FragileJob(Job):
    """Cannot give up the first node."""

    def apply(self, command: Command, now: Micros, origin: Origin | None = None) -> Outcome:
        if isinstance(command, DeadlinePassed) and command.id == 1:
            raise ZeroDivisionError("a bug")
        return super().apply(command, now, origin)


async def test_a_replaced_master_with_nothing_to_do_ends_all_the_same(make_room: MakeRoom, tmp_path: Path) -> None:
    room = await make_room()
    newer = await JournalThread.open(tmp_path / "journal.sqlite", job_name="job")
    room.master_loop._wake.set()  # as its nap of 5 s would
    with pytest.raises(Fenced):
        await soon(asyncio.shield(room.working))
    await newer.close()
    room.working = asyncio.get_running_loop().create_future()  # nothing is left to cancel


async def test_a_deadline_that_breaks_the_core_neither_spins_nor_stops_the_others(make_room: MakeRoom) -> None:
    room = await make_room(make_job=lambda job: FragileJob(job.state))
    first, second = room.stream(), room.stream()
    await first.attach("a")
    await second.attach("b")
    first.close()
    await room.turn()
    room.watch.move(5.05)
    await room.turn()  # breaks, and the job is read again
    await room.turn()
    before = room.watch.num_reads
    for _ in range(200):
        await asyncio.sleep(0)
    assert room.watch.num_reads - before < 20, "the loop turns and turns"
    second.close()
    await room.turn()
    room.watch.move(5.05)
    await room.turn()
    assert [node.status for node in (await room.status()).nodes] == ["disconnected", "gone"]


async def test_the_watch_is_woken_by_a_new_world_and_not_by_who_only_comes(make_room: MakeRoom, tmp_path: Path) -> None:
    """It looks at all ranks when it is woken, and after a restart of the master thousands come."""
    room = await make_room()
    journal_thread = WatchDriver(room.master_loop, room.master_loop._clock, job_name="job", directory=tmp_path)
    first, second = room.stream(), room.stream()
    await first.attach("a")
    journal_thread._step()
    journal_thread._wake.clear()
    assert isinstance(await soon(first.ask(first.a_join())), Answer)
    assert journal_thread._wake.is_set()
    journal_thread._step()
    journal_thread._wake.clear()
    assert journal_thread.watch.picture.scene.round == 1
    await second.attach("b")
    assert not journal_thread._wake.is_set()
