"""Segments: one complete state at every instant, whoever is killed when."""

from __future__ import annotations

import errno
import os
import random
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dlrover.host.processes import look_up
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.snapshot.memory.checksum import Corrupt
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, segment_paths
from dlrover.snapshot.memory.segment_format import (
    Owner,
    SegmentInvalid,
    SlotState,
    decode_record,
    encode_prelude,
    geometry_for,
    make_word,
)
from tests.snapshot.memory.states import NUM_BYTES, check, content_of, newest_step, save


class Killed(BaseException):
    """Stands for the end of the process at this instant."""


def test_a_reader_finds_what_was_saved(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    name = save(writer, 7)
    assert name is not None
    assert (name.step, name.round) == (7, 1)
    with Segment(name.path) as segment:
        assert segment.owner == owner
        pinned = segment.pin(name.slot)
        assert pinned is not None
        with pinned:
            assert check(pinned) == 7


def test_step_zero_is_a_step(home: Path, owner: Owner) -> None:
    assert newest_step(home) is None
    save(SegmentWriter(home, owner), 0)
    assert newest_step(home) == 0


def test_two_slots_take_turns_and_generations_grow(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    names = [save(writer, step) for step in (1, 2, 3)]
    slots = [name.slot for name in names if name]
    assert slots == [0, 1, 0]
    assert [(name.generation, name.step) for name in writer.complete_slots()] == [(2, 2), (3, 3)]


def test_a_new_trainer_goes_on_where_the_last_one_ended(home: Path, owner: Owner) -> None:
    first = SegmentWriter(home, owner)
    save(first, 1)
    save(first, 2)
    first.close()
    second = SegmentWriter(home, owner)
    assert [name.step for name in second.complete_slots()] == [1, 2]
    name = save(second, 3)
    assert name is not None
    assert name.generation == 3
    assert newest_step(home) == 3


def test_two_living_trainers_of_one_rank_are_refused(home: Path, owner: Owner) -> None:
    first = SegmentWriter(home, owner)
    save(first, 1)
    with pytest.raises(Unavailable, match="still in use by another trainer of rank 0"):
        SegmentWriter(home, owner)


HOLDER = """
import os, signal, sys
from dlrover.snapshot.memory.locks import ByteLocks
locks = ByteLocks(sys.argv[1])
assert locks.try_own(0)
memory = bytearray(os.urandom(1)) * (384 << 20)
print("ready", flush=True)
signal.pause()
"""


def test_the_lock_of_a_trainer_that_has_ended_stops_nobody_while_the_kernel_frees_its_memory(
    home: Path, owner: Owner
) -> None:
    """The kernel closes files after it has freed memory; it may also be done with both before we look, so there are some attempts."""
    first = SegmentWriter(home, owner)
    name = save(first, 1)
    first.close()
    assert name is not None
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", HOLDER, name.path], stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            with pytest.raises(Unavailable, match="still in use"):
                SegmentWriter(home, owner)
            holder.kill()
            descriptor = os.pidfd_open(holder.pid)
            try:
                while not (seen := look_up(holder.pid)) or not seen.is_exiting:
                    os.sched_yield()
                second = SegmentWriter(home, owner)
                was_early = not select.select([descriptor], [], [], 0)[0]
            finally:
                os.close(descriptor)
            assert save(second, 2) is not None
        waiting = [thread for thread in threading.enumerate() if thread.name == "lock of a dead writer"]
        for thread in waiting:
            thread.join(60)
        with Segment(name.path) as segment:
            assert segment.has_live_writer(), "the lock is the new writer's by now"
        second.close()
        if was_early and waiting:
            return
    pytest.fail("the lock of the dead trainer was never seen")


def test_a_pinned_slot_is_not_overwritten_and_two_pins_make_the_writer_busy(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    one, two = save(writer, 1), save(writer, 2)
    assert one is not None
    assert two is not None
    with Segment(one.path) as segment:
        old, new = segment.pin(one.slot), segment.pin(two.slot)
        assert old is not None
        assert new is not None
        assert save(writer, 3) is None, "the slot of step 1 is being read, the one of step 2 is the only other one"
        assert check(old) == 1
        old.close()
        assert save(writer, 3) is not None
        assert check(new) == 2
        assert save(writer, 4) is None
        new.close()
        assert save(writer, 4) is not None


def test_readers_of_one_process_do_not_release_each_other(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    one = save(writer, 1)
    save(writer, 2)
    assert one is not None
    with Segment(one.path) as segment:
        first, second = segment.pin(one.slot), segment.pin(one.slot)
        assert first is not None
        assert second is not None
        first.close()
        assert save(writer, 3) is None
        second.close()
        assert save(writer, 3) is not None


def test_a_slot_being_written_cannot_be_pinned(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    name = save(writer, 1)
    assert name is not None
    slot = writer.begin(NUM_BYTES, 100)
    assert slot is not None
    with slot, Segment(name.path) as segment:
        assert segment.pin(slot.slot) is None
        assert [each.step for each in segment.complete_slots()] == [1]
    assert newest_step(home) == 1


def test_a_pin_of_a_former_generation_is_refused(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    name = save(writer, 1)
    save(writer, 2)
    save(writer, 3)
    assert name is not None
    with Segment(name.path) as segment:
        assert segment.pin(name.slot, name.generation) is None


def test_a_complete_slot_can_be_given_up_unless_somebody_reads_it(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    first, second = save(writer, 1), save(writer, 2)
    assert first is not None
    assert second is not None
    with Segment(second.path) as segment:
        pinned = segment.pin(second.slot)
        assert pinned is not None
        with pinned:
            assert not writer.discard(second)
    assert writer.discard(second)
    assert not writer.discard(second)
    assert [name.step for name in writer.complete_slots()] == [1]
    third = save(writer, 3)
    assert third is not None
    assert third.slot == second.slot  # the other one is the only good state that there is
    assert third.generation > second.generation


def test_a_forked_child_does_not_keep_the_locks_of_a_dead_trainer(home: Path, owner: Owner) -> None:
    """A data-loading process that outlives its trainer must not stop the next one."""
    ready, go = os.pipe(), os.pipe()
    trainer = os.fork()
    if trainer == 0:
        writer = SegmentWriter(home, owner)
        save(writer, 5)
        slot = writer.begin(NUM_BYTES, 100)
        if os.fork() == 0:
            os.write(ready[1], b"%d" % os.getpid())
            os.read(go[0], 1)
        assert slot is not None
        os._exit(0)
    child = int(os.read(ready[0], 20))
    os.waitpid(trainer, 0)
    os.kill(child, 0)
    assert newest_step(home) == 5
    assert save(SegmentWriter(home, owner), 6) is not None
    os.write(go[1], b"x")
    for descriptor in (*ready, *go):
        os.close(descriptor)


@pytest.mark.parametrize("num_slots", [2, 3])
def test_a_state_that_grows_gets_a_new_file_and_the_old_one_stays_until_then(
    home: Path, owner: Owner, num_slots: int
) -> None:
    seen: list[tuple[str, int]] = []

    def look(name: str) -> None:
        found = []
        for path in segment_paths(home):
            with Segment(path) as segment:
                found += segment.complete_slots()
        seen.append((name, max(found).step if found else -1))

    writer = SegmentWriter(home, owner, num_slots=num_slots, after_store=look)
    save(writer, 1)
    del seen[:]
    assert save(writer, 2, 3 * NUM_BYTES) is not None
    assert {step for name, step in seen if name not in ("complete", "old file removed")} == {1}
    assert seen[-1] == ("old file removed", 2)
    assert len(segment_paths(home)) == 1
    assert save(writer, 3) is not None, "a smaller state fits into the larger file"
    assert len(segment_paths(home)) == 1


def test_a_file_is_born_with_the_room_of_its_first_slot_and_the_second_gets_its_own_before_it_is_used(
    home: Path, owner: Owner
) -> None:
    writer = SegmentWriter(home, owner)
    size = 1 << 20
    with writer.reserve(size) as first:
        assert first.nbytes >= size
    [path] = segment_paths(home, owner.global_rank)
    before = os.stat(path).st_blocks * 512
    assert size <= before < 2 * size < os.stat(path).st_size
    room = writer.room_of(1)
    assert room is not None
    with room.take() as second:
        assert second.nbytes >= size
    assert os.stat(path).st_blocks * 512 >= 2 * size
    assert writer.room_of(2) is None
    late = writer.room_of(1)
    writer.close()
    assert late is not None
    assert late.take().nbytes == 0, "the file was closed meanwhile"


def test_where_there_is_no_room_for_the_second_slot_the_next_state_gets_another_file(
    home: Path, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = SegmentWriter(home, owner)
    save(writer, 1)
    [path] = segment_paths(home, owner.global_rank)
    reserve = os.posix_fallocate

    def refuse(fd: int, offset: int, length: int) -> None:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    name = save(writer, 2)
    assert name is not None
    assert name.path != str(path)
    assert [found.step for found in writer.complete_slots()] == [2]
    writer.close()


def test_metadata_that_outgrows_its_announcement_is_refused_and_harms_nothing(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    save(writer, 1)
    slot = writer.begin(NUM_BYTES, 100)
    assert slot is not None
    with pytest.raises(ConfigError, match="the full size of the snapshot"), slot:
        slot.complete(step=2, round_=1, data_length=1, layout_hash=bytes(16), sections={"x": bytes(1_000_000)})
    assert newest_step(home) == 1
    assert save(writer, 2) is not None


def save_all(writer: SegmentWriter, sizes: tuple[int, ...]) -> None:
    for step, size in enumerate(sizes):
        save(writer, step, size)


def count_stores(home: Path, owner: Owner, sizes: tuple[int, ...]) -> int:
    names: list[str] = []
    writer = SegmentWriter(home, owner, after_store=names.append)
    save_all(writer, sizes)
    writer.close()
    for path in segment_paths(home):
        path.unlink()
    return len(names)


@pytest.mark.parametrize("sizes", [(1000, 1000, 1000, 1000), (1000, 1000, 500_000, 500_000)], ids=["steady", "growing"])
def test_a_kill_after_any_store_leaves_the_last_complete_step_or_the_new_one(
    home: Path, owner: Owner, sizes: tuple[int, ...]
) -> None:
    """Every store of every save is a cut; a stranger then finds one whole step, and a new trainer can go on."""
    num_stores = count_stores(home, owner, sizes)
    assert num_stores > 16
    for cut in range(num_stores):
        stores = 0
        completed = -1

        def strike(name: str, cut: int = cut) -> None:
            nonlocal stores, completed
            if name == "complete":
                completed += 1
            if stores == cut:
                raise Killed
            stores += 1

        writer = SegmentWriter(home, owner, after_store=strike)
        with pytest.raises(Killed):
            save_all(writer, sizes)
        writer.close()  # closes files, as the end of a process does
        assert newest_step(home) == (completed if completed >= 0 else None), f"cut {cut}"
        successor = SegmentWriter(home, owner)
        assert save(successor, 100) is not None
        assert newest_step(home) == 100
        successor.close()
        assert not list(home.glob(".*")), "a file that never got its name must not stay"
        for path in segment_paths(home):
            path.unlink()


NURSERY = """
# Forks trainers and kills them. A process of its own, because it forks without threads, and a fork is quick.
import os, random, select, signal, sys
from dlrover.snapshot.memory.segment import Segment, SegmentWriter, segment_paths
from dlrover.snapshot.memory.segment_format import SlotState
from tests.snapshot.conftest import owner_of
from tests.snapshot.memory.states import newest_step, save

def train(home, step, announce):
    writer = SegmentWriter(home, owner_of(0))
    while True:
        name = save(writer, step, 200_000 if step % 7 else 200_000 + step * 1000)
        os.write(announce, b"%d\\n" % step)
        assert name is not None
        step += 1

home, kills, dice, step, inside = sys.argv[1], int(sys.argv[2]), random.Random(20_260), 0, 0
for kill in range(kills):
    heard, announce = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        os.close(heard)
        train(home, step, announce)
    os.close(announce)
    first = os.read(heard, 100)
    select.select([], [], [], dice.random() * 0.01)  # the instant of the kill
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    lines = first
    while part := os.read(heard, 100_000):
        lines += part
    os.close(heard)
    announced = int(lines.split()[-1])
    found = newest_step(home)
    assert found in (announced, announced + 1), (kill, found, announced)
    with Segment(segment_paths(home)[-1]) as segment:
        inside += any(segment.view[segment.geometry.record_at(slot)] == SlotState.WRITING for slot in (0, 1))
    step = found + 1
print(kills, inside)
"""


def test_a_hundred_kills_at_random_instants_never_tear_a_state(home: Path) -> None:
    """Acceptance: the newest complete step is the last one that the trainer announced, or the one after it; bit for bit."""
    done = subprocess.run(
        [sys.executable, "-c", NURSERY, str(home), "100"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    num_kills, num_inside_a_save = map(int, done.stdout.split())
    assert num_kills == 100
    # On a busy machine the trainer hardly runs between two instants: few hits are enough to show that some were.
    assert num_inside_a_save >= 5, "kills should hit a save in progress, or this test shows little"


def test_flipped_bits_are_found_wherever_they_are(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    name = save(writer, 1, 3 * 16 * 1024 * 1024 + 5)
    assert name is not None
    with Segment(name.path) as segment:
        pinned = segment.pin(name.slot)
        assert pinned is not None
        with pinned:
            assert pinned.sums() is None
            assert pinned.verify() is False
            sums = pinned.store_sums()
            assert len(sums.values) == 4
            assert pinned.verify() is True
            geometry = segment.geometry
            dice = random.Random(1)
            places = [dice.randrange(pinned.record.data_length) for _ in range(20)]
            for place in (*places, 0, pinned.record.data_length - 1):
                flip(name.path, geometry.data_at(name.slot) + place)
                with pytest.raises(Corrupt, match=f"the first is chunk {place // (16 * 1024 * 1024)}"):
                    pinned.verify()
                flip(name.path, geometry.data_at(name.slot) + place)
            assert pinned.verify() is True
            for place in range(pinned.record.meta_length):
                flip(name.path, geometry.meta_at(name.slot) + place)
                with pytest.raises(Corrupt, match="metadata"):
                    pinned.verify()
                flip(name.path, geometry.meta_at(name.slot) + place)


def test_a_damaged_record_hides_its_slot_and_only_that(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner)
    save(writer, 1)
    name = save(writer, 2)
    assert name is not None
    with Segment(name.path) as segment:
        geometry = segment.geometry
        for place in range(72):
            flip(name.path, geometry.record_at(name.slot) + 8 + place)
            assert [each.step for each in segment.complete_slots()] == [1]
            flip(name.path, geometry.record_at(name.slot) + 8 + place)
        assert [each.step for each in segment.complete_slots()] == [1, 2]


def test_sums_of_a_former_generation_do_not_count(home: Path, owner: Owner) -> None:
    writer = SegmentWriter(home, owner, num_slots=1)
    for step in (1, 2):
        name = save(writer, step)
        assert name is not None
        with Segment(name.path) as segment:
            pinned = segment.pin(name.slot)
            assert pinned is not None
            with pinned:
                assert pinned.sums() is None
                assert pinned.store_sums() == pinned.sums()


def test_a_private_view_never_changes_the_segment(home: Path, owner: Owner) -> None:
    name = save(SegmentWriter(home, owner), 1)
    assert name is not None
    with Segment(name.path, private=True) as segment:
        pinned = segment.pin(name.slot)
        assert pinned is not None
        with pinned:
            pinned.data[:10] = bytes(10)
    assert newest_step(home) == 1
    assert content_of(1)[:10] != bytes(10)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"PK" + content[2:], "does not begin like a segment"),
        (lambda content: content[:8] + b"\x63" + content[9:], "format version 99"),
        (lambda content: content[:60] + b"?" + content[61:], "first page is damaged"),
        (lambda content: content[:-4096], "should have"),
        (lambda content: b"", "does not begin like a segment"),
    ],
)
def test_a_file_that_is_no_segment_is_named_with_the_reason(
    home: Path, owner: Owner, damage: object, reason: str
) -> None:
    save(SegmentWriter(home, owner), 1)
    (path,) = segment_paths(home)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(SegmentInvalid, match=reason) as caught:
        Segment(path)
    assert str(path) in str(caught.value)


def test_a_segment_of_a_former_boot_is_not_used(home: Path, owner: Owner) -> None:
    save(SegmentWriter(home, owner), 1)
    (path,) = segment_paths(home)
    with Segment(path) as segment:
        prelude = segment.prelude
    content = path.read_bytes()
    old = type(prelude)(geometry=prelude.geometry, sequence=1, boot_id=bytes(16), owner=owner)
    path.write_bytes(encode_prelude(old) + content[4096:])
    with pytest.raises(SegmentInvalid, match="older than the machine's last start"):
        Segment(path)
    with Segment(path, any_boot=True) as segment:
        assert segment.owner == owner
    writer = SegmentWriter(home, owner)
    assert writer.complete_slots() == []


def test_words_that_nobody_wrote_are_not_complete() -> None:
    geometry = geometry_for(2, 1, 1)
    for word in (0, 255, 1 << 60, make_word(SlotState.WRITING, 3), make_word(SlotState.COMPLETE, 3)):
        assert decode_record(word, bytes(248), geometry) is None


def flip(path: str, place: int) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))
