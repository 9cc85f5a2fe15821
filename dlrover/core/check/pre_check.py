"""
The checks before training: the first round is held until the operators of the shell have passed, failed for good, or had their time.

They are about beginning. Once a world has run, the job knows better than any of them, and what comes late changes nothing.
"""

from __future__ import annotations

from dlrover.core.check.state import PreCheck
from dlrover.core.decision import Decision, Handlers
from dlrover.protocol.error_codes import ErrorCode
from dlrover.protocol.errors import Rejected, malformed
from dlrover.protocol.messages.identity import micros
from dlrover.protocol.messages.job import Done, ExitReason, Micros, Reply
from dlrover.protocol.messages.precheck import (
    OperatorResult,
    PreCheckBegan,
    PreCheckNoted,
    PreCheckStage,
)

MAX_OPERATORS = 32
LONGEST = 7 * 24 * 3600.0
_MAX_TEXT = 2048


def on_pre_check_over(decision: Decision) -> None:
    check = decision.state.pre_check
    open_ = next((each for each in check.results if each.state not in ("passed", "bypassed")), None)
    what = "" if open_ is None else f" {open_.name} is still open{f': {open_.message}' if open_.message else '.'}"
    check.stage = PreCheckStage.PASS
    check.message = f"The pre-check took too long: training begins without its result.{what}"
    if decision.state.rendezvous.round:
        check.message = "The workers run already: the pre-check is over."
    decision.say(check.message)


def _began(command: PreCheckBegan, decision: Decision) -> Reply:
    state = decision.state
    _check_open(decision)
    if not 0 < command.limit <= LONGEST or not 0 < len(command.operators) <= MAX_OPERATORS:
        raise malformed(f"A pre-check has from 1 to {MAX_OPERATORS} operators and at most {LONGEST:g} s.")

    state.pre_check = PreCheck(
        PreCheckStage.CHECKING, tuple(OperatorResult(name=name[:_MAX_TEXT]) for name in command.operators)
    )
    state.rendezvous.pre_check_until = Micros(decision.now + micros(command.limit))
    decision.say(f"The pre-check begins: {', '.join(command.operators)}.")
    decision.is_unsettled = True
    return Done()


def _noted(command: PreCheckNoted, decision: Decision) -> Reply:
    state = decision.state
    _check_open(decision)
    if state.pre_check.stage is not PreCheckStage.CHECKING:
        raise Rejected(f"No pre-check is under way: it is {state.pre_check.stage.value}.", code=ErrorCode.BAD_STAGE)
    texts = (command.message, *(text for each in command.results for text in (each.name, each.message)))
    if len(command.results) > MAX_OPERATORS or any(len(text) > _MAX_TEXT for text in texts):
        raise Rejected(
            f"The result is too long: it may have {MAX_OPERATORS} operators and texts of {_MAX_TEXT} characters.",
            code=ErrorCode.TOO_LARGE,
        )

    check = state.pre_check
    check.stage, check.results, check.message = command.stage, command.results, command.message
    if command.message:
        decision.say(command.message)
    if command.stage is not PreCheckStage.CHECKING:
        state.rendezvous.pre_check_until = None
    if command.stage is PreCheckStage.FAIL:
        decision.end_job(ExitReason.PRE_CHECK_FAILED, command.message or "The pre-check failed.")
    decision.is_unsettled = True
    return Done()


def _check_open(decision: Decision) -> None:
    state = decision.state
    state.check_running()
    if state.rendezvous.round:
        raise Rejected(
            f"Training has begun: round {state.rendezvous.round} ran, and a pre-check is about what was before.",
            code=ErrorCode.TOO_LATE,
        )


def is_wanted(stage: PreCheckStage, round_: int) -> bool:
    """Whether a master that begins has to run it. One that died in the middle of it has left no answer."""
    return not round_ and stage in (PreCheckStage.DISABLED, PreCheckStage.CHECKING)


HANDLERS: Handlers = {PreCheckBegan: _began, PreCheckNoted: _noted}
