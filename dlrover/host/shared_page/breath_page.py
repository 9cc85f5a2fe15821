"""
What an agent and a worker with a guard say to each other when a peer of the worker is lost: a few words of the progress page.

The agent orders, the worker answers, each by one word that the other waits for in the kernel. No message is sent before that, and none needs the
interpreter of a main thread that is inside a collective: a side thread of the worker hears the order. A worker without a guard never maps this.
"""

from __future__ import annotations

import ctypes
import enum
import os
import time

from dlrover.host.shared_page import futex

OFFSET = 1024
"""From the beginning of the room of `death_notice`."""
EXIT_LAST_BREATH = 86
"""Exit code of a worker that ended because a peer was lost, after its last step was taken care of."""


class BreathOrder(enum.IntEnum):
    """The agent's word."""

    NONE = 0
    OFFER = 1
    """A peer is lost: end the step that is broken, and say which step you have whole."""
    SAVE = 2
    """Write what you have offered to memory, then end."""
    LEAVE = 3
    """End without saving."""


class BreathAnswer(enum.IntEnum):
    """The worker's word."""

    NONE = 0
    OFFERED = 1
    SAVED = 2
    REFUSED = 3
    """There is a doubt about the state: as if there were no guard."""


class _Layout(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_uint32),
        ("answer", ctypes.c_uint32),
        ("is_guarded", ctypes.c_uint32),
        ("is_piece", ctypes.c_uint32),
        ("step", ctypes.c_int64),
        ("digest", ctypes.c_uint64),
        ("piece", ctypes.c_uint64),
    ]


class BreathPage:
    """One side's hold on it."""

    def __init__(self, descriptor: int, offset: int) -> None:
        """Raises OSError where memory cannot be shared or waited for."""
        futex.check_kernel()
        self._mapping = futex.map_file(descriptor)
        self._address = self._mapping[0] + offset + OFFSET
        self._words = _Layout.from_address(self._address)

    @classmethod
    def open(cls, path: str, offset: int) -> BreathPage:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(descriptor, offset)
        finally:
            os.close(descriptor)

    @property
    def is_guarded(self) -> bool:
        return bool(self._words.is_guarded)

    @is_guarded.setter
    def is_guarded(self, value: bool) -> None:
        self._words.is_guarded = int(value)

    @property
    def order(self) -> BreathOrder:
        value = self._words.order
        return BreathOrder(value) if value in list(BreathOrder) else BreathOrder.LEAVE

    @order.setter
    def order(self, order: BreathOrder) -> None:
        self._words.order = order
        futex.wake(self._address + _Layout.order.offset)

    @property
    def answer(self) -> BreathAnswer:
        value = self._words.answer
        return BreathAnswer(value) if value in list(BreathAnswer) else BreathAnswer.REFUSED

    @answer.setter
    def answer(self, answer: BreathAnswer) -> None:
        self._words.answer = answer
        futex.wake(self._address + _Layout.answer.offset)

    @property
    def offer(self) -> tuple[int, int, int | None]:
        """Step, digest, and which piece of the state it is, None: the whole. Meant once `answer` is OFFERED."""
        words = self._words
        return words.step, words.digest, words.piece if words.is_piece else None

    @offer.setter
    def offer(self, offer: tuple[int, int, int | None]) -> None:
        words = self._words
        words.step, words.digest, piece = offer
        words.is_piece, words.piece = piece is not None, piece or 0

    def wait_for_order(self, than: BreathOrder, timeout: float | None) -> BreathOrder:
        """Until it is another than this one, or the time is over."""
        self._wait(_Layout.order.offset, than, timeout)
        return self.order

    def wait_for_answer(self, than: BreathAnswer, timeout: float) -> BreathAnswer:
        self._wait(_Layout.answer.offset, than, timeout)
        return self.answer

    def close(self) -> None:
        """Nobody may wait there any more."""
        futex.unmap(*self._mapping)

    def _wait(self, offset: int, value: int, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        word = ctypes.c_uint32.from_address(self._address + offset)
        while word.value == value:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not futex.wait_while(self._address + offset, value, left):
                return
