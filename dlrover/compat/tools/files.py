"""The original's `file_util`: the same file, the end of a file, a file further up."""

from __future__ import annotations

import logging
import os
from collections import deque
from pathlib import Path

log = logging.getLogger(__name__)


def is_same_path(path1: str, path2: str) -> bool:
    return Path(path1).resolve() == Path(path2).resolve()


def read_last_n_lines(filepath: str, n_lines: int) -> list[bytes]:
    """Without their ends. Nothing, with an error in the log, if the file cannot be read."""
    try:
        with open(filepath, "rb") as file:
            return [line.rstrip(b"\r\n") for line in deque(file, maxlen=n_lines)]
    except OSError as error:
        log.error("%s cannot be read: %s", filepath, error)
        return []


def find_file_in_parents(filename: str, start_dir: str | None = None) -> str | None:
    """The path of the file in this directory or the nearest one above that has it."""
    first = Path(start_dir or os.curdir).absolute()
    found = (directory / filename for directory in (first, *first.parents))
    return next((str(path) for path in found if path.is_file()), None)
