"""
Where a trainer's snapshots go from here: to the node's agent, or, where there is none, to a thread of our own.

Neither makes the training wait. The agent is only told; the slot is kept from being overwritten until it says that it
holds it. Without an agent (plain `python`, `torchrun`) a thread of this process writes the files, with the same code and the same format,
and dies with the process: what it had not written then is lost.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import select
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from dlrover.host.edges import contained
from dlrover.host.ownership import NotOurs, check_server, make_private
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected
from dlrover.protocol.local_frames import FrameBuffer, pack
from dlrover.protocol.messages.checkpoint import (
    CheckpointSettled,
    OpenSnapshots,
    SaveRequested,
    SnapshotFailed,
    SnapshotSaved,
    SnapshotTaken,
    TrainerNews,
)
from dlrover.protocol.messages.job import Hello
from dlrover.snapshot.memory.homes import Home, remove_empty_root
from dlrover.snapshot.memory.segment import PinnedSlot, SlotName
from dlrover.snapshot.storage.persist import (
    SaveRequest,
    finish,
    give_up,
    persist,
    pin_newest,
    release,
    wait_until_complete,
)
from dlrover.snapshot.storage.places import SavePlace, encode_place
from dlrover.trainer.environment import WorkerEnvironment, snapshot_dir

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

HOLD = 60.0
"""Seconds that a slot is kept for an agent that does not take it."""
_CONNECT_TIMEOUT = 1.0
_MAX_SETTLED = 32


class SaveOutlet(Protocol):
    home: Path
    """Where the segments go."""
    fallback: Path | None
    settled: dict[str, CheckpointSettled]
    """What became of storage saves, by attempt, as far as it was heard here; the newest few."""

    def open(self, place: SavePlace) -> None:
        """Before the first save: who writes it gets to know where, and with which classes. Again when that changes."""

    def saved(self, name: SlotName, request: SaveRequest) -> None:
        """A snapshot is complete."""

    def poll(self) -> None:
        """Let go of what is not needed any more; called before each save."""

    def listen(self) -> None:
        """Take in what is known by now, without waiting."""

    def wait_for_news(self, timeout: float) -> None:
        """Until there may be something to listen to. The one method that another thread may call meanwhile."""

    def close(self) -> None: ...


class AgentOutlet:
    """Under `dlrover-run`."""

    def __init__(self, where: WorkerEnvironment) -> None:
        self._where = where
        self.home = Path(where.snapshot_home)
        self.fallback = Path(where.snapshot_fallback) if where.snapshot_fallback else None
        make_private(self.home.parent)
        make_private(self.home)
        self._socket: socket.socket | None = None
        self._unsent = b""
        self._frames = FrameBuffer()
        self._held: dict[tuple[str, int], tuple[PinnedSlot, float]] = {}
        """Slots that the agent has been told to write and has not taken yet, and since when."""
        self.settled: dict[str, CheckpointSettled] = {}
        """What became of storage saves, by attempt; the newest few."""
        self.save_request: SaveRequested | None = None
        """The newest request for a storage save that was heard of."""

    def open(self, place: SavePlace) -> None:
        self._send(OpenSnapshots(home=str(self.home), place=encode_place(place)))

    def saved(self, name: SlotName, request: SaveRequest) -> None:
        is_storage = request.is_storage and request.is_writer
        if is_storage:
            pinned = pin_newest(name.path, name.slot, name.generation)
            if pinned is not None:
                self._held[(name.path, name.generation)] = (pinned, time.monotonic())
        self._send(
            SnapshotSaved(
                path=name.path, slot=name.slot, generation=name.generation, step=name.step, is_storage=is_storage
            )
        )

    def poll(self) -> None:
        self.listen()
        for key, (pinned, since) in list(self._held.items()):
            if time.monotonic() - since > HOLD:
                log.warning(
                    "The agent has not confirmed the snapshot of step %d, so it may not reach storage.",
                    pinned.record.step,
                )
                self._let_go(key)

    def close(self) -> None:
        self._send(None)
        for key in list(self._held):
            self._let_go(key)
        self._hang_up()

    def _let_go(self, key: tuple[str, int]) -> None:
        pinned, _since = self._held.pop(key, (None, 0.0))
        if pinned is not None:
            release(pinned)

    def _receive(self) -> None:
        try:
            while self._socket is not None and (data := self._socket.recv(65536)):
                for frame in self._frames.feed(data):
                    self._hear(_DECODER.decode(frame))
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, Rejected):
            self._hang_up()

    def failed(self, directory: str, step: int, reason: str) -> None:
        """A state was not even copied: tell the agent, so that the master shows it."""
        self._send(SnapshotFailed(directory=directory, step=step, reason=reason))

    def listen(self) -> None:
        """Take in what the agent has told, without waiting."""
        self._send(None)
        self._receive()

    def wait_for_news(self, timeout: float) -> None:
        sock = self._socket
        if sock is None:
            time.sleep(timeout)  # the agent is gone, and takes us with it
        else:
            select.select([sock], [], [], timeout)

    def _hear(self, news: TrainerNews) -> None:
        match news:
            case SnapshotTaken():
                self._let_go((news.path, news.generation))
            case CheckpointSettled():
                _remember(self.settled, news)
            case SaveRequested():
                if self.save_request is None or news.number > self.save_request.number:
                    self.save_request = news

    def _send(self, message: OpenSnapshots | SnapshotSaved | SnapshotFailed | None) -> None:
        """As much as the socket takes now. An agent that is gone takes us with it, and its successor reads the segments."""
        if message is not None:
            self._unsent += pack(msgspec.msgpack.encode(message))
        try:
            if self._socket is None and self._unsent:
                self._connect()
            while self._unsent and self._socket is not None:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""
            self._hang_up()

    def _connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_TIMEOUT)
            sock.connect(self._where.agent_socket)
            check_server(sock)
            hello = Hello(local_rank=self._where.local_rank, round=self._where.round, pid=os.getpid())
            sock.sendall(pack(msgspec.msgpack.encode(hello)))
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            if isinstance(error, NotOurs):
                log.error(
                    "The trainer cannot report its snapshots to the agent, so they do not reach storage: %s",
                    error.strerror,
                )
            raise
        self._socket, self._frames = sock, FrameBuffer()

    def _hang_up(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class ThreadOutlet:
    """Without an agent: the segments belong to this process and go with it."""

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        self._root = Path(root) if root is not None else _default_root()
        # Never a name again that was used before: what a dead process of the same number left is not ours.
        self._home = Home(self._root, "no-launcher", f"{os.getpid()}-{secrets.token_hex(4)}", 0)
        self.home = self._home.path
        self.fallback: Path | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="dlrover-persist")
        self._saves: list[Future[None]] = []
        self._stop = threading.Event()
        self.settled: dict[str, CheckpointSettled] = {}
        self._news = threading.Event()
        self._is_reported = False
        self._is_other_job_reported = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def open(self, place: SavePlace) -> None:
        """This process is both: it follows its own words."""

    def saved(self, name: SlotName, request: SaveRequest) -> None:
        if not (request.is_storage and request.is_writer):
            return
        pinned = pin_newest(name.path, name.slot, name.generation)
        assert pinned is not None, "only this thread writes here"
        try:
            self._saves.append(self._writer.submit(self._write, pinned, request))
        except RuntimeError:  # the interpreter is on its way out, and its executors take no more work
            self._write(pinned, request)

    def poll(self) -> None:
        self._saves = [save for save in self._saves if not save.done()]

    def listen(self) -> None:
        self._news.clear()  # before the caller looks, so that nothing is missed

    def wait_for_news(self, timeout: float) -> None:
        self._news.wait(timeout)

    def close(self) -> None:
        """Waits for what is being written. Not for a forked child, which has a copy of this and owns nothing."""
        if os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._writer.shutdown(wait=True)
        self._home.remove()
        remove_empty_root(self._root)

    def _write(self, pinned: PinnedSlot, request: SaveRequest) -> None:
        with contained(partial(self._note_failure, request)):  # no caller asks how this thread ends
            try:
                persist(pinned, request, stop=self._stop)
            finally:
                release(pinned)
            if request.is_committer:
                self._commit(request)
                self._settle(request)
            self._is_reported = False

    def _note_failure(self, request: SaveRequest, error: Exception) -> None:
        if not isinstance(error, OSError | DLRoverError):
            log.exception(
                "The checkpoint of step %d was not written because of a bug in DLRover. Training continues.",
                request.step,
            )
            self._settle(request, f"{type(error).__name__}: {error}")
            return
        # It goes on, however often we are quicker.
        is_other_job = isinstance(error, Rejected) and error.code == ErrorCode.ANOTHER_JOB
        is_told = self._is_reported or (is_other_job and self._is_other_job_reported)
        level = logging.INFO if is_told else logging.ERROR
        self._is_reported = True
        self._is_other_job_reported = self._is_other_job_reported or is_other_job
        log.log(level, "The checkpoint of step %d was not written: %s. Training continues.", request.step, error)
        self._settle(request, str(error))

    def _settle(self, request: SaveRequest, trouble: str = "") -> None:
        news = CheckpointSettled(
            step=request.step,
            attempt=request.attempt,
            is_committed=not trouble,
            reason=trouble,
            directory=request.directory,
        )
        _remember(self.settled, news)
        self._news.set()

    def _commit(self, request: SaveRequest) -> None:
        try:
            wait_until_complete(request, wait=self._stop.wait)
        except (TimeoutError, DLRoverError):
            give_up(request)
            raise
        finish(request, data_state=request.data_state)


_DECODER: msgspec.msgpack.Decoder[TrainerNews] = msgspec.msgpack.Decoder(TrainerNews)


def _remember(settled: dict[str, CheckpointSettled], news: CheckpointSettled) -> None:
    settled[news.attempt] = news
    while len(settled) > _MAX_SETTLED:
        del settled[next(iter(settled))]


def _default_root() -> Path:
    """In shared memory; where a machine has none, beside other temporary files."""
    base = snapshot_dir()
    return (base if base.is_dir() else Path("/tmp")) / f"dlrover-snapshots-{os.getuid()}"
