"""
The master without the wire: agents in this process talk to the real `Job`, on a clock that only the test moves.

`LoopbackMaster.connect` stands where `AgentChannel` stands. What an agent sends arrives at once, what the master answers
arrives a turn of the event loop later, and is lost if the stream broke in between. So a test can cut an agent off, lose
the one answer that matters, restart the master or let it forget everything, and needs no waiting for any of it.

`StandInGroup` stands where `WorkerGroup` stands: workers that start, end and stop when the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from dlrover.agent.workers.group import Failed, Finished, PortOffer, split_address
from dlrover.core.job import Job, Origin, Outcome
from dlrover.core.outcome import NotYet
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import (
    AgentCommand,
    Attach,
    Attached,
    Command,
    Desired,
    EndStream,
    FailureKind,
    Heartbeat,
    Incarnation,
    MasterStarted,
    Micros,
    NodeDisconnected,
    NodeId,
    NodeSilent,
    Query,
    Reply,
    StopCause,
    TellNode,
    Wish,
    WorkerFailure,
    WorldSpec,
)
from dlrover.protocol.messages.watch import Reach, WatchObservation, WatchOrder

DEADLINE = 60.0
AN_INSTANT = 1e-6
"""Seconds: the real channel's outage is never exactly zero while there is none, even if no time has passed."""


