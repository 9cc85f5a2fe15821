"""
The checks before training: the first round is held until the operators of the shell have passed, failed for good, or had their time.

They are about beginning. Once a world has run, the job knows better than any of them, and what comes late changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from dlrover.core.outcome import micros
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import Command, Done, ExitReason, Micros, Reply
from dlrover.protocol.messages.precheck import (
    OperatorResult,
    PreCheckBegan,
    PreCheckNoted,
    PreCheckStage,
    PreCheckStatus,
)

if TYPE_CHECKING:
    from dlrover.core.decision import Course

MAX_OPERATORS = 32
LONGEST = 7 * 24 * 3600.0
_MAX_TEXT = 2048


class PreCheck(Struct):
    stage: PreCheckStage = PreCheckStage.DISABLED
    results: tuple[OperatorResult, ...] = ()
    message: str = ""

    def status(self) -> PreCheckStatus:
        return PreCheckStatus(stage=self.stage, results=self.results, message=self.message)


def expire(course: Course) -> None:
    """Called when the holds of the rendezvous whose time is over are lifted."""
    check, rdzv = course.state.pre_check, course.state.rendezvous
    if check.stage is PreCheckStage.CHECKING and rdzv.pre_check_until is None:
        open_ = next((each for each in check.results if each.state not in ("passed", "bypassed")), None)
        what = "" if open_ is None else f" {open_.name} is still open{f': {open_.message}' if open_.message else '.'}"
        check.stage = PreCheckStage.PASS
        check.message = f"The pre-check took too long: training begins without its word.{what}"
        if rdzv.round:
            check.message = "The workers run already: the pre-check is over."
        course.say(check.message)


def _began(command: PreCheckBegan, course: Course) -> Reply:
    state = course.state
    _check_open(course)
    if not 0 < command.limit <= LONGEST or not 0 < len(command.operators) <= MAX_OPERATORS:
        raise Rejected(
            f"A pre-check has from 1 to {MAX_OPERATORS} operators and at most {LONGEST:g} s.", code="malformed"
        )

    state.pre_check = PreCheck(
        PreCheckStage.CHECKING, tuple(OperatorResult(name=name[:_MAX_TEXT]) for name in command.operators)
    )
    state.rendezvous.pre_check_until = Micros(course.now + micros(command.limit))
    course.say(f"The pre-check begins: {', '.join(command.operators)}.")
    course.advance()
    return Done()


def _noted(command: PreCheckNoted, course: Course) -> Reply:
    state = course.state
    _check_open(course)
    if state.pre_check.stage is not PreCheckStage.CHECKING:
        raise Rejected(f"No pre-check is under way: it is {state.pre_check.stage.value}.", code="bad-stage")
    texts = (command.message, *(text for each in command.results for text in (each.name, each.message)))
    if len(command.results) > MAX_OPERATORS or any(len(text) > _MAX_TEXT for text in texts):
        raise Rejected("A result that nobody could read.", code="too-large")

    check = state.pre_check
    check.stage, check.results, check.message = command.stage, command.results, command.message
    if command.message:
        course.say(command.message)
    if command.stage is not PreCheckStage.CHECKING:
        state.rendezvous.pre_check_until = None
    if command.stage is PreCheckStage.FAIL:
        course.end_job(ExitReason.PRE_CHECK_FAILED, command.message or "The pre-check failed.")
    course.advance()
    return Done()


def _check_open(course: Course) -> None:
    state = course.state
    if state.end is not None:
        raise Rejected(f"The job has ended: {state.end.message}", code="job-ended")
    if state.rendezvous.round:
        raise Rejected(
            f"Training has begun: round {state.rendezvous.round} ran, and a pre-check is about what was before.",
            code="too-late",
        )


def is_wanted(stage: PreCheckStage, round_: int) -> bool:
    """Whether a master that begins has to run it. One that died in the middle of it has left no answer."""
    return not round_ and stage in (PreCheckStage.DISABLED, PreCheckStage.CHECKING)


HANDLERS: dict[type[Command], Callable[[Any, Course], Reply]] = {PreCheckBegan: _began, PreCheckNoted: _noted}
