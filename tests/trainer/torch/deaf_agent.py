"""An agent that reads each request and hangs up without an answer."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading

from dlrover.protocol.local_frames import receive_frame
from dlrover.protocol.messages.job import Round
from dlrover.trainer.environment import WorkerEnvironment


class DeafAgent:
    def __enter__(self) -> DeafAgent:
        self.num_heard = 0
        self._directory = tempfile.mkdtemp(prefix="dlr-")
        path = os.path.join(self._directory, "s")
        self.where = WorkerEnvironment(agent_socket=path, round=Round(1), local_rank=0)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(path)
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._server.close()
        shutil.rmtree(self._directory)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection:
                receive_frame(connection)  # hello
                if receive_frame(connection) is not None:
                    self.num_heard += 1
