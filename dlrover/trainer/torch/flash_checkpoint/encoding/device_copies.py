"""
Copies between a slot and an accelerator.

On CUDA the segment is registered once with the driver, which then reads and writes it without a buffer in between; the copies run in a
stream of their own, which first waits for the work that makes the tensors, and one event says when all have ended. Other work of
the device goes on meanwhile. On any other accelerator torch copies, and the whole device is waited for.

It was not tried on a GPU: the order of the calls is tested with a stand-in for `torch.cuda`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from dlrover.snapshot.copy.copying import address_of

log = logging.getLogger("dlrover.trainer.flash_checkpoint")

_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of the process."""


class DevicePair:
    """A block of the slot and the storage on a device that it belongs to."""

    def __init__(self, block: memoryview, storage: torch.UntypedStorage) -> None:
        self.host = torch.frombuffer(block, dtype=torch.uint8)
        self.device = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def copy(self, *, out_of_slot: bool) -> None:
        if out_of_slot:
            self.device.copy_(self.host, non_blocking=True)
        else:
            self.host.copy_(self.device, non_blocking=True)


class DeviceCopies:
    """Copies that were started; `finish` waits for them."""

    def __init__(self, pairs: Sequence[Any], *, out_of_slot: bool = False, cuda: Any = None) -> None:
        """`cuda` stands in for `torch.cuda`."""
        self._cuda = cuda if cuda is not None else torch.cuda
        self._out_of_slot = out_of_slot
        self._events: list[Any] = []
        self._others: list[torch.device] = []
        by_device: dict[torch.device, list[Any]] = {}
        for pair in pairs:
            by_device.setdefault(pair.device.device, []).append(pair)
        for device, own in by_device.items():
            if device.type == "cuda" or cuda is not None:
                self._start_in_stream(device, own)
            else:
                for pair in own:
                    pair.copy(out_of_slot=out_of_slot)
                self._others.append(device)
        self._pairs = pairs  # alive until the copies have ended

    def finish(self) -> None:
        for device, event in self._events:
            event.synchronize()
            if self._out_of_slot:
                self._cuda.current_stream(device).wait_event(event)
        for device in self._others:
            torch.accelerator.synchronize(device)  # torch 2.6; there are devices here, so it is new enough to know them

    def _start_in_stream(self, device: torch.device, pairs: Sequence[Any]) -> None:
        stream = _stream_of(self._cuda, device)
        stream.wait_stream(self._cuda.current_stream(device))
        with self._cuda.stream(stream):
            for pair in pairs:
                pair.copy(out_of_slot=self._out_of_slot)
                pair.device.record_stream(stream)  # its memory is not given to others before the copy has ended
            event = self._cuda.Event()
            event.record(stream)
        self._events.append((device, event))


_streams: dict[tuple[int, torch.device], Any] = {}


def _stream_of(cuda: Any, device: torch.device) -> Any:
    """One for the life of the process: making them costs, and their number is limited."""
    key = (id(cuda), device)
    if key not in _streams:
        _streams[key] = cuda.Stream(device)
    return _streams[key]


class Pinning:
    """Memory of the segment that the CUDA driver knows: slots of the newest file."""

    def __init__(self, cuda: Any = None) -> None:
        self._cuda = cuda
        self._views: dict[tuple[int, int], memoryview] = {}
        """By address and length. They keep the memory mapped as long as the driver knows it."""

    def pin(self, view: memoryview) -> bool:
        """False: there is no CUDA in this process yet, or the driver refuses. Copies then are slower, and the same."""
        cuda = self._cuda if self._cuda is not None else _cuda_in_use()
        if cuda is None or not view.nbytes:
            return False
        wanted = (address_of(view), view.nbytes)
        if wanted in self._views:
            return True
        error = int(cuda.cudart().cudaHostRegister(*wanted, _PORTABLE))
        if error:
            log.info(
                "The driver cannot pin the memory of snapshots (error %d). Copies go through a buffer, which "
                "makes them slower.",
                error,
            )
            return False
        self._cuda = cuda
        self._views[wanted] = view[:]
        return True

    def release(self) -> None:
        for (address, _), view in self._views.items():
            self._cuda.cudart().cudaHostUnregister(address)
            view.release()
        self._views.clear()


def _cuda_in_use() -> Any:
    """None where it is not used yet: to start it here would take the device's memory."""
    return torch.cuda if torch.cuda.is_available() and torch.cuda.is_initialized() else None
