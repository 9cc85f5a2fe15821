"""
What a job is called where several jobs of a user may run on one host: short, because people type it, and unique among those that run.

A name that the user gives is kept (`run7`); while a job of that name runs here, the next one is `run7-2`. A job without one is called
after its script, with a number: `train-1`. Nodes of one job have to agree on its name, so where other launchers may come to the same
master nothing is ever added to it.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from dlrover.agent.config import Entry, EntryKind

MAX_SCRIPT = 20
"""Characters of a script's name that are kept."""


class JobName(NamedTuple):
    name: str
    others: Iterator[str]
    """To be tried in this order while a job of this user on this host has the name; empty: the name is what it is."""
    is_chosen: bool = False
    """By us: it says nothing to other processes, and another job may have it tomorrow."""


def given(name: str) -> JobName:
    return JobName(name, (f"{name}-{number}" for number in itertools.count(2)))


def after_script(entry: Entry) -> JobName:
    base = _base(entry)
    return JobName(f"{base}-1", (f"{base}-{number}" for number in itertools.count(2)), is_chosen=True)


def _base(entry: Entry) -> str:
    match entry.kind:
        case EntryKind.FUNCTION:
            name = "function"
        case EntryKind.MODULE:
            name = entry.name.rpartition(".")[2]
        case _:
            name = os.path.splitext(os.path.basename(entry.name.rstrip("/")))[0]
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name)[:MAX_SCRIPT].strip("-").lower()
    return plain or "job"
