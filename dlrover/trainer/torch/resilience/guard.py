"""
`dlrover.resilient` and `dlrover.steps`: when another worker is lost, the step that was finished last is not lost with it.

    @dlrover.resilient(model, optimizer, also=[scheduler])
    def train_step(batch): ...

    for step in dlrover.steps(batches, model, optimizer):
        with step as batch:
            ...

The script promises: all collectives of a step happen inside; between the last of them and the end of the step only the named objects change; what it
saves consists of these objects' states, the step's number and texts. It saves and restores with Flash Checkpoint as ever. Outside of `dlrover-run`, and
before a worker is lost, the guard only counts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch.distributed as dist

from dlrover.agreed.lost_peers import tells_of_lost_peer
from dlrover.trainer.torch.resilience.buffers import KeptBuffers
from dlrover.trainer.torch.resilience.last_breath import LastBreath
from dlrover.trainer.torch.resilience.meeting import Meeting
from dlrover.trainer.torch.resilience.recipe import DoubtError, Sources
from dlrover.trainer.torch.resilience.saves import save_log

log = logging.getLogger("dlrover.trainer.resilience")

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_OF_COLLECTIVES = (RuntimeError, ConnectionError, OSError)
"""What a collective raises after its connection was closed."""


class StepGuard:
    """Knows of each step whether it is whole. Enter it before a step, leave it after."""

    def __init__(self, model: Any, optimizer: Any, *, also: Sequence[Any] = ()) -> None:
        self._sources = Sources(model, optimizer, also)
        self._num_done = 0
        self._is_inside = False
        self._num_stepped = 0
        """Steps of optimizers that began since the guard was entered."""
        self._is_whole = True
        """Nothing of a step is done that is not finished."""
        self._breath: LastBreath | None = None
        self._meeting: Meeting | None = None
        self._is_opened = False
        self._seen = 0
        """How many saves and restores are taken into account."""
        self._doubt = ""
        self._buffers: KeptBuffers | None = None
        """As they were when the guard was entered: a forward pass changes those of a batch norm."""

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.leave(error)

    def enter(self, *, is_first: bool = True) -> None:
        """`is_first`: a step begins with this, and not another part of it."""
        if not self._is_opened:
            self._open()
        breath = self._breath
        if breath is None:
            return
        if breath.is_due:
            self._end(breath)
        if self._seen != save_log().num_notes:
            self._learn(breath)
        if is_first:
            self._num_stepped = 0
            self._is_whole = False
            if self._buffers is not None:
                self._keep(self._buffers, breath)
        self._is_inside = True

    def leave(self, error: BaseException | None = None, *, is_last: bool = True) -> None:
        """`is_last`: the step is whole with this."""
        breath = self._breath
        if breath is None:
            return
        self._is_inside = False
        if error is None:
            if is_last:
                self._num_done += 1
                self._is_whole = True
            if breath.is_due:
                self._end(breath)
        elif self._is_peer_lost(breath, error):
            self._end(breath)

    def _open(self) -> None:
        """At the first step: the process group is there by then, and the model where it stays."""
        self._is_opened = True
        if not _is_over_gloo():
            return
        self._breath = LastBreath.open()
        if self._breath is None:
            return
        self._buffers = KeptBuffers(self._sources.models)
        self._meeting = self._breath.open_meeting(self._sources.models)
        for each in self._sources.optimizers:
            each.register_step_pre_hook(self._before_step)
        save_log().count_with(lambda: self._num_done + self._is_inside)

    def _learn(self, breath: LastBreath) -> None:
        """There was another save or restore. Announce the guard if the last step could be saved now, and only then."""
        history = save_log()
        self._seen = history.num_notes
        known = history.known
        if known is None or not history.is_counted or self._doubt:
            return
        try:
            self._sources.build(known.shape, known.step, known.step)
            breath.is_announced = not history.doubt
        except DoubtError as error:
            self._doubt = str(error)
            breath.is_announced = False
            log.warning("If a worker is lost, the job restores its newest snapshot: %s.", error)

    def _keep(self, buffers: KeptBuffers, breath: LastBreath) -> None:
        try:
            buffers.keep()
        except (RuntimeError, KeyError, TypeError) as error:
            self._buffers = None
            self._doubt = f"a buffer of the model cannot be kept ({error})"
            breath.is_announced = False

    def _is_peer_lost(self, breath: LastBreath, error: BaseException) -> bool:
        if breath.is_due:
            return isinstance(error, _OF_COLLECTIVES)
        if not breath.is_announced:
            return False
        return tells_of_lost_peer(f"{type(error).__name__}: {error}") and breath.wait_until_due()

    def _end(self, breath: LastBreath) -> NoReturn:
        self._offer(breath)
        raise AssertionError("a worker that has no more work ends")

    def _offer(self, breath: LastBreath, *, can_finish: bool = False) -> None:
        """Returns only if the agent wants this step finished."""
        buffers = self._buffers
        if not self._is_whole and buffers is not None:
            # What the body may have changed before its last collective.
            self._note_doubt(buffers.put_back)
        breath.offer(
            self._num_done, self._build, set() if buffers is None else buffers.addresses, can_finish=can_finish
        )
        if buffers is not None:
            buffers.put_back()

    def _note_doubt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except DoubtError as error:
            self._doubt = str(error)

    def _build(self, shape: dict[str, Any], old_step: int, step: int) -> dict[str, Any]:
        if self._doubt:
            raise DoubtError(self._doubt)
        if not self._is_whole and self._num_stepped:
            raise DoubtError("an optimizer made its step before the failure")
        return self._sources.build(shape, old_step, step)

    def _before_step(self, *_details: object) -> None:
        if not self._is_inside:
            return
        breath, meeting = self._breath, self._meeting
        assert breath is not None, "opened"
        if meeting is not None and not self._num_stepped and not meeting.is_complete_after_wait(lambda: breath.is_due):
            self._offer(breath, can_finish=True)
        self._num_stepped += 1


def _is_over_gloo() -> bool:
    """Elsewhere a broken collective does not raise, and an offer would only cost time."""
    return dist.is_available() and dist.is_initialized() and str(dist.get_backend()) == "gloo"


def resilient(
    model: Any, optimizer: Any, *, also: Sequence[Any] = ()
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """For a function that does one step of training. `also`: schedulers, scalers and what else the step changes and the script saves."""
    guard = StepGuard(model, optimizer, also=also)

    def guarded(train_step: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(train_step)
        def call(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            with guard:
                return train_step(*args, **options)

        return call

    return guarded


class GuardedStep:
    """One step of the loop: a context that gives the batch."""

    def __init__(self, guard: StepGuard, batch: Any) -> None:
        self._guard, self._batch = guard, batch

    def __enter__(self) -> Any:
        self._guard.__enter__()
        return self._batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._guard.leave(error)


def steps(batches: Iterable[Any], model: Any, optimizer: Any, *, also: Sequence[Any] = ()) -> Iterator[GuardedStep]:
    """The same for a loop without such a function."""
    guard = StepGuard(model, optimizer, also=also)
    for batch in batches:
        yield GuardedStep(guard, batch)
