"""
What an agent and a worker with a guard say to each other when a peer of the worker is lost: a few words of the progress page.

The agent orders, the worker answers, each by one word that the other waits for in the kernel. No message is sent before that, and none needs the
interpreter of a main thread that is inside a collective: a side thread of the worker hears the order. A worker without a guard never maps this.
"""

from __future__ import annotations

import ctypes
import os
import time

from dlrover.host.shared_page import futex
from dlrover.host.shared_page.breath_words import BreathAnswer, BreathOrder

OFFSET = 1024
"""From the beginning of the room of `death_notice`."""


class _Layout(ctypes.Structure):
    _fields_ = [
        ("order", ctypes.c_uint32),
        ("answer", ctypes.c_uint32),
        ("is_guarded", ctypes.c_uint32),
        ("is_piece", ctypes.c_uint32),
        ("step", ctypes.c_int64),
        ("digest", ctypes.c_uint64),
        ("piece", ctypes.c_uint64),
        ("can_finish", ctypes.c_uint32),
        ("num_ready", ctypes.c_uint32),
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
    def offer(self) -> tuple[int, int, int | None, bool]:
        """
        Step, digest, which piece of the state it is (None: the whole), and whether the worker can finish the next step as well. Valid once `answer`
        is OFFERED or FINISHED.
        """
        words = self._words
        return words.step, words.digest, words.piece if words.is_piece else None, bool(words.can_finish)

    @offer.setter
    def offer(self, offer: tuple[int, int, int | None, bool]) -> None:
        words = self._words
        words.step, words.digest, piece, can_finish = offer
        words.is_piece, words.piece = piece is not None, piece or 0
        words.can_finish = can_finish

    @property
    def num_ready(self) -> int:
        """How many steps of this worker had all their gradients. Its peers wait for this."""
        return int(self._words.num_ready)

    @num_ready.setter
    def num_ready(self, value: int) -> None:
        self._words.num_ready = value
        self.wake_peers()

    def wake_peers(self) -> None:
        """Who waits for `num_ready` looks again."""
        futex.wake(self._address + _Layout.num_ready.offset)

    def wait_while_ready(self, value: int, timeout: float) -> None:
        """Until `num_ready` is another than this one, `wake_peers` is called, or the time is over."""
        futex.wait_while(self._address + _Layout.num_ready.offset, value, timeout)

    def wait_for_order(self, than: BreathOrder, timeout: float | None) -> BreathOrder:
        """Until it is another than this one, or the time is over."""
        self._wait(_Layout.order.offset, than, timeout)
        return self.order

    def wait_for_answer(self, than: BreathAnswer, timeout: float) -> BreathAnswer:
        self._wait(_Layout.answer.offset, than, timeout)
        return self.answer

    def close(self) -> None:
        """No thread may wait there any more."""
        futex.unmap(*self._mapping)

    def _wait(self, offset: int, value: int, timeout: float | None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        word = ctypes.c_uint32.from_address(self._address + offset)
        while word.value == value:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not futex.wait_while(self._address + offset, value, left):
                return
