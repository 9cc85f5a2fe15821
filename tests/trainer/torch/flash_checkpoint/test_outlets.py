"""The outlet to an agent: what it hears of saves, and that nobody waits longer than there is news."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest
import torch

from dlrover.protocol.local_frames import pack, receive_frame
from dlrover.protocol.messages.checkpoint import CheckpointSettled, OpenSnapshots, SnapshotSaved, SnapshotTaken
from dlrover.protocol.messages.job import Round
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.storage.persist import pin_newest, read_request, release
from dlrover.snapshot.storage.places import SavePlace, encode_place
from dlrover.trainer.environment import WorkerEnvironment
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.saving.outlets import AgentOutlet

DEADLINE = 20


class ToldAgent:
    """Takes every save and says at once what became of it."""

    def __init__(self, path: str, *, is_committed: bool) -> None:
        self._is_committed = is_committed
        self.opened: OpenSnapshots | None = None
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE)
        self._server.close()

    def _serve(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        with connection:
            while (frame := receive_frame(connection)) is not None:
                if b"OpenSnapshots" in frame[0]:
                    self.opened = msgspec.msgpack.decode(frame[0], type=OpenSnapshots)
                if b"SnapshotSaved" in frame[0]:
                    self._answer(connection, msgspec.msgpack.decode(frame[0], type=SnapshotSaved))

    def _answer(self, connection: socket.socket, saved: SnapshotSaved) -> None:
        pinned = pin_newest(saved.path, saved.slot, saved.generation)
        assert pinned is not None
        request = read_request(decode_contents(pinned.sections()))
        release(pinned)
        assert request is not None
        settled = CheckpointSettled(
            step=saved.step, attempt=request.attempt, is_committed=self._is_committed, reason="the disk is full"
        )
        for news in (SnapshotTaken(path=saved.path, generation=saved.generation), settled):
            connection.sendall(pack(msgspec.msgpack.encode(news)))


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_agents_word_ends_the_wait(tmp_path, caplog, is_committed):
    agent = ToldAgent(str(tmp_path / "s"), is_committed=is_committed)
    home = tmp_path / "job" / "launch-0"
    home.parent.mkdir()
    where = WorkerEnvironment(agent_socket=str(tmp_path / "s"), round=Round(1), local_rank=0, snapshot_home=str(home))
    engine = CheckpointEngine(str(tmp_path / "checkpoints"), outlet=AgentOutlet(where))
    try:
        state = {"model": torch.ones(10)}
        assert engine.save(5, {"model": state}, {"model": "model.pt"}, is_storage=True)
        assert engine.wait_for_storage(DEADLINE) is is_committed  # nothing is written: only the agent's word counts
        assert ("the disk is full" in caplog.text) is not is_committed
        assert agent.opened.place == encode_place(SavePlace(directory=str(tmp_path / "checkpoints"))), (
            "named before it saves"
        )
    finally:
        engine.close()
        agent.close()
