"""
`SyncClient`: workers that wait for each other by name.

Every worker that runs joins the same name and then waits until all have; or one says that a barrier is open and the
others wait for that. Names can be used again: the second join of a name waits for the second join of all others. It is the
control plane's own means, so it works without a process group, and it does not wait for workers that have ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import Reply, Round, WorkerRequest
from dlrover.protocol.messages.sync import BarrierOpen, JoinSync, NotifyBarrier, SyncFinished, SyncJoined, SyncState
from dlrover.trainer import environment
from dlrover.trainer.agent_link import Link, current_link, pause_before_retry

_log = logging.getLogger(__name__)

_PATIENCE = 60.0
"""Seconds for a command: a master that restarts is back sooner."""
_SLICE = 30.0
"""Seconds that one question waits on the master; longer waits are renewed."""
_MARGIN = 2.0


class SyncClient:
    """Belongs to one worker; for several threads use several names."""

    def __init__(self, *, link: Link | None = None) -> None:
        where = environment.current()
        self._round = Round(0) if where is None else where.round
        self._link = current_link() if link is None else link
        self._patience = environment.client_timeout() or _PATIENCE
        self._generations: dict[str, int] = {}
        """Of the sync points that we have joined."""
        self._passed: dict[str, int] = {}
        """How often we went through each barrier."""

    def join_sync(self, name: str) -> bool:
        """False: refused, or too late, because the others went on without us."""
        try:
            reply = self._join(name)
        except (Rejected, Unavailable) as error:
            _log.warning("could not join sync point %r: %s", name, error)
            return False
        assert isinstance(reply, SyncJoined), f"{reply} for a join"
        self._generations[name] = reply.generation
        return not reply.is_late

    def _join(self, name: str) -> Reply:
        """Again while a master that lost its journal does not know who is to be waited for: no worker is late then."""
        end_at = time.monotonic() + self._patience
        while True:
            try:
                return self._link.ask(JoinSync(name=name, round=self._round), timeout=self._patience)
            except Rejected as error:
                left = end_at - time.monotonic()
                if error.code != ErrorCode.WORLD_UNKNOWN or left <= 0:
                    raise
                _log.info("still trying to join sync point %r: %s", name, error)
                pause_before_retry(left)

    def wait_sync_finished(self, name: str, timeout: float = 0) -> bool:
        """Whether all have joined within so many seconds; 0: however long it takes (an hour, then laggards are dropped)."""
        generation = self._generations.get(name, 0)
        return self._wait(
            lambda wait: SyncFinished(name=name, round=self._round, generation=generation, wait=wait), timeout
        )

    def barrier(self, name: str, timeout: float = 0) -> bool:
        """Whether a worker opened the barrier within so many seconds; 0: however long it takes."""
        generation = self._passed.get(name, 0) + 1
        is_open = self._wait(
            lambda wait: BarrierOpen(name=name, round=self._round, generation=generation, wait=wait), timeout
        )
        if is_open:
            self._passed[name] = generation
        return is_open

    def notify_barrier(self, name: str) -> bool:
        """Open the barrier for one passage of all workers."""
        try:
            self._link.ask(NotifyBarrier(name=name, round=self._round), timeout=self._patience)
        except (Rejected, Unavailable) as error:
            _log.warning("could not open barrier %r: %s", name, error)
            return False
        return True

    def _wait(self, question: Callable[[float], WorkerRequest], timeout: float) -> bool:
        end_at = time.monotonic() + timeout if timeout > 0 else float("inf")
        while True:
            wait = min(max(end_at - time.monotonic(), 0.0), _SLICE)
            try:
                reply = self._link.ask(question(wait), timeout=wait + _MARGIN)
            except Rejected as error:
                _log.warning("waiting failed: %s", error)
                return False
            except Unavailable as error:
                _log.info("still waiting: %s", error)
                pause_before_retry(end_at - time.monotonic())
            else:
                assert isinstance(reply, SyncState), f"{reply} for a wait"
                if reply.is_reached:
                    return True
            if time.monotonic() >= end_at:
                return False


def barrier(name: str = "barrier", timeout: float = 0) -> None:
    """
    Wait until every worker that runs has come here; 0 seconds: however long it takes. The same name may be used again and again.

    Needs no process group. Raises `TimeoutError` if not all came in time, or if the others have gone on without this worker.
    """
    client = SyncClient()
    if not client.join_sync(name) or not client.wait_sync_finished(name, timeout):
        raise TimeoutError(
            f"barrier {name!r}: not all workers arrived in time"
            + (f" within {timeout:g} s." if timeout else ", or they have continued without this worker.")
        )
