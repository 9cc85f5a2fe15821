"""The memory of the first save is there before it."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

from dlrover.snapshot.copy.copying import address_of
from dlrover.snapshot.memory.segment import SlotName, segment_paths
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine
from dlrover.trainer.torch.flash_checkpoint.saving.outlets import ThreadOutlet
from dlrover.trainer.torch.flash_checkpoint.saving.preparing import Preparation


def test_the_first_save_goes_into_the_file_that_was_prepared(tmp_path: Path) -> None:
    """Also a state of very many tensors, whose names alone take more room than that of a small one."""
    engine = CheckpointEngine(str(tmp_path / "checkpoints"), outlet=ThreadOutlet(tmp_path / "shm"))
    try:
        params = [torch.nn.Parameter(torch.ones(8)) for _ in range(300)]
        optimizer = torch.optim.AdamW(params)
        for param in params:
            param.grad = torch.ones(8)
        optimizer.step()
        assert engine._preparation is not None
        engine._preparation.wait()
        [prepared] = segment_paths(engine.outlet.home, 0)
        state = {
            "params": {f"layers.{n}.attention.weight": p for n, p in enumerate(params)},
            "o": optimizer.state_dict(),
        }
        assert engine.save(1, {"m": state}, {"m": "f.pt"}, is_storage=False)
        assert segment_paths(engine.outlet.home, 0) == [prepared]
    finally:
        engine.close()


def test_memory_that_is_ready_is_not_gone_through_again() -> None:
    """The second time is the first step after a restart, when a restore may be running."""
    rooms = [mmap.mmap(-1, 4 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(3)]
    first, second, other = (memoryview(room) for room in rooms)
    given = iter(([first[:], second[:]], [first[:], second[:]], [other[:], memoryview(b"")]))
    preparation = Preparation(lambda num_bytes, num_tensors: next(given), has_segments=True)
    try:
        preparation.wait()
        assert num_resident(first) == num_resident(second) == 4
        for room in rooms[:2]:
            room.madvise(mmap.MADV_DONTNEED)  # so that a second touch would show
        found = []
        for number in (1, 2):
            preparation.after_save(SlotName(number, number, 0, f"file {number}", 0))
            preparation.wait()
            found.append((num_resident(first) + num_resident(second), num_resident(other)))
    finally:
        preparation.close()
    assert found == [(0, 0), (0, 4)]


def num_resident(room: memoryview) -> int:
    pages = (ctypes.c_ubyte * (room.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address_of(room)), ctypes.c_size_t(room.nbytes), pages) == 0
    return sum(page & 1 for page in pages)
