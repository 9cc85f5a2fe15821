"""
One command that was applied, with what was true just before: what the invariants compare.
"""

from __future__ import annotations

from typing import NamedTuple

from dlrover.core.checkpoints.state import NewestCommit
from dlrover.core.membership.nodes import Opening
from dlrover.core.outcome import Origin
from dlrover.protocol.messages.job import Command, Micros

Committed = dict[str, NewestCommit]
"""The newest checkpoint of each directory."""


class Touched(NamedTuple):
    """One command that was applied, and what was true just before."""

    command: Command
    origin: Origin | None
    round: int
    num_restarts: int
    num_spent: int
    """Of these, the ones that were charged to a node rank."""
    num_without_progress: int
    is_stale: bool
    """It named a node in a life that was not the current one."""
    is_repeated: bool
    """Its number had been applied before."""
    had_end: bool
    num_checks: int
    """Checks that had a verdict."""
    committed: Committed
    call: tuple[Micros, Opening | None]
    """When the call of the open round began, and what opened it."""
    has_joined: bool
    """It is a join of a node that waits already, or is absent."""
