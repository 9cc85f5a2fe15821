"""
The node's unix socket, where workers tell their agent how far they are.

In the runtime directory (0700), and only processes of our own user are heard. Messages are observations: a worker
that sends nonsense is cut off and trains on.
"""

from __future__ import annotations

import asyncio
import logging
import os

import msgspec

from dlrover.protocol.errors import ConfigError, Rejected
from dlrover.protocol.local import peer_credentials, read_frame
from dlrover.protocol.messages import Hello, ReportStep, Round, WorkerMessage

_log = logging.getLogger(__name__)

_MAX_PATH_BYTES = 107
"""What the kernel allows for the name of a unix socket."""


class WorkerSocket:
    def __init__(self, path: str) -> None:
        self.path = path
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
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
        os.makedirs(runtime_dir, mode=0o700, exist_ok=True)
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

    def open_round(self, number: Round) -> None:
        """Steps of former rounds count no more."""
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
        try:
            pid, uid, _gid = peer_credentials(writer.get_extra_info("socket"))
            if uid != os.getuid():
                _log.warning("pid %d of user %d tried to speak to the agent's socket; refused.", pid, uid)
                return
            await self._listen(reader)
        except (msgspec.DecodeError, Rejected) as error:
            _log.warning("A worker sent what is no message (%s); its progress is not followed any more.", error)
        except ConnectionError:
            return
        finally:
            writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        hello: Hello | None = None
        while (frame := await read_frame(reader)) is not None:
            match self._decode(frame):
                case Hello() as hello:
                    continue
                case ReportStep(step=step):
                    if hello is not None and hello.round == self._round:
                        known = self._steps.get(hello.local_rank)
                        self._steps[hello.local_rank] = step if known is None else max(known, step)
