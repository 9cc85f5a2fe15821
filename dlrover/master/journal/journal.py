"""
The journal: accepted commands in order, in one SQLite file. Only what is in here has happened.

Everything in this file blocks and belongs to one thread. What is decided, in which order it becomes visible and how
it is replayed is `dlrover.core`'s; here are only the rows, the fence and the disk's ways to fail:

* each transaction first looks whether the stored master epoch is still ours, and ends us if not (`Fenced`);
* a disk that is full, or a lock that another process holds, passes: `Unavailable`, nothing was written;
* a file that cannot be understood does not: `JournalError`. Nothing is ever started afresh in its place.

Records older than the newest snapshot stay as the archive for `dlrover replay`, whole segments from snapshot to
snapshot, until they exceed their bound.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import sqlite3
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrover.host.ownership import NotOurs, open_checked
from dlrover.master.journal.filesystem import network_filesystem
from dlrover.protocol.errors import DLRoverError, Unavailable

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
SNAPSHOT_RECORDS = 10_000
SNAPSHOT_BYTES = 64 * 1024 * 1024
ARCHIVE_BYTES = 256 * 1024 * 1024
"""Of records and their snapshots that recovery no longer needs: some days of a large job."""
MAX_QUARANTINED = 100
BUSY_TIMEOUT = 2.0
RETRY_AFTER = 1.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (number INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (number INTEGER PRIMARY KEY, data BLOB NOT NULL, checksum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS quarantine (id INTEGER PRIMARY KEY, command BLOB NOT NULL, error TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS probe (data BLOB NOT NULL);
"""


class JournalError(DLRoverError):
    """The file cannot be used as a journal; a person must decide what to do with it."""


class Fenced(DLRoverError):
    """Another master took over this journal. We must not act any more."""


@dataclass(frozen=True)
class Stored:
    """What recovery starts from."""

    snapshot: bytes | None
    """State before record `first_number`; None: the empty state."""
    first_number: int
    records: tuple[bytes, ...]


