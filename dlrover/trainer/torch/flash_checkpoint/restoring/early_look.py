"""
What a former life of this rank left in memory, mapped and checked while the script still builds its model.

A restore is a copy, but two things stand before it, and together they last longer than the copy itself: the page tables of the segment (0.08 s
of a processor per GiB here) and the checksums (0.07 s). Neither needs the model, so they begin when the checkpointer is made, which is usually seconds before
the script asks for the state.

Nothing is held meanwhile. A generation never comes back, so if the slot still has it when the restore pins it, no process has written there since. What
a look finds damaged it keeps to itself: the restore looks again, and tells.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.copy.copying import prefault
from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SlotName, segment_paths
from dlrover.snapshot.storage.persist import of_present_history

_NUM_SUMMERS = 4


class EarlyLook:
    """One per engine. It looks once, at the newest complete state, in a thread that ends by itself."""

    def __init__(self, home: Path, shard: int) -> None:
        self._home, self._shard = home, shard
        self._found: tuple[SlotName, Segment] | None = None
        self._thread: threading.Thread | None = None
        if segment_paths(home, shard):
            self._thread = threading.Thread(target=self._look, name="dlrover-early-look", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Until the look has ended. It is no longer than a restore that would have to look itself."""
        if self._thread is not None:
            self._thread.join()

    def take_newest(self) -> tuple[SlotName, Segment] | None:
        """What was found intact, and its segment, mapped privately; the caller closes that. Given once."""
        self.wait()
        found, self._found = self._found, None
        return found

    def take(self, name: SlotName) -> Segment | None:
        """The same, if it is that state."""
        found = self.take_newest()
        if found is None:
            return None
        seen, segment = found
        if (seen.path, seen.slot, seen.generation) == (name.path, name.slot, name.generation):
            return segment
        segment.close()
        return None

    def close(self) -> None:
        found = self.take_newest()
        if found is not None:
            found[1].close()

    def _look(self) -> None:
        try:
            name = self._newest()
            if name is None:
                return
            segment = Segment(name.path, private=True)
            try:
                pinned = segment.pin(name.slot, name.generation)
                if pinned is not None:
                    with pinned:
                        if not check(pinned):
                            with pinned.data as data:  # without sums nobody has read it yet
                                prefault(data, for_reading=True)
                    self._found = name, segment
            finally:
                if self._found is None:
                    segment.close()
        except (OSError, DLRoverError):
            return  # gone meanwhile, or damaged: the restore finds out itself, and says so

    def _newest(self) -> SlotName | None:
        found: list[SlotName] = []
        for path in segment_paths(self._home, self._shard):
            with Segment(path) as segment:
                found += segment.complete_slots()
        slots = of_present_history(found) if found else []
        return max(slots, default=None)


def close_behind(segment: Segment) -> None:
    """Give a mapping back without waiting for it: to take down page tables lasts as long as the copy (0.07 s per GiB here)."""
    threading.Thread(target=segment.close, name="dlrover-unmap", daemon=True).start()


def check(pinned: PinnedSlot) -> bool:
    """Raise Corrupt when a byte has changed since the sums were made. False: they are not made yet."""
    with ThreadPoolExecutor(min(_NUM_SUMMERS, len(os.sched_getaffinity(0))), "dlrover-verify") as pool:
        return pinned.verify(pool)
