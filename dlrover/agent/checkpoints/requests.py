"""
What was asked for of a slot, and whether this node may do it.

A slot may have come from another node, and then its request names a place that this node has to trust. It is obeyed only where a worker
of this node saves to the same place.
"""

from __future__ import annotations

from collections.abc import Callable

from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.memory.contents import decode_contents
from dlrover.snapshot.memory.segment import PinnedSlot
from dlrover.snapshot.storage.persist import SaveRequest, read_request
from dlrover.snapshot.storage.places import NotNamed, SavePlaces


class SlotRequests:
    """Of the slots of one node."""

    def __init__(self, on_error: Callable[[str, str], None]) -> None:
        """`on_error` is told of a kind of failure, and its message."""
        self._on_error = on_error
        self._places = SavePlaces()
        self._own_from: dict[str, int] = {}
        """By segment: the first generation that a worker of this node told us of. What is older may have come from another node."""
        self._has_refused = False
        """Whether something of another node waits for a worker of this node to name the same."""

    def read(self, pinned: PinnedSlot) -> SaveRequest | None:
        """None: there is none that this node can obey."""
        try:
            request = read_request(decode_contents(pinned.sections()))
            return self._places.restrict(request) if request is not None and self.is_foreign(pinned) else request
        except NotNamed as error:
            self._has_refused = True
            step = pinned.record.step
            self._on_error(f"not named {error}", f"step {step} is not written by this node: {error}")
            return None
        except DLRoverError as error:
            self._on_error("unreadable", f"a snapshot cannot be written: {error}")
            return None

    def is_foreign(self, pinned: PinnedSlot) -> bool:
        """Whether the slot came from another node. A worker may have saved into the file since: it told us from which generation on."""
        own_from = self._own_from.get(str(pinned.segment.path))
        return pinned.segment.owner.local_rank < 0 and (own_from is None or pinned.record.generation < own_from)

    def is_own_from(self, path: str, generation: int) -> None:
        """A worker of this node saved into the segment."""
        self._own_from.setdefault(path, generation)

    def name_place(self, place: bytes) -> bool:
        """
        A worker of this node says where it saves. Whether that may allow what another node sent before and was refused.

        Raises DLRoverError.
        """
        if not place or not self._places.add(place) or not self._has_refused:
            return False
        self._has_refused = False
        return True
