"""
The end of a worker whose peer is lost: it leaves the broken collective, offers the last step that it has whole, and saves it if it is asked to.

A side thread waits for the agent's order. It closes the connections of this process, so that a collective raises which waits for a peer that is dead, dying or
stopped; it raises nothing into Python code, so that a step of an optimizer is never cut. Everything else happens in the main thread, where the guard
has caught the error.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from dlrover.agreed.last_breath import LIMIT
from dlrover.host.edges import contained
from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.host.shared_page.breath_words import EXIT_LAST_BREATH, BreathAnswer, BreathOrder
from dlrover.protocol.progress_page import DEATH_NOTICE_AT
from dlrover.trainer import environment
from dlrover.trainer.torch.resilience.meeting import Meeting
from dlrover.trainer.torch.resilience.recipe import DoubtError, digest_of, piece_of
from dlrover.trainer.torch.resilience.saves import KnownSave, save_log

log = logging.getLogger("dlrover.trainer.resilience")

_PATIENCE = 2 * LIMIT + 1.0
"""Seconds for the agent's second order. It has taken all others by then, or is gone."""
_AGAIN = 0.2
"""Seconds after which connections are closed once more: one may just have been opened, and nothing tells of that."""


class LastBreath:
    """This worker's half of it. Built by the first guard of a process under `dlrover-run`."""

    def __init__(self, page: BreathPage) -> None:
        self._page = page
        self._pid = os.getpid()
        self._has_offered = False
        self._meeting: Meeting | None = None
        self._listener = threading.Thread(target=self._listen, name="last breath", daemon=True)
        self._listener.start()

    @classmethod
    def open(cls) -> LastBreath | None:
        """None: there is no agent, or it does not watch."""
        where = environment.current()
        if where is None or not where.progress_page:
            return None
        try:
            return cls(BreathPage.open(where.progress_page, DEATH_NOTICE_AT))
        except OSError as error:
            log.info("this worker cannot save the last step after a failure: %s", error.strerror)
            return None

    @property
    def is_announced(self) -> bool:
        """The agent asks this worker for its last step, if a peer is lost."""
        return self._page.is_guarded

    @is_announced.setter
    def is_announced(self, value: bool) -> None:
        self._page.is_guarded = value

    @property
    def is_due(self) -> bool:
        """A peer is lost. One load from memory: asked twice in each step."""
        return self._page.order is not BreathOrder.NONE and os.getpid() == self._pid

    def wait_until_due(self) -> bool:
        """After an error that looks like the loss of a peer: whether the agent says so, too."""
        return os.getpid() == self._pid and self._page.wait_for_order(BreathOrder.NONE, LIMIT) is not BreathOrder.NONE

    def open_meeting(self, models: Iterable[Any]) -> Meeting | None:
        self._meeting = Meeting.open(self._page, models)
        return self._meeting

    def offer(
        self,
        num_done: int,
        build: Callable[[dict[str, Any], int, int], dict[str, Any]],
        unequal: Collection[int],
        *,
        can_finish: bool = False,
    ) -> None:
        """
        Offer the last whole step, wait, save it or not, and end this process. `build` makes the state of a shape, of the old step's number and the
        new one's, as it is after `num_done` guarded steps; `unequal` are addresses of tensors that differ from rank to rank.

        Returns only with `can_finish`, if the agent wants the next step: then it has to be finished and offered.
        """
        known = save_log().known
        try:
            step = save_log().step_after(num_done)
            assert known is not None, "a step is known"
            parts = build(known.shape, known.step, step)
            if known.whole is not None:
                parts = {**known.whole(), **parts}
            digest, piece = digest_of(parts, unequal), piece_of(parts)
            known.engine.release()
        except Exception as error:  # the edge of this process: whatever it is, the others must not wait for us
            self._refuse(error)
        before = BreathOrder.FINISH if self._has_offered else BreathOrder.OFFER
        self._page.offer = (step, digest, piece, can_finish)
        self._page.answer = BreathAnswer.FINISHED if self._has_offered else BreathAnswer.OFFERED
        self._has_offered = True
        order = self._page.wait_for_order(before, _PATIENCE)
        if order is BreathOrder.FINISH and can_finish:
            return
        if order is BreathOrder.SAVE:
            self._save(known, step, parts, digest, piece)
        _leave()

    def _save(self, known: KnownSave, step: int, parts: dict[str, Any], digest: int, piece: int | None) -> None:
        round_ = environment.current().round  # type: ignore[union-attr]
        # Pieces of one state have different digests, and one name.
        name = f"{digest:016x}" if piece is None else "pieces"
        with contained(self._refuse):
            known.engine.save_alone(step, parts, known.paths, f"breath-{round_}-{step}-{name}")
        log.warning("a worker was lost: step %d is saved to memory, and this worker ends", step)
        self._page.answer = BreathAnswer.SAVED

    def _refuse(self, error: Exception) -> NoReturn:
        level = logging.WARNING if isinstance(error, DoubtError) else logging.ERROR
        log.log(level, "the last step was not saved: %s", error, exc_info=not isinstance(error, DoubtError))
        self._page.answer = BreathAnswer.REFUSED
        _leave()

    def _listen(self) -> None:
        order = self._page.wait_for_order(BreathOrder.NONE, None)
        while order is BreathOrder.OFFER:
            if self._meeting is not None:
                self._meeting.interrupt()
            close_connections()
            order = self._page.wait_for_order(BreathOrder.OFFER, _AGAIN)


def close_connections() -> None:
    """
    Shut down every TCP connection of this process, which is about to end. Descriptors stay open, so that no number gets another meaning under the
    code that uses them.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                _shut_down(duplicate)


def _shut_down(connection: socket.socket) -> None:
    if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return  # gloo ends the process if its listening socket does
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other side has gone


def _leave() -> NoReturn:
    """At once: destructors of process groups wait for peers that are gone."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue
    os._exit(EXIT_LAST_BREATH)
