"""
`report(step, loss=...)`: the worker tells its agent how far training is.

The step and the numbers go into the progress page, where there is one; the step also to the agent's socket. Progress is what decides whether a restart was worth it, so every script should report; it costs a few microseconds
and never raises into training. Nothing is waited for: what the socket does not take at once is replaced by the next
report.
"""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any

import msgspec

from dlrover.host.ownership import check_server
from dlrover.protocol.local_frames import pack
from dlrover.protocol.messages.job import Hello, ReportStep
from dlrover.protocol.progress_page import REPORTED
from dlrover.trainer import environment, phases

_CONNECT_TIMEOUT = 1.0
_MAX_CONNECT_ATTEMPTS = 3
"""An agent that refuses so often is not going to answer; training must not pay for it at every step."""


class ProgressReporter:
    """One connection to the agent, opened at the first report. Belongs to the process that opened it."""

    def __init__(self, where: environment.WorkerEnvironment | None) -> None:
        self._where = where
        self._socket: socket.socket | None = None
        self._pid = 0
        self._rest = b""
        """What the socket has not taken yet of a frame that it took the beginning of."""
        self._num_attempts = 0

    def report(self, step: int) -> None:
        if self._where is None:
            return
        if self._pid != os.getpid():
            # Never used, or we are a fork (a DataLoader worker) of the process that did: its connection is not ours.
            self._socket, self._rest, self._num_attempts, self._pid = None, b"", 0, os.getpid()
        try:
            self._send(pack(msgspec.msgpack.encode(ReportStep(step=int(step)))), self._where)
        except BlockingIOError:
            return  # the agent is busy; the next step says it all
        except OSError:
            self.close()

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""

    def _send(self, frame: bytes, where: environment.WorkerEnvironment) -> None:
        if self._socket is None:
            if self._num_attempts >= _MAX_CONNECT_ATTEMPTS:
                return
            self._num_attempts += 1
            self._connect(where)
        assert self._socket is not None, "connected above"
        if self._rest:
            sent = self._socket.send(self._rest)
            self._rest = self._rest[sent:]
            if self._rest:
                return
        sent = self._socket.send(frame)
        self._rest = frame[sent:]

    def _connect(self, where: environment.WorkerEnvironment) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_TIMEOUT)
            sock.connect(where.agent_socket)
            check_server(sock)
            hello = Hello(local_rank=where.local_rank, round=where.round, pid=os.getpid())
            sock.sendall(pack(msgspec.msgpack.encode(hello)))
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        self._num_attempts = 0


_reporter: ProgressReporter | None = None
_is_reporting = False
"""The script itself says how far it is."""


def report(step: int, **metrics: Any) -> None:
    """
    The optimizer has finished this step. Does nothing outside `dlrover-run`.

    `metrics` are numbers, or tensors of one element, that people and the diagnosis want to see: `loss`, `grad_norm`, ... NaN and
    infinity are carried as such. The newest 32 count.
    """
    global _is_reporting
    _is_reporting = True
    _report(step, metrics)


def report_from_span(step: int) -> None:
    """The same from a span of the event SDK, for scripts that do not report: two counts of one thing would be one too many."""
    if not _is_reporting:
        _report(step, {})


def _report(step: int, metrics: dict[str, Any]) -> None:
    global _reporter
    writer = phases.current()
    if writer is not None:
        writer.set_step(int(step), REPORTED)
        if metrics:
            writer.set_metrics(_numbers(metrics))
        writer.touch()
    if _reporter is None:
        _reporter = ProgressReporter(environment.current())
    _reporter.report(step)


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = value if type(value) is float else float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            warnings.warn(
                f"dlrover.trainer.report: {name}={value!r:.80} is not a number ({error}). Give a number, or a "
                "tensor of one element.",
                RuntimeWarning,
                stacklevel=3,
            )
    return numbers
