"""
A second fault, at one point of a last breath: the worker that installs this kills or stops itself there, in its first life.

Points, in their order: `order`: the agent's order was heard, and the collective still waits. `undone`: the broken step is undone, and nothing is offered.
`offered`: the agent knows what this worker has. `finishing`: the agent wants the step finished. `saving`: a slot of the segment is being written.
`written`: all is in the slot, and it does not count yet. `saved`: the slot counts, and the agent does not know it. `told`: the agent knows it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from dlrover.host.shared_page.breath_page import BreathPage
from dlrover.host.shared_page.breath_words import BreathAnswer
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import PendingSave, StateWriter
from dlrover.trainer.torch.resilience import last_breath
from dlrover.trainer.torch.resilience.guard import StepGuard
from dlrover.trainer.torch.resilience.last_breath import LastBreath

POINTS = ("order", "undone", "offered", "finishing", "saving", "written", "saved", "told")


def install(words: str, rank: int) -> None:
    """`words`: POINT,SIGNAL,RANK."""
    point, name, number = words.split(",")
    assert point in POINTS, point
    if rank != int(number) or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return

    def fail() -> None:
        os.kill(os.getpid(), signal.Signals[name])

    is_breathing = False

    def fail_in_breath() -> None:
        if is_breathing:
            fail()

    save = LastBreath._save

    def save_in_breath(*args: Any) -> None:
        nonlocal is_breathing
        is_breathing = True
        save(*args)

    LastBreath._save = save_in_breath  # type: ignore[method-assign]
    match point:
        case "order":
            last_breath.close_connections = _after(fail, last_breath.close_connections)
        case "undone":
            last_breath.digest_of = _after(fail, last_breath.digest_of)
        case "finishing":
            StepGuard._offer = _before(StepGuard._offer, fail)  # type: ignore[method-assign]
        case "saving":
            StateWriter._fill = _after(fail_in_breath, StateWriter._fill)  # type: ignore[method-assign]
        case "written":
            PendingSave.finish = _after(fail_in_breath, PendingSave.finish)  # type: ignore[method-assign]
        case "saved":
            PendingSave.finish = _before(PendingSave.finish, fail_in_breath)  # type: ignore[method-assign]
        case "offered" | "told":
            _fail_after_answer(BreathAnswer.OFFERED if point == "offered" else BreathAnswer.SAVED, fail)


def _after(action: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        action()
        return function(*args, **options)

    return call


def _before(function: Callable[..., Any], action: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        action()
        return result

    return call


def _fail_after_answer(wanted: BreathAnswer, fail: Callable[[], None]) -> None:
    answer = BreathPage.answer
    assert answer.fget is not None
    assert answer.fset is not None
    write = answer.fset

    def tell(page: BreathPage, value: BreathAnswer) -> None:
        write(page, value)
        if value is wanted:
            fail()

    BreathPage.answer = property(answer.fget, tell)  # type: ignore[assignment]
