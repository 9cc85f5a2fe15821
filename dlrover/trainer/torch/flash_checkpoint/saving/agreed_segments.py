"""Slots that all saving ranks get together, or none of them: so they always hold a step in common."""

from __future__ import annotations

from dlrover.protocol.errors import Unavailable
from dlrover.snapshot.memory.segment import SegmentWriter, SlotInWriting
from dlrover.trainer.torch.flash_checkpoint.saving.agreement import Agreement


class AgreedSegments(SegmentWriter):
    """Gives a slot only if every saving rank has got one. Asked once per save, also where the room is found in several tries."""

    agreement: Agreement
    num_bytes = 0
    """Of the newest slot in writing."""
    is_agreed = False
    """Every rank has got its slot for the present save."""
    has_given_up = False
    _is_decided = False
    _is_last_try = True

    def begin_save(self, *, is_last_try: bool) -> None:
        self.is_agreed, self._is_decided, self._is_last_try = False, False, is_last_try

    def begin_alone(self) -> None:
        """A save for which no other rank is asked."""
        self.is_agreed, self._is_decided, self._is_last_try = False, True, True

    def begin(self, data_bytes: int, meta_bytes: int) -> SlotInWriting | None:
        slot = None
        try:
            slot = super().begin(data_bytes, meta_bytes)
        except BaseException:
            if not self._is_decided:
                self.agreement.decide(is_ready=False, is_giving_up=True)  # the others must not wait for us
            raise
        if not self._is_decided:
            self._is_decided = True
            try:
                is_go, self.has_given_up = self.agreement.decide(
                    is_ready=slot is not None, is_giving_up=slot is None and self._is_last_try
                )
            except RuntimeError as error:  # what torch raises when a rank is gone
                if slot is not None:
                    slot.abandon()
                raise Unavailable(f"The saving ranks could not agree on this save: {error}") from error
            if not is_go and slot is not None:
                slot.abandon()
                return None
            self.is_agreed = is_go
        self.num_bytes = data_bytes
        return slot