class Journal:
    """The writing end. One per master life; opening it ends the right to write of every earlier one."""

    def __init__(
        self,
        path: Path,
        *,
        job_name: str,
        decision_version: int,
        archive_bytes: int = ARCHIVE_BYTES,
        max_pages: int = 0,
        busy_timeout: float = BUSY_TIMEOUT,
    ) -> None:
        """`max_pages` bounds the file, as a small disk would; 0: no bound."""
        self._busy_timeout = busy_timeout
        self.path = path
        self._job_name = job_name
        self._decision_version = decision_version
        self._archive_bytes = archive_bytes
        self._max_pages = max_pages
        self._records_since_snapshot = 0
        self._bytes_since_snapshot = 0
        with self._errors():
            self._connection = self._connect()
            try:
                self._create()
                self.master_epoch = self._take_over()
            except BaseException:
                self._connection.close()
                raise

    def load(self) -> Stored:
        """The newest snapshot and what was recorded after it."""
        with self._errors():
            stored = read_stored(self._connection, self.path)
        self._records_since_snapshot = len(stored.records)
        self._bytes_since_snapshot = sum(map(len, stored.records))
        return stored

    def append(self, first_number: int, records: Sequence[bytes], *, master_epoch: int = 0) -> None:
        """All of them or none; durable when it returns.

        A `master_epoch` beyond ours becomes ours with them: agents have seen it under a journal that was lost, and the
        next life must begin above it.
        """
        rows = list(enumerate(records, start=first_number))
        with self._transaction() as connection:
            connection.executemany("INSERT INTO records (number, data) VALUES (?, ?)", rows)
            if master_epoch > self.master_epoch:
                connection.execute("UPDATE meta SET value = ? WHERE key = 'master_epoch'", (master_epoch,))
        if master_epoch > self.master_epoch:
            log.warning("master epoch raised from=%d to=%d: nodes know a later master", self.master_epoch, master_epoch)
            self.master_epoch = master_epoch
        self._records_since_snapshot += len(records)
        self._bytes_since_snapshot += sum(map(len, records))

    def check_fence(self) -> None:
        """Raises Fenced if another master took over. For answers that write nothing."""
        with self._errors():
            self._check_epoch()

    @property
    def wants_snapshot(self) -> bool:
        return self._records_since_snapshot >= SNAPSHOT_RECORDS or self._bytes_since_snapshot >= SNAPSHOT_BYTES

    def save_snapshot(self, number: int, data: bytes) -> None:
        """State before record `number`. What is older becomes archive."""
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO snapshots (number, data, checksum) VALUES (?, ?, ?)",
                (number, data, checksum(data)),
            )
            connection.execute("UPDATE meta SET value = ? WHERE key = 'decision_version'", (self._decision_version,))
            _trim_archive(connection, newest=number, bound_bytes=self._archive_bytes)
        self._records_since_snapshot = 0
        self._bytes_since_snapshot = 0

    def quarantine(self, command: bytes, error: str) -> None:
        """Keep a command that broke the core, for people and so that no later life tries it again."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO quarantine (command, error) VALUES (?, ?)", (command, error))
            connection.execute(
                "DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?", (MAX_QUARANTINED,)
            )

    def quarantined(self) -> list[bytes]:
        with self._errors():
            return [row[0] for row in self._connection.execute("SELECT command FROM quarantine ORDER BY id")]

    def probe(self, size_bytes: int) -> None:
        """Whether so much could be written now. Two commits: rows deleted in the same one never reach the disk."""
        with self._transaction() as connection:
            connection.execute("INSERT INTO probe (data) VALUES (zeroblob(?))", (size_bytes,))
        with self._transaction() as connection:
            connection.execute("DELETE FROM probe")

    def reopen(self) -> None:
        """After a failed write: what the file says now is what counts."""
        with self._errors():
            self._connection.close()
            self._connection = self._connect()
            self._check_epoch()

    def close(self) -> None:
        """Fold the write-ahead log into the file, so that it can be copied as one."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            log.warning("the write-ahead log was not merged into the journal path=%s reason=%s", self.path, error)
        self._connection.close()

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # It contains what users' programs logged: for its owner only. SQLite gives its side files the same mode.
        os.close(open_checked(str(self.path), os.O_RDWR | os.O_CREAT))
        connection = sqlite3.connect(
            self.path, timeout=self._busy_timeout, isolation_level=None, check_same_thread=False, cached_statements=32
        )
        network = network_filesystem(self.path)
        if network is not None:
            log.warning(
                "journal on a network file system path=%s type=%s: slower, and safe only with working locks; "
                "prefer a local directory",
                self.path,
                network,
            )
        connection.execute(f"PRAGMA journal_mode={'WAL' if network is None else 'DELETE'}")
        connection.execute("PRAGMA synchronous=FULL")
        if self._max_pages:
            connection.execute(f"PRAGMA max_page_count={self._max_pages}")
        return connection

    def _create(self) -> None:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _SCHEMA.strip().split(";\n"):
                connection.execute(statement)
            connection.executemany(
                "INSERT OR IGNORE INTO meta (key, value) VALUES (?, ?)",
                [
                    ("format_version", FORMAT_VERSION),
                    ("decision_version", self._decision_version),
                    ("job_name", self._job_name),
                    ("master_epoch", 0),
                    ("uid", uuid.uuid4().hex),
                ],
            )
            connection.execute("COMMIT")
        except BaseException:
            _roll_back(connection)
            raise

    def _take_over(self) -> int:
        """Count the master epoch up: from here on no earlier master can write."""
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            meta = read_meta(connection)
            check_meta(meta, self.path)
            if meta["job_name"] != self._job_name:
                raise JournalError(
                    f"The journal {self.path} belongs to the job {meta['job_name']!r}, not to "
                    f"{self._job_name!r}. Give this job another journal, or start the master with the name "
                    f"{meta['job_name']!r}."
                )
            if meta["decision_version"] != self._decision_version:
                self._forget_undecidable(int(str(meta["decision_version"])))
            self.uid = str(meta["uid"])
            """Of this journal alone: numbers in it mean nothing in another one."""
            epoch = int(str(meta["master_epoch"])) + 1
            connection.execute("UPDATE meta SET value = ? WHERE key = 'master_epoch'", (epoch,))
            connection.execute("COMMIT")
            return epoch
        except BaseException:
            _roll_back(connection)
            raise

    def _forget_undecidable(self, written_by: int) -> None:
        """Records of another decision version would replay to another state: begin at the newest snapshot instead."""
        newest = self._connection.execute("SELECT max(number) FROM snapshots").fetchone()[0]
        dropped = self._connection.execute(
            "DELETE FROM records WHERE number >= ?", (1 if newest is None else newest,)
        ).rowcount
        self._connection.execute("UPDATE meta SET value = ? WHERE key = 'decision_version'", (self._decision_version,))
        log.warning(
            "journal written by another version theirs=%d ours=%d: %d records after the newest snapshot are "
            "not used; the nodes report what runs",
            written_by,
            self._decision_version,
            dropped,
        )

    def _check_epoch(self) -> None:
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'master_epoch'").fetchone()
        if row is None or row[0] != self.master_epoch:
            raise Fenced(
                f"Another master (epoch {row and row[0]}) took over the journal {self.path}. This master (epoch "
                f"{self.master_epoch}) stops and does nothing more."
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._check_epoch()
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                _roll_back(self._connection)
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise explain(error, self.path) from error
        except NotOurs as error:
            raise JournalError(f"The journal cannot be used: {error.strerror}. Choose another directory.") from error
        except OSError as error:
            raise Unavailable(
                f"The master cannot write its journal {self.path}: {error.strerror}. Check that disk.", RETRY_AFTER
            ) from error


def checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def read_meta(connection: sqlite3.Connection) -> dict[str, object]:
    return dict(connection.execute("SELECT key, value FROM meta"))


def check_meta(meta: dict[str, object], path: Path) -> None:
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise JournalError(
            f"The journal {path} has format {version}; this dlrover reads format {FORMAT_VERSION}. "
            "Use the dlrover version that wrote it, or give the job a new journal."
        )


def read_stored(connection: sqlite3.Connection, path: Path, *, oldest: bool = False) -> Stored:
    """From the newest snapshot, or from the oldest that the archive still has."""
    order = "ASC" if oldest else "DESC"
    has_genesis = connection.execute("SELECT 1 FROM records WHERE number = 1").fetchone() is not None
    row = connection.execute(f"SELECT number, data, checksum FROM snapshots ORDER BY number {order} LIMIT 1").fetchone()
    if row is None or (oldest and has_genesis):
        snapshot, first_number = None, 1
    else:
        first_number, snapshot = row[0], row[1]
        if not isinstance(snapshot, bytes) or checksum(snapshot) != row[2]:
            raise JournalError(f"The journal {path} is damaged: snapshot {first_number} fails its checksum. {ADVICE}")
    rows = connection.execute(
        "SELECT number, data FROM records WHERE number >= ? ORDER BY number", (first_number,)
    ).fetchall()
    for expected, (number, data) in enumerate(rows, start=first_number):
        if number != expected or not isinstance(data, bytes):
            raise JournalError(f"The journal {path} is damaged: record {expected} is missing or unreadable. {ADVICE}")
    return Stored(snapshot, first_number, tuple(data for _, data in rows))


ADVICE = (
    "Restore it from a copy. Or move it away to start the job anew: the nodes then register again, and "
    "training resumes from the newest checkpoint."
)


def explain(error: sqlite3.Error, path: Path) -> DLRoverError:
    """Passing trouble apart from a file that is lost."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return Unavailable(
            f"The master cannot write its journal {path}: its disk is full ({error}). Free some space there.",
            RETRY_AFTER,
        )
    passing = (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
    )
    if code in passing:
        return Unavailable(f"The master cannot write its journal {path}: {error}. Check that disk.", RETRY_AFTER)
    return JournalError(f"The journal {path} is damaged, or it is not a journal: {error}. {ADVICE}")


def _trim_archive(connection: sqlite3.Connection, *, newest: int, bound_bytes: int) -> None:
    """Drop the oldest segments beyond the bound. The newest snapshot and what follows it are no archive."""
    numbers = [row[0] for row in connection.execute("SELECT number FROM snapshots ORDER BY number")]
    starts = sorted({1, *numbers})
    sizes = []
    for start, end in itertools.pairwise(starts):
        if end > newest:
            break
        size = connection.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM records WHERE number >= ? AND number < ?", (start, end)
        ).fetchone()[0]
        snapshot = connection.execute(
            "SELECT coalesce(sum(length(data)), 0) FROM snapshots WHERE number = ?", (start,)
        ).fetchone()[0]
        sizes.append((end, size + snapshot))
    excess = sum(size for _, size in sizes) - bound_bytes
    for end, size in sizes:
        if excess <= 0:
            return
        connection.execute("DELETE FROM records WHERE number < ?", (end,))
        connection.execute("DELETE FROM snapshots WHERE number < ?", (end,))
        excess -= size


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # SQLite has rolled back by itself after some errors
        if connection.in_transaction:
            connection.execute("ROLLBACK")
