"""
Deletion strategies in the form that users know: a class with `clean_up(step, delete_func)`.

The built-in ones become the numbers of `retention`. A strategy of the user's own runs in a child process, after a newer checkpoint was
committed: it is built anew, told every older step that still exists, oldest first, and what it asks to delete is only a
wish. `apply_retention` grants it for our own checkpoints and never for the newest or the one that the tracker names. So a strategy that
fails, hangs or asks for the wrong thing costs nothing but disk space, and one that remembers steps finds them again after a restart.
"""

from __future__ import annotations

import abc
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.host.edges import contained
from dlrover.protocol.errors import ConfigError
from dlrover.snapshot.storage.class_meta import ClassMeta, Rebuildable, build, describe
from dlrover.snapshot.storage.retention import KeepInterval, KeepLatest, MoreRules

log = logging.getLogger("dlrover.snapshot")

PATIENCE = 60.0
"""Seconds for a strategy of the user's, imports included."""
_NUMBER_AT_END = re.compile(r"(\d+)$")


class CheckpointDeletionStrategy(Rebuildable, abc.ABC):
    @abc.abstractmethod
    def clean_up(self, step: int, delete_func: Callable[[str], object]) -> None:
        """Called with a step that a newer one has followed; `delete_func(path)` asks for the deletion of a directory."""


class KeepStepIntervalStrategy(CheckpointDeletionStrategy):
    """Keep the steps that are multiples of an interval, and the newest."""

    def __init__(self, keep_interval: int, checkpoint_dir: str) -> None:
        self.keep_interval = max(1, int(keep_interval))
        self.checkpoint_dir = os.fspath(checkpoint_dir)

    def directory_of(self, step: int) -> str:
        return os.path.join(self.checkpoint_dir, str(step))

    def clean_up(self, step: int, delete_func: Callable[[str], object]) -> None:
        if step % self.keep_interval:
            _delete(delete_func, self.directory_of(step))


class KeepLatestStepStrategy(CheckpointDeletionStrategy):
    """Keep the newest `max_to_keep`, the one that was just committed among them."""

    def __init__(self, max_to_keep: int, checkpoint_dir: str) -> None:
        self.max_to_keep = max(1, int(max_to_keep))
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        self._steps: list[int] | None = None

    def directory_of(self, step: int) -> str:
        return os.path.join(self.checkpoint_dir, str(step))

    def clean_up(self, step: int, delete_func: Callable[[str], object]) -> None:
        if self._steps is None:  # what a former process left is found on disk
            self._steps = [older for older in self._on_disk() if older < step]
        self._steps.append(step)
        while len(self._steps) >= self.max_to_keep:
            _delete(delete_func, self.directory_of(self._steps.pop(0)))

    def _on_disk(self) -> list[int]:
        try:
            names = os.listdir(self.checkpoint_dir)
        except OSError:
            return []
        steps = {int(found[1]) for name in names if (found := _NUMBER_AT_END.search(name))}
        return sorted(step for step in steps if os.path.isdir(self.directory_of(step)))


class DeletionRule(Struct, frozen=True, kw_only=True):
    """A strategy in the words of a save request. All empty: keep everything."""

    keep_latest: int = 0
    keep_interval: int = 0
    keep: MoreRules | None = None
    custom: ClassMeta | None = None


def rule_for(strategy: object) -> DeletionRule:
    """Raises ConfigError for what the agent could not run."""
    if strategy is None:
        return DeletionRule()
    if isinstance(strategy, KeepLatest):
        return DeletionRule(keep_latest=max(1, strategy.max_to_keep))
    if isinstance(strategy, KeepInterval):
        return DeletionRule(keep_interval=max(1, strategy.keep_interval))
    if isinstance(strategy, MoreRules):
        return DeletionRule(keep=strategy)
    is_built_in = type(strategy).__module__.startswith("dlrover.")
    if is_built_in and isinstance(strategy, KeepLatestStepStrategy):
        return DeletionRule(keep_latest=strategy.max_to_keep)
    if is_built_in and isinstance(strategy, KeepStepIntervalStrategy):
        return DeletionRule(keep_interval=strategy.keep_interval)
    if not callable(getattr(strategy, "clean_up", None)):
        raise ConfigError(
            f"deletion_strategy has the type {type(strategy).__name__}. Give KeepLatestStepStrategy, "
            "KeepStepIntervalStrategy, or a class of your own derived from CheckpointDeletionStrategy, all of "
            "dlrover.python.common.storage."
        )
    return DeletionRule(custom=describe(strategy, CheckpointDeletionStrategy))


class UserDeletion:
    """A strategy of the user's as a `Retention`."""

    def __init__(self, meta: ClassMeta, directory: str, *, patience: float = PATIENCE) -> None:
        self._meta, self._directory, self._patience = meta, directory, patience

    def expendable(self, steps: Sequence[int]) -> list[int]:
        """What the strategy would delete. Empty, with an error in the log, when it cannot be asked."""
        question = msgspec.json.encode(_Question(self._meta, list(steps[:-1])))
        name = f"{self._meta.module_path}.{self._meta.class_name}"
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", __name__], input=question, capture_output=True, timeout=self._patience
            )
            paths = msgspec.json.decode(done.stdout or b"", type=list[str])
        except subprocess.TimeoutExpired:
            log.error("the deletion strategy %s took longer than %g s; nothing was deleted", name, self._patience)
            return []
        except (OSError, msgspec.MsgspecError) as error:
            said = (
                done.stderr.decode(errors="replace").strip()[-2000:]
                if isinstance(error, msgspec.MsgspecError)
                else error
            )
            log.error("the deletion strategy %s failed; nothing was deleted: %s", name, said)
            return []
        return [step for path in paths if (step := self._step_of(path)) is not None]

    def _step_of(self, path: str) -> int | None:
        """By the number at the end: `100` and `iter_0000100` are both step 100. Other directories are none of ours."""
        directory, name = os.path.split(path.rstrip("/"))
        found = _NUMBER_AT_END.search(name)
        is_here = directory == self._directory or os.path.abspath(directory) == self._directory.rstrip("/")
        if found is None or not is_here:
            log.warning(
                "the deletion strategy asked to delete %s, which is not a checkpoint of this job; it was not deleted",
                path,
            )
            return None
        return int(found[1])


class _Question(Struct):
    meta: ClassMeta
    older_steps: list[int]


_DECODER = msgspec.json.Decoder(_Question)


def _delete(delete_func: Callable[[str], object], path: str) -> None:
    """Failures are told, never raised: training goes on with a full disk rather than not at all."""
    with contained(lambda error: log.warning("%s could not be deleted: %s", path, error)):
        delete_func(path)


def _answer(question: bytes) -> list[str]:
    asked = _DECODER.decode(question)
    strategy: Any = build(asked.meta, CheckpointDeletionStrategy)
    wanted: list[str] = []
    for step in asked.older_steps:
        strategy.clean_up(step, lambda path: wanted.append(os.fspath(path)))
    return wanted


def _main() -> None:
    """The child: a question on stdin, the answer on stdout; what the user's code prints goes to stderr."""
    sys.path.append(
        ""
    )  # last: the user's code may import from the working directory, and nothing there replaces what we import
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        wanted = _answer(sys.stdin.buffer.read())
    except ConfigError as error:
        sys.exit(str(error))
    answer.write(msgspec.json.encode(wanted))
    answer.close()


if __name__ == "__main__":
    _main()
