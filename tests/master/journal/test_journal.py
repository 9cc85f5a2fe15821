"""The journal alone: a real SQLite file, and what can happen to it."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from dlrover.master.journal import journal as module
from dlrover.master.journal.filesystem import network_filesystem
from dlrover.master.journal.journal import Fenced, Journal, JournalError, Stored
from dlrover.protocol.errors import Unavailable


def open_journal(path: Path, *, job_name: str = "job", decision_version: int = 1, max_pages: int = 0) -> Journal:
    return Journal(path, job_name=job_name, decision_version=decision_version, max_pages=max_pages)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_what_was_appended_is_there_in_the_next_life(path: Path) -> None:
    journal = open_journal(path)
    assert journal.load() == Stored(None, 1, ())
    journal.append(1, [b"one", b"two"])
    journal.append(3, [b"three"])
    # No close: a killed process does not either.
    again = open_journal(path)
    assert again.load() == Stored(None, 1, (b"one", b"two", b"three"))
    assert (journal.master_epoch, again.master_epoch) == (1, 2)
    again.close()


def test_an_epoch_that_nodes_know_from_a_lost_journal_is_raised_with_the_record_that_says_so(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one"], master_epoch=1)
    assert journal.master_epoch == 1
    journal.append(2, [b"two"], master_epoch=8)
    assert journal.master_epoch == 8
    journal.append(3, [b"three"], master_epoch=8)
    again = open_journal(path)
    assert again.master_epoch == 9
    with pytest.raises(Fenced):
        journal.append(4, [b"four"], master_epoch=20)
    assert again.load().records == (b"one", b"two", b"three")
    again.close()


def test_an_epoch_is_not_raised_by_records_that_were_not_written(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one"])
    with pytest.raises(JournalError):
        journal.append(1, [b"another"], master_epoch=8)
    assert journal.master_epoch == 1
    journal.append(2, [b"two"])
    journal.close()


def test_only_its_owner_may_read_it(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"x"])
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    journal.close()
    assert [file.name for file in path.parent.iterdir()] == ["journal.sqlite"]


def test_the_older_of_two_masters_can_neither_write_nor_answer(path: Path) -> None:
    older, newer = open_journal(path), open_journal(path)
    newer.append(1, [b"newer"])
    with pytest.raises(Fenced, match=r"Another master \(epoch 2\) took over"):
        older.append(2, [b"older"])
    with pytest.raises(Fenced):
        older.check_fence()
    with pytest.raises(Fenced):
        older.save_snapshot(1, b"state")
    newer.check_fence()
    assert newer.load().records == (b"newer",)
    newer.close()


def test_a_batch_is_written_whole_or_not_at_all(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one"])
    with pytest.raises(JournalError):
        journal.append(1, [b"again"])
    with pytest.raises(JournalError):
        open_journal(path).append(0, [b"zero", b"one again"])
    assert open_journal(path).load().records == (b"one",)


def test_recovery_starts_at_the_newest_snapshot_and_the_archive_at_the_oldest(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one", b"two"])
    journal.save_snapshot(3, b"state after two")
    journal.append(3, [b"three"])
    journal.save_snapshot(4, b"state after three")
    journal.append(4, [b"four"])
    assert journal.load() == Stored(b"state after three", 4, (b"four",))
    with sqlite3.connect(path) as connection:
        everything = module.read_stored(connection, path, oldest=True)
    connection.close()
    assert everything == Stored(None, 1, (b"one", b"two", b"three", b"four"))
    journal.close()


def test_a_snapshot_is_wanted_after_many_records_or_bytes(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b""] * (module.SNAPSHOT_RECORDS - 1))
    assert not journal.wants_snapshot
    journal.append(module.SNAPSHOT_RECORDS, [b""])
    assert journal.wants_snapshot
    journal.save_snapshot(module.SNAPSHOT_RECORDS + 1, b"state")
    assert not journal.wants_snapshot
    journal.append(module.SNAPSHOT_RECORDS + 1, [bytes(module.SNAPSHOT_BYTES)])
    assert journal.wants_snapshot
    again = open_journal(path)
    again.load()
    assert again.wants_snapshot
    again.close()


def test_the_archive_is_bounded_by_whole_segments(path: Path) -> None:
    journal = Journal(path, job_name="job", decision_version=1, archive_bytes=100)
    for number in range(1, 11):
        journal.append(number, [bytes(30)])
        journal.save_snapshot(number + 1, b"state %d" % (number + 1))
    with sqlite3.connect(path) as connection:
        oldest = module.read_stored(connection, path, oldest=True)
    connection.close()
    assert oldest.first_number == 9
    assert oldest.snapshot == b"state 9"
    assert len(oldest.records) == 2
    assert journal.load() == Stored(b"state 11", 11, ())
    journal.close()


def test_a_full_disk_passes(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one"])
    journal.close()
    small = open_journal(path, max_pages=12)
    with pytest.raises(Unavailable, match=r"is full .*Free some space"):
        small.append(2, [bytes(1 << 20)])
    with pytest.raises(Unavailable):
        small.probe(1 << 20)
    small.reopen()
    assert small.load().records == (b"one",)
    small.append(2, [b"two"])
    assert small.load().records == (b"one", b"two")
    small.probe(100)
    small.close()


def test_somebody_elses_lock_passes(path: Path) -> None:
    journal = open_journal(path)
    lock = sqlite3.connect(path, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    with pytest.raises(Unavailable, match="locked"):
        journal.append(1, [b"one"])
    lock.execute("ROLLBACK")
    lock.close()
    journal.append(1, [b"one"])
    journal.close()


def test_a_file_that_is_no_journal_is_left_alone(path: Path) -> None:
    path.write_bytes(b"my diary " * 1000)
    with pytest.raises(JournalError, match=r"damaged, or it is not a journal.*Restore it from a copy"):
        open_journal(path)
    assert path.read_bytes() == b"my diary " * 1000


def test_damaged_pages_are_found(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [bytes([number % 256]) * 500 for number in range(200)])
    journal.close()
    data = bytearray(path.read_bytes())
    for page in range(6, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)
    with pytest.raises(JournalError, match="damaged"):
        open_journal(path).load()


def test_a_missing_record_and_a_changed_snapshot_are_found(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one", b"two", b"three"])
    journal.close()
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM records WHERE number = 2")
    connection.close()
    with pytest.raises(JournalError, match="record 2 is missing"):
        open_journal(path).load()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO snapshots VALUES (4, x'00', x'00')")
    connection.close()
    with pytest.raises(JournalError, match="snapshot 4 fails its checksum"):
        open_journal(path).load()


def test_the_journal_of_another_job_is_refused(path: Path) -> None:
    open_journal(path).close()
    with pytest.raises(JournalError, match="belongs to the job 'job', not to 'other'"):
        open_journal(path, job_name="other")
    assert open_journal(path).master_epoch == 2, "a refused master fences nobody"


def test_another_format_is_refused(path: Path) -> None:
    open_journal(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE meta SET value = 9 WHERE key = 'format_version'")
    connection.close()
    with pytest.raises(JournalError, match="has format 9; this dlrover reads format 1"):
        open_journal(path)


def test_another_decision_version_starts_from_the_newest_snapshot(path: Path) -> None:
    journal = open_journal(path)
    journal.append(1, [b"one"])
    journal.save_snapshot(2, b"state")
    journal.append(2, [b"two"])
    journal.close()
    newer = open_journal(path, decision_version=2)
    assert newer.load() == Stored(b"state", 2, ())
    newer.append(2, [b"two, decided otherwise"])
    newer.close()
    assert open_journal(path, decision_version=2).load().records == (b"two, decided otherwise",)


def test_quarantined_commands_are_kept_within_a_bound(path: Path) -> None:
    journal = open_journal(path)
    for number in range(module.MAX_QUARANTINED + 5):
        journal.quarantine(b"command %d" % number, "error")
    commands = open_journal(path).quarantined()
    assert len(commands) == module.MAX_QUARANTINED
    assert commands[-1] == b"command %d" % (module.MAX_QUARANTINED + 4)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/home/me/journal", "nfs4"),
        ("/home2/journal", None),
        ("/mnt/with space/journal", "cifs"),
        ("/mnt/s3/a/b", "fuse.s3fs"),
        ("/var/lib/containers/x", None),
        ("/covered/x", None),
    ],
)
def test_network_file_systems_are_recognised(place: str, expected: str | None) -> None:
    mounts = "\n".join(  # noqa: FLY002 - one mount a line reads best
        [
            "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw",
            "30 22 0:40 / /home rw shared:2 - nfs4 server:/home rw",
            "31 22 0:41 / /mnt/with\\040space rw - cifs //server/share rw",
            "32 22 0:42 / /mnt/s3 rw - fuse.s3fs s3fs rw",
            "33 22 0:43 / /var/lib/containers rw - fuse.fuse-overlayfs overlay rw",
            "34 22 0:44 / /covered rw - nfs server:/old rw",
            "35 34 0:45 / /covered rw - tmpfs none rw",
            "garbage",
        ]
    )
    assert network_filesystem(Path(place), mounts) == expected


def test_the_test_machine_itself_can_be_asked(tmp_path: Path) -> None:
    kind = network_filesystem(tmp_path)
    assert kind is None or kind
