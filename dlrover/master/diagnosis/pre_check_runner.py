"""
Runs the pre-check: one operator after the other, until all have passed, one has ended the job, or the time is over.

After a failure its actions are carried out and everything begins again with the first operator, because what passed before may not be so any more.
While an operator is not sure yet, it is asked again as soon as the job has decided anything, and at its interval. A plug-in that raises or takes
too long is left out: a broken check must not keep a healthy job from training.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from dlrover.core.check.pre_check import is_wanted
from dlrover.core.goodput.events import WARN, event
from dlrover.core.outcome import Outcome
from dlrover.host.edges import Edge, exit_contained
from dlrover.master.diagnosis.old_actions import (
    DiagnosisAction,
    DiagnosisActionQueue,
    DiagnosisActionType,
    DiagnosisConstant,
    EventAction,
    JobAbortionAction,
    JobRestartAction,
    NoAction,
    NodeAction,
)
from dlrover.master.diagnosis.pre_checks import Operator, PreCheckResult, view_of
from dlrover.master.loop.loop import MasterLoop
from dlrover.protocol.errors import DLRoverError
from dlrover.protocol.messages.fleet import RestartJob
from dlrover.protocol.messages.goodput import JobEvent
from dlrover.protocol.messages.job import AskStatus, Command, JobStatus, Micros, NodeId, PlatformId, Reply
from dlrover.protocol.messages.precheck import (
    OperatorResult,
    OperatorState,
    PreCheckBegan,
    PreCheckNoted,
    PreCheckStage,
)
from dlrover.protocol.messages.requests import RelaunchNode
from dlrover.protocol.text import encodable

log = logging.getLogger(__name__)

TIME_LIMIT = 60.0
"""Seconds for one call. Operators of the original may sleep in it; the loop does not wait for them any longer."""
MAX_MESSAGE = 1000
SLACK = 600.0
"""Seconds for the whole, beyond what nodes may wait for their resources."""


class PreCheckRunner:
    def __init__(
        self,
        master_loop: MasterLoop,
        operators: Sequence[Operator],
        *,
        limit: float,
        tell: Callable[[JobEvent], object],
        time_limit: float = TIME_LIMIT,
        has_platform: bool = False,
    ) -> None:
        """`tell`: takes events for people. `has_platform`: there is nothing to look at before it has shown its nodes."""
        self._has_platform = has_platform
        self._master_loop = master_loop
        self._operators = list(operators)
        self._limit = limit
        self._tell = tell
        self._time_limit = time_limit
        self._results = [OperatorResult(name=operator.name) for operator in operators]
        self._actions = DiagnosisActionQueue()
        self._failure = ""
        """Why the job shall end."""
        self._trouble = ""
        """Of the operator that broke last."""
        self._changed = asyncio.Event()
        self._began: asyncio.Future[Reply] | None = None

    def begin(self) -> None:
        """Before any node is served: a node that came first would have its world already."""
        state = self._master_loop.job.state
        if self._operators and state.end is None and is_wanted(state.pre_check.stage, state.rendezvous.round):
            names = tuple(result.name for result in self._results)
            self._began = self._master_loop.tell(PreCheckBegan(operators=names, limit=self._limit))

    async def run(self) -> None:
        """Until it is over."""
        if self._began is None:
            return
        self._master_loop.listeners.on_decided.append(self._heard)
        try:
            await self._began
            await self._until_platform_is_seen()
            await self._check_all()
        except DLRoverError as error:
            log.info("the pre-check stopped: %s", error)  # the job has ended, or begun without us
        finally:
            self._master_loop.listeners.on_decided.remove(self._heard)

    async def _until_platform_is_seen(self) -> None:
        while self._has_platform:
            self._changed.clear()
            fleet = self._master_loop.job.state.fleet
            if fleet is not None and fleet.is_listed:
                return
            await self._changed.wait()

    def _heard(self, command: Command, outcome: Outcome, now: Micros) -> None:
        if not isinstance(command, PreCheckNoted):
            self._changed.set()

    async def _check_all(self) -> None:
        number = 0
        while number < len(self._operators):
            operator, before = self._operators[number], self._results[number]
            result = await self._ask(operator)
            state, message = self._judge(operator, result)
            self._results[number] = OperatorResult(
                name=operator.name, state=state, message=message, num_tries=before.num_tries + 1
            )
            if state is OperatorState.OPEN:
                if message != before.message or before.num_tries == 0:
                    await self._note(PreCheckStage.CHECKING, f"The pre-check waits: {operator.name}: {message}.")
                await self._wait(operator)
            elif state is OperatorState.FAILED and result is not None:
                await self._note(PreCheckStage.CHECKING, f"The pre-check failed: {operator.name}: {message}")
                is_done = await self._act(operator, result)
                if self._failure:
                    await self._note(PreCheckStage.FAIL, self._failure)
                    return
                if is_done:
                    await self._wait(operator, is_retry=True)
                    number = 0
                else:
                    self._results[number] = replace(
                        self._results[number], state=OperatorState.BROKEN, message=self._trouble
                    )
                    number += 1
            else:
                if state is not OperatorState.PASSED:
                    log.warning("pre-check %s is %s: %s", operator.name, state.value, self._results[number].message)
                number += 1
        left_out = [each.name for each in self._results if each.state is not OperatorState.PASSED]
        but = f", without {', '.join(left_out)}" if left_out else ""
        await self._note(PreCheckStage.PASS, f"The pre-check passed{but}.")

    async def _note(self, stage: PreCheckStage, message: str) -> None:
        await self._master_loop.tell(PreCheckNoted(stage=stage, results=tuple(self._results), message=message))

    async def _wait(self, operator: Operator, *, is_retry: bool = False) -> None:
        """Until it makes sense to ask again. A retry has its interval for whatever was done to work."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_interval(operator)):
                if is_retry:
                    await asyncio.Event().wait()
                await self._changed.wait()

    async def _ask(self, operator: Operator) -> PreCheckResult | None:
        """None: it has no answer."""
        self._trouble = ""
        status = await self._master_loop.ask(AskStatus())
        assert isinstance(status, JobStatus), "the answer to this question"
        view = view_of(self._master_loop.job.state, status.nodes, self._master_loop.now())
        answer = await self._call(operator, lambda: operator.plugin.check(job_args=view))
        if isinstance(answer, PreCheckResult):
            return answer
        if not self._trouble:
            self._broken(operator, f"answered {type(answer).__name__} instead of a PreCheckResult")
        return None

    def _judge(self, operator: Operator, result: PreCheckResult | None) -> tuple[OperatorState, str]:
        """With the words about it."""
        if result is None:
            return OperatorState.BROKEN, self._trouble
        with self._foreign(operator, "returned a result that is not valid (%s)"):  # what is in it is the user's, too
            return _state_of(operator, result), _text(result.result_msg)
        return OperatorState.BROKEN, self._trouble

    async def _call(self, operator: Operator, call: Callable[[], object]) -> object:
        threads = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pre-check")
        running = asyncio.wrap_future(threads.submit(call))
        threads.shutdown(wait=False)  # a thread cannot be ended: one that does not come back is left behind
        done, _ = await asyncio.wait([running], timeout=self._time_limit)
        if not done:
            self._broken(operator, f"took longer than {self._time_limit:g} s")
            return None
        with self._foreign(operator, "raised %s"):  # an operator may raise anything; the job goes on without its answer
            return running.result()
        return None

    def _foreign(self, operator: Operator, trouble: str) -> Edge:
        return exit_contained(lambda error: self._broken(operator, trouble % f"{type(error).__name__}: {error}"))

    def _broken(self, operator: Operator, what: str) -> None:
        text = (
            f"The pre-check {operator.name} {what}. The job continues without it. Correct the code of this pre-check."
        )
        self._trouble = _text(what)
        self._tell(event(self._master_loop.now(), WARN, "pre_check_error", text))

    # Actions.

    async def _act(self, operator: Operator, result: PreCheckResult) -> bool:
        """False: it, or what it wants, is broken."""

        def wishes() -> object:
            nodes = [getattr(node, "id", node) for node in result.abnormal_nodes or ()]
            return operator.plugin.failed_actions(result_msg=result.result_msg, abnormal_nodes=nodes)

        answer = await self._call(operator, wishes)
        with self._foreign(
            operator, "asked for an action that is not possible (%s)"
        ):  # the actions' fields are the user's, too
            for action in answer if isinstance(answer, list | tuple) else ():
                if isinstance(action, DiagnosisAction):
                    self._actions.add_action(action)
            while not isinstance(action := self._actions.next_action(DiagnosisConstant.MASTER_INSTANCE), NoAction):
                await self._carry_out(action)
            return not self._trouble
        self._actions.clear_actions()
        return False

    async def _carry_out(self, action: DiagnosisAction) -> None:
        try:
            match action:
                case JobAbortionAction():
                    self._failure = _text(f"The pre-check ends the job ({action.reason}): {action.msg}")
                case JobRestartAction():
                    await self._master_loop.tell(RestartJob(reason=_text(action.reason or action.msg)))
                case (
                    NodeAction(action_type=DiagnosisActionType.MASTER_RELAUNCH_WORKER)
                    | NodeAction(action_type=DiagnosisActionType.RELAUNCH_WORKER)
                ):
                    wish = RelaunchNode(
                        node=NodeId(-1), platform_node=PlatformId(int(action.node_id)), reason=_text(action.reason)
                    )
                    await self._master_loop.tell(wish)
                case EventAction():
                    level = action.event_type if action.event_type in ("info", "warn", "error") else "info"
                    text = action.event_msg or action.event_action
                    self._tell(event(self._master_loop.now(), level, action.event_action or "pre_check", text))
                case _:
                    log.warning("this action is not possible before training: %s", action.action_type)
        except DLRoverError as error:
            log.warning("action of the pre-check refused action=%s reason=%s", action.action_type, error)


def _text(said: object) -> str:
    """As a command can carry it."""
    return encodable(str(said)[:MAX_MESSAGE])


def _state_of(operator: Operator, result: PreCheckResult) -> OperatorState:
    if result.is_pending:
        return OperatorState.OPEN
    if result.is_success():
        return OperatorState.PASSED
    return OperatorState.BYPASSED if operator.is_bypassed else OperatorState.FAILED


def _interval(operator: Operator) -> float:
    seconds = 5.0
    with exit_contained(lambda _error: None):  # of the user; what it is about is not worth more
        seconds = float(operator.plugin.get_retry_interval_secs())
    return min(max(seconds, 0.1), 600.0)


def whole_limit(pending_timeout: float) -> float:
    return SLACK + max(0.0, pending_timeout)
