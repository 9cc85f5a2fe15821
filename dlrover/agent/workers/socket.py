"""
The node's unix socket, where workers speak to their agent.

They tell how far they are and what they saved, and wait for no answer; and they ask the master, through us: their
requests are merged into the agent's one stream, and the answers go back by number, in whatever order they come.

In the runtime directory (0700), and only processes of our own user are heard. A worker that sends nonsense is cut off
and trains on. A worker of an older round, that was stopped or frozen when the others moved on, is refused: whatever it
left in the store now would be found by the wrong ones.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Protocol

import msgspec
from msgspec.structs import replace

from dlrover.host.ownership import make_private, peer_credentials
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import ConfigError, Rejected, Unavailable
from dlrover.protocol.local_frames import pack, read_frame
from dlrover.protocol.messages.checkpoint import (
    OpenSnapshots,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotTaken,
    TrainerNews,
)
from dlrover.protocol.messages.data import DataCommand
from dlrover.protocol.messages.job import (
    AgentMessage,
    AskMaster,
    Hello,
    MasterAnswer,
    MasterRefusal,
    Reply,
    ReportStep,
    Round,
    WorkerMessage,
    WorkerRequest,
)
from dlrover.protocol.messages.sync import JoinSync

_log = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107
"""What the kernel allows for the name of a unix socket."""
MAX_ASKED = 1024
"""Requests of one connection under way. A worker has one for each thread that waits; more is a bug that fills memory."""
LONGEST_ASK = 3600.0
"""Seconds. No call waits longer for one answer; a caller that has to asks again."""


class WorkerRelay(Protocol):
    async def __call__(self, request: WorkerRequest, *, timeout: float) -> Reply:
        """Raises Rejected or Unavailable."""


class Snapshots(Protocol):
    """What the socket needs of the `Saver`."""

    def on_open(self, message: OpenSnapshots) -> None: ...

    def on_failed(self, message: SnapshotFailed) -> None: ...

    def on_saved(self, message: SnapshotSaved) -> SnapshotTaken | None:
        """An answer, when a slot is held for the worker now."""


class WorkerSocket:
    def __init__(self, path: str) -> None:
        self.path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._relay: WorkerRelay = _refuse
        self._snapshots: Snapshots | None = None
        self._trainers: dict[asyncio.StreamWriter, Round] = {}
        """Connections over which snapshots are told of, and in which round."""
        self._round = Round(0)
        self._steps: dict[int, int] = {}
        """Newest step by local rank, of the current round."""
        self._decode = msgspec.msgpack.Decoder(WorkerMessage).decode

    @classmethod
    async def open(cls, runtime_dir: str) -> WorkerSocket:
        path = os.path.join(runtime_dir, "agent.sock")
        if len(os.fsencode(path)) > _MAX_PATH_BYTES:
            raise ConfigError(
                f"The socket {path} would have a name of over {_MAX_PATH_BYTES} bytes, more than Linux allows. "
                "Set TMPDIR to a directory with a shorter name."
            )
        make_private(runtime_dir)
        if os.path.exists(path):
            os.unlink(path)  # of an agent that was killed; the directory belongs to one agent at a time
        self = cls(path)
        self._server = await asyncio.start_unix_server(self._on_connect, path)
        os.chmod(path, 0o600)
        return self

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if os.path.exists(self.path):
            os.unlink(self.path)

    def relay_to(self, relay: WorkerRelay) -> None:
        """Where the workers' requests go; refused until then."""
        self._relay = relay

    def tell_of_snapshots(self, snapshots: Snapshots) -> None:
        """Who hears of the workers' snapshots; none until then."""
        self._snapshots = snapshots

    def tell_trainers(self, news: TrainerNews) -> None:
        """To all workers of this round that save."""
        for writer, number in self._trainers.items():
            if number == self._round:
                _send(writer, news)

    def open_round(self, number: Round) -> None:
        """Steps of former rounds count no more, and their workers are not heard any more."""
        self._round = number
        self._steps = {}

    def step(self, number: Round | None = None) -> int | None:
        """Greatest step reported in this round (by default the newest); None if none was."""
        if number is not None and number != self._round:
            return None
        return max(self._steps.values(), default=None)

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: set[asyncio.Task[None]] = set()
        try:
            pid, uid, _gid = peer_credentials(writer.get_extra_info("socket"))
            if uid != os.getuid():
                _log.warning(
                    "The agent refused pid %d of user %d at its socket: only processes of the agent's user may connect.",
                    pid,
                    uid,
                )
                return
            await self._listen(reader, writer, asked)
        except (msgspec.DecodeError, Rejected) as error:
            _log.warning(
                "A worker sent an invalid message (%s). The agent closed its connection and no longer follows its "
                "progress.",
                error,
            )
        except ConnectionError:
            return
        finally:
            for task in asked:
                task.cancel()  # nobody hears the answer; a command that has left still counts
            self._trainers.pop(writer, None)
            writer.close()

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: set[asyncio.Task[None]]
    ) -> None:
        hello: Hello | None = None
        while (frame := await read_frame(reader)) is not None:
            match self._decode(frame):
                case Hello() as hello:
                    continue
                case ReportStep(step=step):
                    if hello is not None and hello.round == self._round:
                        known = self._steps.get(hello.local_rank)
                        self._steps[hello.local_rank] = step if known is None else max(known, step)
                case OpenSnapshots() | SnapshotSaved() | SnapshotFailed() as news:
                    if hello is not None and hello.round == self._round:
                        self._pass_on(news, writer)
                case AskMaster() as ask:
                    if len(asked) >= MAX_ASKED:
                        text = f"This worker already waits for {MAX_ASKED} answers."
                        _send(writer, MasterRefusal(id=ask.id, code=ErrorCode.TOO_MANY_WAITING, message=text))
                        continue
                    task = asyncio.create_task(self._ask(hello, ask, writer))
                    asked.add(task)
                    task.add_done_callback(asked.discard)
                    await writer.drain()  # who does not read answers need not ask more

    def _pass_on(self, news: OpenSnapshots | SnapshotSaved | SnapshotFailed, writer: asyncio.StreamWriter) -> None:
        if self._snapshots is None:
            return
        if isinstance(news, OpenSnapshots):
            self._trainers[writer] = self._round
            self._snapshots.on_open(news)
        elif isinstance(news, SnapshotFailed):
            self._snapshots.on_failed(news)
        elif (taken := self._snapshots.on_saved(news)) is not None:
            _send(writer, taken)

    async def _ask(self, hello: Hello | None, ask: AskMaster, writer: asyncio.StreamWriter) -> None:
        answer: AgentMessage
        try:
            request = self._checked(hello, ask.body)
            timeout = min(ask.timeout, LONGEST_ASK) if ask.timeout > 0 else 0.0
            reply = await self._relay(request, timeout=timeout)
            answer = MasterAnswer(id=ask.id, reply=reply)  # type: ignore[arg-type]  # decided by what was asked
        except Rejected as error:
            answer = MasterRefusal(id=ask.id, code=error.code, message=str(error))
        except Unavailable as error:
            answer = MasterRefusal(id=ask.id, code=ErrorCode.UNAVAILABLE, message=str(error))
        _send(writer, answer)

    def _checked(self, hello: Hello | None, request: WorkerRequest) -> WorkerRequest:
        if hello is None:
            raise Rejected("The first message on this socket must be `Hello`.", code=ErrorCode.MALFORMED)
        named_round = getattr(request, "round", Round(0))  # what concerns the whole job names none
        if hello.round != self._round or named_round not in (0, hello.round):
            raise Rejected(
                f"A worker of round {hello.round} sent a request for round {named_round}, and this node runs "
                f"round {self._round}. Requests are accepted only from workers of the running round, and only "
                "for that round.",
                code=ErrorCode.STALE_ROUND,
            )
        is_named = isinstance(request, JoinSync | DataCommand)  # of that worker: it cannot speak for another
        return replace(request, local_rank=hello.local_rank) if is_named else request


async def _refuse(request: WorkerRequest, *, timeout: float) -> Reply:
    raise Unavailable("the agent is not connected to the master yet")


def _send(writer: asyncio.StreamWriter, message: AgentMessage | TrainerNews) -> None:
    if not writer.is_closing():
        writer.write(pack(_ENCODER.encode(message)))


_ENCODER = msgspec.msgpack.Encoder()
