"""
What the checks before training are told in.

Operators run in the master's shell, because any user may write one. That they began, how far they are and how they ended are commands: the
job holds its first round meanwhile, shows the state of it, and a master that takes over knows whether it has to begin again.
"""

from __future__ import annotations

import enum

from msgspec import Struct


class PreCheckStage(enum.StrEnum):
    """By the historical names."""

    DISABLED = "DISABLED"
    CHECKING = "CHECKING"
    PASS = "PASS"
    FAIL = "FAIL"


class OperatorState(enum.StrEnum):
    OPEN = "open"
    """Not asked yet, or asked and waiting."""
    PASSED = "passed"
    FAILED = "failed"
    """It is asked again, from the first operator on, when what it wants done is done."""
    BYPASSED = "bypassed"
    """It failed, and that is allowed."""
    BROKEN = "broken"
    """It raised, or took too long: no node waits for it."""


class OperatorResult(Struct, frozen=True, kw_only=True):
    name: str
    state: OperatorState = OperatorState.OPEN
    message: str = ""
    num_tries: int = 0


class PreCheckBegan(Struct, tag=True, frozen=True, kw_only=True):
    """Journalled: no round completes before the operators have had their say, or the time is over."""

    operators: tuple[str, ...]
    limit: float
    """Seconds, in all. Then training begins without their word."""


class PreCheckNoted(Struct, tag=True, frozen=True, kw_only=True):
    """Journalled: how far it is. PASS lets the job train, FAIL ends it."""

    stage: PreCheckStage
    results: tuple[OperatorResult, ...] = ()
    message: str = ""
    """What is to be said about it, in a sentence."""


PreCheckCommand = PreCheckBegan | PreCheckNoted
"""Of the master's own shell; no client may send them."""


class PreCheckStatus(Struct, frozen=True, kw_only=True):
    stage: PreCheckStage = PreCheckStage.DISABLED
    results: tuple[OperatorResult, ...] = ()
    message: str = ""
