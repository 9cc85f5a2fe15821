"""The log file that several processes of one machine share."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from dlrover.host.log_file import RotatingLog
from dlrover.host.log_root import LogRoot
from dlrover.host.ownership import NotOurs

WRITER = """
import logging, sys
from dlrover.host.log_file import RotatingLog
from dlrover.host.log_root import LogRoot
logger = logging.getLogger("writer")
logger.setLevel("INFO")
logger.addHandler(RotatingLog(LogRoot(directory=sys.argv[1], max_bytes=2000, num_backups=1000)))
for number in range(300):
    logger.info("line %s-%d", sys.argv[2], number)
"""


def lines(directory: Path) -> list[str]:
    return [line for path in directory.iterdir() for line in path.read_text().splitlines()]


def test_processes_that_rotate_one_file_lose_no_line(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    told = [line.rsplit(" ", 1)[1] for line in lines(tmp_path)]
    assert sorted(told) == sorted(f"{name}-{number}" for name in "abc" for number in range(300))
    assert all(path.stat().st_size < 2500 for path in tmp_path.iterdir()), "each process may be late by one line"


def test_a_link_that_somebody_put_into_a_shared_directory_is_not_followed(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "dlrover.log").symlink_to(tmp_path / "victim")
    with pytest.raises(NotOurs):
        RotatingLog(LogRoot(directory=str(shared)))
    assert not (tmp_path / "victim").exists()


def test_so_many_backups_are_kept(tmp_path: Path) -> None:
    log = RotatingLog(LogRoot(directory=str(tmp_path / "new"), max_bytes=100, num_backups=2))
    for number in range(9):
        log.handle(logging.LogRecord("x", logging.INFO, "train.py", 7, "line %d", (number,), None, "step"))
    log.close()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "dlrover.log",
        "dlrover.log.1",
        "dlrover.log.2",
    ]
    newest = (tmp_path / "new" / "dlrover.log").read_text()
    assert newest.endswith("[INFO] [train.py:7:step] line 8\n")


def test_a_file_that_somebody_removed_is_made_anew(tmp_path: Path) -> None:
    log = RotatingLog(LogRoot(directory=str(tmp_path)))
    record = logging.LogRecord("x", logging.WARNING, "a.py", 1, "hello", (), None)
    log.handle(record)
    (tmp_path / "dlrover.log").unlink()
    log.handle(record)
    log.close()
    assert "hello" in (tmp_path / "dlrover.log").read_text()
