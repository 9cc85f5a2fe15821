"""Copies from and to a GPU, with a stand-in for `torch.cuda` that notes what is asked of it, and in which order."""

from __future__ import annotations

import contextlib
import mmap

import torch

from dlrover.trainer.torch.flash_checkpoint.encoding.device_copies import DeviceCopies, Pinning


class StandIn:
    """What we use of `torch.cuda`."""

    def __init__(self, error: int = 0) -> None:
        self.calls: list[str] = []
        self._error = error

    def Stream(self, device):  # noqa: N802  # torch's name
        return Stream(self, "side")

    def current_stream(self, device):
        return Stream(self, "main")

    @contextlib.contextmanager
    def stream(self, stream):
        self.calls.append(f"enter {stream.name}")
        yield
        self.calls.append(f"leave {stream.name}")

    def Event(self):  # noqa: N802
        return Event(self)

    def cudart(self):
        return self

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.calls.append(f"register {num_bytes} {flags}")
        return self._error

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append("unregister")
        return 0


class Stream:
    def __init__(self, cuda: StandIn, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._cuda.calls.append(f"{self.name} waits for event")


class Event:
    def __init__(self, cuda: StandIn) -> None:
        self._cuda = cuda

    def record(self, stream: Stream) -> None:
        self._cuda.calls.append(f"event after {stream.name}")

    def synchronize(self) -> None:
        self._cuda.calls.append("wait for event")


class OnDevice:
    def __init__(self, cuda: StandIn) -> None:
        self.device = torch.device("cuda", 0)
        self._cuda = cuda

    def record_stream(self, stream: Stream) -> None:
        self._cuda.calls.append(f"kept for {stream.name}")


class Pair:
    def __init__(self, cuda: StandIn) -> None:
        self.device = OnDevice(cuda)
        self._cuda = cuda

    def copy(self, *, out_of_slot: bool) -> None:
        self._cuda.calls.append("copy out" if out_of_slot else "copy in")


def test_a_save_copies_in_a_stream_of_its_own_and_waits_for_one_event():
    cuda = StandIn()
    copies = DeviceCopies([Pair(cuda), Pair(cuda)], cuda=cuda)
    assert cuda.calls == [
        "side waits for main",
        "enter side",
        *["copy in", "kept for side"] * 2,
        "event after side",
        "leave side",
    ]
    cuda.calls.clear()
    copies.finish()
    assert cuda.calls == ["wait for event"]


def test_a_restore_is_seen_by_what_the_device_does_next():
    cuda = StandIn()
    DeviceCopies([Pair(cuda)], out_of_slot=True, cuda=cuda).finish()
    assert cuda.calls[-2:] == ["wait for event", "main waits for event"]


def test_memory_is_pinned_once_and_given_back():
    cuda = StandIn()
    pinning = Pinning(cuda)
    with mmap.mmap(-1, 8192) as first, mmap.mmap(-1, 4096) as second:
        with memoryview(first) as view, memoryview(second) as other:
            assert pinning.pin(view)
            assert pinning.pin(view)
            assert pinning.pin(other)
        pinning.release()
        pinning.release()
    assert cuda.calls == ["register 8192 1", "register 4096 1", "unregister", "unregister"]


def test_a_driver_that_refuses_and_a_process_without_cuda_change_nothing():
    cuda = StandIn(error=2)
    pinning = Pinning(cuda)
    with mmap.mmap(-1, 4096) as memory, memoryview(memory) as view:
        assert not pinning.pin(view)
        pinning.release()
        assert cuda.calls == ["register 4096 1"]
        assert not Pinning().pin(view) or torch.cuda.is_initialized()
