"""
Memory that is ready before the first save: pages that were never touched cost several times the copy.

After the first step of an optimizer its parameters and state are known, and with them nearly the size of what will be saved. One thread then
reserves the slots and touches their pages, and has them pinned where there is a GPU, while training goes on. Later it does the same for a file that had to grow.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.copy.copying import address_of, prefault
from dlrover.snapshot.memory.segment import SlotName
from dlrover.trainer.torch.flash_checkpoint.encoding.device_copies import Pinning

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

SLACK = 1.05
"""Buffers, schedulers, what the caller adds."""
SLACK_BYTES = 1024 * 1024


class Preparation:
    def __init__(self, reserve: Callable[[int, int], Iterable[memoryview]], *, has_segments: bool) -> None:
        """
        `reserve` has room for so many bytes in so many tensors ready and returns it, slot after slot. With `has_segments` there are some of a
        former life, only to be mapped.
        """
        self._reserve = reserve
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._path = ""
        self._touched: set[tuple[int, int]] = set()
        """Address and length of what is ready: to go through it again would take a processor from the restore that may run now."""
        self._pinning = Pinning()
        self._is_sized = False
        self._hook: Any = register_optimizer_step_post_hook(self._after_step)
        if has_segments:
            self._start(0, 0)

    def after_save(self, name: SlotName) -> None:
        self._unhook()
        if name.path != self._path:
            self._path = name.path
            self._start(0, 0)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self._unhook()
        self._stop.set()
        self.wait()
        self._pinning.release()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_sized:
            return
        self._is_sized = True  # the hook goes later: torch is just walking over all of them
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*params, *state))
        self._start(int(num_bytes * SLACK) + SLACK_BYTES, len(params) + len(state))

    def _start(self, num_bytes: int, num_tensors: int) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._run, args=(num_bytes, num_tensors), name="dlrover-prefault", daemon=True
            )
            self._thread.start()

    def _run(self, num_bytes: int, num_tensors: int) -> None:
        try:
            for index, view in enumerate(self._reserve(num_bytes, num_tensors)):
                with view:
                    self._touch(view, is_first=index == 0)
        except (OSError, DLRoverError) as error:
            log.info("Memory for snapshots could not be prepared: %s", error)  # the save itself will say it aloud

    def _touch(self, view: memoryview, *, is_first: bool) -> None:
        place = (address_of(view), view.nbytes) if view.nbytes else (0, 0)
        if is_first and place not in self._touched:  # of a file that we have not seen
            self._touched.clear()
            self._pinning.release()
        if view.nbytes and place not in self._touched and prefault(view, self._stop):
            self._touched.add(place)
            self._pinning.pin(view)

    def _unhook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
