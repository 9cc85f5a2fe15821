"""
The line of a cluster's process to its master: it reports how far it is, and hears what the cluster does.

A thread asks for the view of the cluster and waits for a newer one; nothing polls. When the version of this process is over, its agent kills it:
code that would need a newer version just waits for that.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import DLRoverError, Rejected, Unavailable
from dlrover.protocol.messages.cluster import AnyClusterCommand, AskCluster, VersionView
from dlrover.protocol.messages.job import Reply
from dlrover.trainer import environment
from dlrover.trainer.agent_link import Link, current_link

log = logging.getLogger("dlrover.trainer.tensorflow")

_WAIT = 60.0
"""Seconds that a question waits at the master before it is asked again."""
_MARGIN = 5.0
_PATIENCE = 600.0
"""Seconds for the master to take a report; it may be away meanwhile."""
_END_PATIENCE = 900.0
"""Seconds that the process of an ended version waits to be killed."""
_LONGEST_PAUSE = 1.0

T = TypeVar("T", bound=AnyClusterCommand)


class VersionOver(DLRoverError):
    """This process belongs to an older version of the cluster. It has nothing left to do."""


class ClusterLink:
    """One per process."""

    def __init__(self, where: environment.WorkerEnvironment, link: Link | None = None) -> None:
        self.where = where
        self._link = current_link() if link is None else link
        self._news = threading.Condition()
        """Guards the view. Told when it changed."""
        self._view = VersionView()
        self._thread = threading.Thread(target=self._follow, name="cluster", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def view(self) -> VersionView:
        with self._news:
            return self._view

    def wait_for(self, is_met: Callable[[VersionView], bool], timeout: float | None = None) -> VersionView:
        """Raises `VersionOver` and TimeoutError."""
        end_at = None if timeout is None else time.monotonic() + timeout
        with self._news:
            while True:
                if self._view.version > self.where.cluster_version:
                    raise VersionOver(f"version {self._view.version} of the cluster has begun")
                if self._view.number and is_met(self._view):
                    return self._view
                left = None if end_at is None else end_at - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the cluster is still {self._view.phase.value}")
                self._news.wait(left)

    def wait_for_newer(self, number: int) -> VersionView:
        """Until the view has another number, whatever its version: for an evaluator, which outlives versions."""
        with self._news:
            while self._view.number == number:
                self._news.wait()
            return self._view

    def wait_for_training_end(self) -> None:
        view = self.view
        while not view.is_over:
            view = self.wait_for_newer(view.number)

    def tell(self, command: T) -> Reply:
        """Raises `VersionOver` if the master counts this process as ended, and Unavailable if it cannot be reached."""
        try:
            return self._link.ask(replace(command, round=self.where.round), timeout=_PATIENCE)
        except Rejected as error:
            if error.code == ErrorCode.STALE_ROUND:
                raise VersionOver(str(error)) from error
            raise

    def await_end(self) -> None:
        """The agent is about to kill this process."""
        log.info(
            "version %d of the cluster has ended; this process waits until the agent ends it",
            self.where.cluster_version,
        )
        time.sleep(_END_PATIENCE)
        raise VersionOver(
            f"the agent did not end this process within {_END_PATIENCE:g} s after its cluster version ended"
        )

    def _follow(self) -> None:
        while True:
            try:
                reply = self._link.ask(AskCluster(seen=self.view.number, wait=_WAIT), timeout=_WAIT + _MARGIN)
            except (Rejected, Unavailable) as error:
                log.debug("the view of the cluster is not to be had now: %s", error)
                time.sleep(random.uniform(0.0, _LONGEST_PAUSE))
                continue
            assert isinstance(reply, VersionView), reply
            with self._news:
                self._view = reply
                self._news.notify_all()