class News:
    """Says that something happened, so that a test can wait for a condition without asking again and again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        self._event.set()

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(DEADLINE):
            while not (value := condition()):
                self._event.clear()
                await self._event.wait()
        return value


class LoopbackMaster:
    def __init__(self, news: News | None = None) -> None:
        self.news = News() if news is None else news
        self.job = Job()
        self.now = Micros(0)
        self.heard: list[AgentCommand] = []
        """What agents sent, attaches included, in order. Sent twice is heard twice."""
        self.refused: list[tuple[AgentCommand, str]] = []
        self.beats: list[Heartbeat] = []
        self.channels: list[LoopbackChannel] = []
        """In the order of their agents."""
        self.refuse: dict[type[AgentCommand], str] = {}
        """Commands to refuse once, with which code, whatever the job thinks of them."""
        self._lines: dict[NodeId, LoopbackChannel] = {}
        self.restart()

    def connect(
        self,
        address: str,
        *,
        token: str,
        tls: TlsConfig | None,
        attach: Callable[[], Attach],
        on_attached: Callable[[Attached], None],
        on_desired: Callable[[Desired], None],
        on_order: Callable[[WatchOrder], None] | None = None,
        on_blocked: Callable[[str], None] | None = None,
        find_address: Callable[[], str] | None = None,
    ) -> LoopbackChannel:
        channel = LoopbackChannel(self, attach, on_attached, on_desired, on_order)
        self.channels.append(channel)
        return channel

    def heard_of(self, kind: type[AgentCommand]) -> list[Any]:
        return [command for command in self.heard if isinstance(command, kind)]

    def restart(self, *, forget: bool = False) -> None:
        """Another master life; with `forget` the journal was lost."""
        for line in list(self._lines.values()):
            line.break_stream(is_seen=False)
        if forget:
            self.job = Job()
        self.apply(MasterStarted(self.job.master_epoch + 1, "a-job"))

    def advance(self, seconds: float) -> None:
        """Let so much time pass for the master and for outages, and with it the deadlines."""
        self.now = Micros(self.now + round(seconds * 1e6))
        for deadline in self.job.due(self.now):
            self.apply(deadline)
        self.news.tell()

    def apply(self, command: Command, origin: Origin | None = None) -> Outcome:
        outcome = self.job.apply(command, self.now, origin)
        for effect in outcome.effects:
            if isinstance(effect, TellNode) and effect.node in self._lines:
                self._lines[effect.node].push(self.job.desired(effect.node))
            elif isinstance(effect, EndStream) and effect.node in self._lines:
                self._lines[effect.node].break_stream(is_seen=False)
        self.news.tell()
        return outcome

    def give_up(self, channel: LoopbackChannel) -> None:
        """Nothing was heard of the node for too long; its stream is not ended yet."""
        node, incarnation = channel.whom()
        self.apply(NodeSilent(node=node, incarnation=incarnation, last_seen_at=self.now))

    def receive(self, channel: LoopbackChannel, command: AgentCommand | Query, sequence: int) -> Reply:
        if isinstance(command, Query):
            reply = self.job.ask(command)
            assert not isinstance(reply, NotYet), f"{type(command).__name__} waits, which no test needs"
            return reply
        self.heard.append(command)
        self.news.tell()
        try:
            if (code := self.refuse.pop(type(command), None)) is not None:
                raise Rejected(f"{type(command).__name__} is refused by the test", code=code)
            if isinstance(command, Attach):
                return self.apply(command).reply
            return self.apply(command, Origin(*channel.whom(), sequence)).reply
        except Rejected as error:
            self.refused.append((command, error.code))
            raise

    def opened(self, channel: LoopbackChannel, attached: Attached) -> None:
        older = self._lines.get(attached.node)
        self._lines[attached.node] = channel
        channel.attached = attached
        if older is not None and older is not channel:
            older.break_stream(is_seen=False)

    def closed(self, channel: LoopbackChannel, *, is_seen: bool) -> None:
        """`is_seen`: the master notices the end of the stream."""
        if channel.attached is None:
            return
        node, incarnation = channel.whom()
        channel.attached = None
        if self._lines.get(node) is not channel:
            return
        del self._lines[node]
        if is_seen:
            with contextlib.suppress(Rejected):  # given up or replaced before
                self.apply(NodeDisconnected(node=node, incarnation=incarnation))


class _Waiting:
    def __init__(self, command: AgentCommand, sequence: int) -> None:
        self.command = command
        self.sequence = sequence
        self.answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()


class LoopbackChannel:
    """`AgentChannel` for a master in the same process. The public part below `reattach` is for the test."""

    def __init__(
        self,
        master: LoopbackMaster,
        attach: Callable[[], Attach],
        on_attached: Callable[[Attached], None],
        on_desired: Callable[[Desired], None],
        on_order: Callable[[WatchOrder], None] | None = None,
    ) -> None:
        self._master = master
        self.on_order = on_order
        self.observed: list[WatchObservation] = []
        self._attach = attach
        self._on_attached = on_attached
        self._on_desired = on_desired
        self.attached: Attached | None = None
        """What the master answered on this stream; the agent may not have heard it yet."""
        self._outage_since: Micros | None = master.now
        self._master_epoch = 0
        self._last_sequence = 0
        self._waiting: dict[int, _Waiting] = {}
        self._stream = 0
        """Number of the stream; an answer of an older one is lost."""
        self._lost: set[type[AgentCommand]] = set()
        self._is_cut = False
        self._is_closing = False
        self.is_lingering = False
        """Set: a stream that shall end to attach anew still carries what comes, until the test breaks it."""
        self.is_leaving = False
        self.num_looks = 0
        """How often the agent has looked whether the master is there."""
        self._wake = asyncio.Event()
        self._over: Exception | None = None

    async def run(self) -> None:
        over: Exception = Unavailable("the channel was closed")
        try:
            while not self._is_closing:
                self._wake.clear()
                if self._outage_since is not None and not self._is_cut:
                    self._open()
                await self._wake.wait()
                if self._over is not None:
                    raise self._over
        except Exception as error:
            over = error
            raise
        finally:
            self.break_stream()
            self._over = over
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    waiting.answer.set_exception(over)
                    waiting.answer.exception()
            self._waiting.clear()

    async def call(self, command: AgentCommand, *, timeout: float) -> Reply:
        if self._over is not None:
            raise self._over
        self._last_sequence += 1
        waiting = self._waiting[self._last_sequence] = _Waiting(command, self._last_sequence)
        if self._outage_since is None:
            self._send(waiting)
        try:
            return await asyncio.wait_for(waiting.answer, timeout)
        except TimeoutError:
            raise Unavailable(f"no answer within {timeout:g} s") from None
        finally:
            self._waiting.pop(waiting.sequence, None)

    def observe(self, observation: WatchObservation) -> None:
        self.observed.append(observation)

    def beat(self, heartbeat: Heartbeat) -> None:
        if self._outage_since is None:
            self._master.beats.append(heartbeat)
            self._master.news.tell()

    def outage(self) -> float:
        self.num_looks += 1
        self._master.news.tell()
        if self._outage_since is None:
            return 0.0
        return (self._master.now - self._outage_since) / 1e6 + AN_INSTANT

    async def close(self) -> None:
        self._is_closing = True
        self._wake.set()

    async def reattach(self) -> None:
        self.is_leaving = True
        self._master.news.tell()
        if not self.is_lingering:
            self.break_stream()

    # For the test.

    @property
    def is_attached(self) -> bool:
        return self._outage_since is None

    def cut(self) -> None:
        """Break the stream, and let none be opened until `restore`."""
        self._is_cut = True
        self.break_stream()

    def restore(self) -> None:
        self._is_cut = False
        self._wake.set()

    def lose_answer_to(self, kind: type[AgentCommand]) -> None:
        """The master will take the next one of this kind, and the stream break before its answer is there."""
        self._lost.add(kind)

    def break_stream(self, *, is_seen: bool = True) -> None:
        self._stream += 1
        self.is_leaving = False
        if self._outage_since is None:
            self._outage_since = self._master.now
        self._master.closed(self, is_seen=is_seen)
        self._wake.set()
        self._master.news.tell()

    def whom(self) -> tuple[NodeId, Incarnation]:
        """Whom the master sees behind the stream, and in which life."""
        assert self.attached is not None, "no stream is attached"
        return self.attached.node, self.attached.incarnation

    def push(self, desired: Desired) -> None:
        # Twice later: what a command led to is pushed after the answer to it, as the master's loop does.
        self._later(lambda: self._later(lambda: self._on_desired(desired)))

    def wish(self, wish: Wish) -> None:
        """Tell the agent this at once, whatever the job thinks."""
        newest = self._master.job.desired(self.whom()[0])
        self._on_desired(Desired(newest.number + 1, newest.master_epoch, wish))

    def _open(self) -> None:
        command = replace(self._attach(), master_epoch=self._master_epoch)
        try:
            reply = self._master.receive(self, command, 0)
        except Rejected as error:
            self._over = error
            self._wake.set()
            return
        assert isinstance(reply, Attached)
        self._master.opened(self, reply)
        if self._is_lost(command):
            self.break_stream()
            return
        self._later(lambda: self._accept(reply))

    def _accept(self, attached: Attached) -> None:
        assert attached.master_epoch >= self._master_epoch, "the real channel would wait for another master"
        self._master_epoch = attached.master_epoch
        self._outage_since = None
        self._on_attached(attached)
        self._on_desired(attached.desired)
        for waiting in list(self._waiting.values()):
            self._send(waiting)
        self._master.news.tell()

    def _send(self, waiting: _Waiting) -> None:
        stream = self._stream
        try:
            reply = self._master.receive(self, waiting.command, waiting.sequence)
        except Rejected as error:
            refusal = error
            self._later(lambda: self._settle(waiting, refusal))
            return
        if self._is_lost(waiting.command) and stream == self._stream:
            self.break_stream()
        else:
            self._later(lambda: self._settle(waiting, reply))

    def _settle(self, waiting: _Waiting, answer: Reply | Rejected) -> None:
        if waiting.answer.done():
            return
        if isinstance(answer, Rejected):
            waiting.answer.set_exception(answer)
        else:
            waiting.answer.set_result(answer)

    def _is_lost(self, command: AgentCommand) -> bool:
        if type(command) not in self._lost:
            return False
        self._lost.remove(type(command))
        return True

    def _later(self, act: Callable[[], None]) -> None:
        stream = self._stream
        asyncio.get_running_loop().call_soon(lambda: act() if stream == self._stream else None)


class StandInGroup:
    """Workers that do what the test says; where global rank 0 is here they hold the coordinator's port as real ones do."""

    def __init__(self, world: WorldSpec, news: News) -> None:
        self.world = world
        self.step: int | None = None
        self.may_be_mistaken = False
        self.lived = 1.0
        self.reach = Reach()
        self.is_started = False
        self.is_start_cancelled = False
        self.is_stopped = False
        self.num_kills = 0
        self.num_waits_alike = 0
        self.offer: PortOffer | None = None
        self.stops: list[tuple[StopCause, int]] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_be_gone = asyncio.Event()
        self.may_be_gone.set()
        self.may_stop = asyncio.Event()
        self.may_stop.set()
        self.start_error: Exception | None = None
        self.late: tuple[WorkerFailure, ...] = ()
        """Failures that come to light only when the workers are stopped."""
        self._news = news
        self._outcome: asyncio.Future[Finished | Failed] = asyncio.get_running_loop().create_future()
        self._port: socket.socket | None = None

    def __repr__(self) -> str:
        return f"<group of round {self.world.round}>"

    # What the driver uses.

    async def start(self, offer: PortOffer | None) -> None:
        self.offer = offer
        self._news.tell()
        try:
            await self.may_start.wait()
            if self.start_error is not None:
                raise self.start_error
        except asyncio.CancelledError:
            self.is_start_cancelled = True
            raise
        finally:
            if offer is not None:
                offer.release()
            self._news.tell()
        if self.world.first_global_rank == 0 and offer is not None:
            self._port = socket.create_server(("0.0.0.0", int(split_address(self.world.coordinator)[1])))
        self.is_started = True
        self._news.tell()

    async def wait(self) -> Finished | Failed:
        return await self._outcome

    async def await_alike(self) -> None:
        self.num_waits_alike += 1

    async def stop(self, cause: StopCause, with_signal: int) -> tuple[WorkerFailure, ...]:
        self.stops.append((cause, with_signal))
        self._news.tell()
        await self.may_stop.wait()
        self._close_port()
        self.is_stopped = True
        self._news.tell()
        return self.late

    async def gone(self) -> None:
        await self.may_be_gone.wait()

    def kill(self) -> None:
        self.num_kills += 1
        self._close_port()
        self._news.tell()

    # What the test uses.

    @property
    def is_running(self) -> bool:
        return self.is_started and not self.is_stopped

    @property
    def has_ended(self) -> bool:
        """By itself, as far as anybody said so."""
        return self._outcome.done()

    def finish(self) -> None:
        self._outcome.set_result(Finished(self.step))

    def fail(self, *failures: WorkerFailure) -> None:
        self._outcome.set_result(Failed(failures or (a_failure(),), self.step, self.lived, self.reach))

    def break_down(self, bug: Exception) -> None:
        """A bug in `wait`."""
        self._outcome.set_exception(bug)

    def _close_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None


class StandInNode:
    """Builds the groups of one agent and keeps them for the test."""

    def __init__(self, news: News) -> None:
        self.groups: list[StandInGroup] = []
        self.prepare: Callable[[StandInGroup], None] = lambda group: None
        """Called with each new group before it is started."""
        self._news = news

    def build(self, world: WorldSpec, **_: Any) -> StandInGroup:
        group = StandInGroup(world, self._news)
        self.prepare(group)
        self.groups.append(group)
        self._news.tell()
        return group

    async def running(self, number: int) -> StandInGroup:
        """The group that was built so and so often, counted from 1, once it runs."""
        await self._news.until(lambda: len(self.groups) >= number and self.groups[number - 1].is_started)
        return self.groups[number - 1]


def a_failure(kind: FailureKind = FailureKind.EXCEPTION, **details: Any) -> WorkerFailure:
    values: dict[str, Any] = {"global_rank": 0, "local_rank": 0, "pid": 1, "exited_at": Micros(0)}
    return WorkerFailure(**(values | {"kind": kind, "message": "RuntimeError: boom"} | details))
