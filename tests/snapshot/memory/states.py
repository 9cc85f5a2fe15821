"""States that can be recognised: step N fills its memory with N + 1."""

from __future__ import annotations

from dlrover.snapshot.memory.segment import PinnedSlot, Segment, SegmentWriter, SlotName, segment_paths

NUM_BYTES = 200_000


def content_of(step: int, num_bytes: int = NUM_BYTES) -> bytes:
    return ((step + 1).to_bytes(8, "little") * (num_bytes // 8 + 1))[:num_bytes]


def save(writer: SegmentWriter, step: int, num_bytes: int = NUM_BYTES) -> SlotName | None:
    """Not in a `with` block: a writer that is killed (or whose hook raises) gives nothing up."""
    content = content_of(step, num_bytes)
    slot = writer.begin(num_bytes, 4096)
    if slot is None:
        return None
    data = slot.data
    for start in range(0, num_bytes, 2048):  # slowly, so that many kills fall into it
        end = min(start + 2048, num_bytes)
        data[start:end] = content[start:end]
    return slot.complete(
        step=step, round_=1, data_length=num_bytes, layout_hash=bytes(16), sections={"step": str(step).encode()}
    )


def check(pinned: PinnedSlot) -> int:
    """The step, after comparing every byte and the metadata with what that step must have."""
    step = pinned.record.step
    assert bytes(pinned.data) == content_of(step, pinned.record.data_length), f"step {step} is torn"
    assert pinned.sections()["step"] == str(step).encode()
    return step


def newest_step(home: object, rank: int = 0) -> int | None:
    """What a restore would take, as a stranger who just opened the directory."""
    names: list[SlotName] = []
    for path in segment_paths(str(home), rank):
        with Segment(path) as segment:
            names += segment.complete_slots()
    for name in sorted(names, reverse=True):
        with Segment(name.path) as segment:
            pinned = segment.pin(name.slot, name.generation)
            assert pinned is not None, "a complete slot of a dead writer cannot be locked"
            with pinned:
                return check(pinned)
    return None
