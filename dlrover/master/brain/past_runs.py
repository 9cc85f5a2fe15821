"""
What a journal says of a job's runs: the newest word about each of them.

The journal is the place where runs wait for Brain, so a master that was killed, or one whose Brain was away, loses none. It is read by a connection of its
own, in a thread, while the master writes.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from dlrover.core.commit_order import decode_record
from dlrover.protocol.messages.scaling import RunMeasured

_TAG = RunMeasured.__struct_config__.tag


def past_runs(journal: Path, *, since: int = 0) -> dict[int, RunMeasured]:
    """
    By number, those from `since` on. Blocks.

    Raises `sqlite3.Error` for a file that cannot be read now. Records that the archive has dropped are not there any more.
    """
    uri = f"file:{quote(str(journal))}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=5.0)) as connection:
        return {run.number: run for run in _runs(connection) if run.number >= since}


def _runs(connection: sqlite3.Connection) -> Iterator[RunMeasured]:
    tag = str(_TAG).encode()
    for (data,) in connection.execute("SELECT data FROM records ORDER BY number"):
        if tag in data:  # to decode all of them would take ten times as long
            command = decode_record(data).command
            if isinstance(command, RunMeasured):
                yield command
