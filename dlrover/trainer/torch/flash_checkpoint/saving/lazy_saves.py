"""
The lazy saves of an engine: at most one under way, brought to its end by a thread or by the code that needs it to be there.

What may be copied lazily and how that is guarded says `lazy.py`; here is when, and what becomes of it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from dlrover.host.edges import contained
from dlrover.protocol.errors import DLRoverError
from dlrover.snapshot.storage.persist import SaveRequest
from dlrover.trainer.torch.flash_checkpoint.checkpointer import SaveReason, SaveResult
from dlrover.trainer.torch.flash_checkpoint.encoding.lazy import LAZY, Changed, Memory, Staging, StepWatch
from dlrover.trainer.torch.flash_checkpoint.encoding.tensor_copies import PendingSave

log = logging.getLogger("dlrover.trainer.flash_checkpoint")


class LazySaves:
    def __init__(self, lazy: bool | str, publish: Callable[[PendingSave, SaveRequest], None]) -> None:
        """`lazy` is for saves that do not say; `publish` makes a save count whose copy has ended, in whatever thread."""
        self._lazy = check_lazy(lazy)
        self._publish = publish
        self.watch = StepWatch(self._before_step)
        self._why_never = ""
        """Once a tensor was written to during its copy nothing is copied lazily any more."""
        self._told_against = ""
        self._staging: Staging | None = None
        self._result: SaveResult | None = None
        """Of the newest save, if that is a lazy one."""
        self._stager: ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    @property
    def is_under_way(self) -> bool:
        return self._staging is not None and not self._staging.is_done

    def wish(self, lazy: bool | str | None) -> bool | str:
        """What a save wants that says this."""
        return self._lazy if lazy is None else check_lazy(lazy)

    def memory(self, wish: bool | str) -> Collection[Memory]:
        """What may be copied while training goes on."""
        if wish is False:
            return ()
        reason, owned = (self._why_never, ()) if self._why_never else self.watch.survey()
        if not reason:
            return owned
        if reason != self._told_against:
            self._told_against = reason
            log.log(logging.WARNING if wish is True else logging.INFO, "This save is not lazy: %s.", reason)
        return ()

    def after_save(self) -> None:
        """Another save has been made, lazy or not."""
        self.watch.after_save()
        self._result = None

    def stage(self, pending: PendingSave, request: SaveRequest, result: SaveResult) -> None:
        """Let a thread bring the save to its end."""
        assert not self.is_under_way, "one after the other"
        result.is_lazy, result.is_done = True, False
        self._result = result
        self._staging = staging = Staging(pending.help, lambda: self._settle(pending, request, result))
        if self._stager is None:
            self._stager = ThreadPoolExecutor(1, thread_name_prefix="dlrover-stage")
        self._stager.submit(_bring_to_end, pending, staging)

    def wait(self) -> bool:
        """Until the newest save is in memory; helps with its copy. False: it was discarded, its result says why."""
        staging, result = self._staging, self._result
        if os.getpid() != self._pid:
            return False  # a forked child has a copy of this, and no threads
        if staging is not None:
            begun_at = time.perf_counter()
            if not staging.is_done:
                staging.finish()
            assert result is not None, "a save under way has a result"
            result.waited += time.perf_counter() - begun_at
            self._staging = None
        return result is None or bool(result)

    def close(self) -> None:
        self.watch.close()
        self.wait()
        if self._stager is not None:
            self._stager.shutdown(wait=True)

    def _before_step(self) -> None:
        """The hook: torch calls it before each step of each optimizer, and what is not copied yet has to be before that."""
        if self._staging is not None:
            self.wait()

    def _settle(self, pending: PendingSave, request: SaveRequest, result: SaveResult) -> None:
        """Everything is copied. Called once, by the thread or by the training; nothing may come out of it."""
        try:
            with contained(partial(self._note_failure, request.step, result)):  # training goes on without this snapshot
                self._publish(pending, request)
        finally:
            result.is_done = True

    def _note_failure(self, step: int, result: SaveResult, error: Exception) -> None:
        result.reason, result.message = SaveReason.ERROR, str(error)
        match error:
            case Changed():
                self._why_never = f"{error} Code other than an optimizer's step changes it"
                text = (
                    "Step %d was not saved: %s Code other than an optimizer's step changed it. From now on "
                    "saves are not lazy. Save after that code has run, or give lazy=False."
                )
                log.error(text, step, error)
            case OSError() | DLRoverError():
                log.error("Step %d was not saved: %s", step, error)
            case _:
                result.message = f"{type(error).__name__}: {error}"
                log.exception("Step %d was not saved because of a bug in DLRover. Training continues.", step)


def check_lazy(lazy: bool | str) -> bool | str:
    if lazy not in LAZY:
        raise ValueError(f'lazy must be True, False or "auto" (got {lazy!r}).')
    return lazy


def _bring_to_end(pending: PendingSave, staging: Staging) -> None:
    """What the thread of a lazy save does."""
    try:
        pending.begin()
    finally:  # its error comes again where it is dealt with
        staging.finish()
