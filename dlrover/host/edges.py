"""
Edges: where an error of any kind ends without being raised again. Everywhere else code names the errors that it can handle.

An edge is the root of a task or thread, where an error would be lost; code of users, extensions or libraries, which may raise
anything; or a call whose error is its answer. `tests/docs/test_edges.py` names each place that has one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import logging

T = TypeVar("T")


class Edge(AbstractContextManager[None, bool]):
    """An error of the block ends here, and `tell` gets it. It is called inside the handler, so it may log the traceback."""

    def __init__(
        self, kinds: type[BaseException] | tuple[type[BaseException], ...], tell: Callable[[Any], object]
    ) -> None:
        self._kinds = kinds
        self._tell = tell

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, self._kinds):
            return False
        self._tell(error)
        return True


def contained(tell: Callable[[Exception], object]) -> Edge:
    return Edge(Exception, tell)


def exit_contained(tell: Callable[[Exception | SystemExit], object]) -> Edge:
    """For code that may call `sys.exit()`. Not in a training process: there the exit may be that of a signal handler."""
    return Edge((Exception, SystemExit), tell)


def handed_over(tell: Callable[[BaseException], object]) -> Edge:
    """Whatever ends the block goes to another thread, which raises it."""
    return Edge(BaseException, tell)


def logged(log: logging.Logger, text: str, *values: object) -> Edge:
    """An error of the block ends here, in the log, with its traceback."""
    return contained(lambda _error: log.exception(text, *values))


def attempt(call: Callable[[], T], otherwise: Callable[[Exception], T]) -> T:
    """What `call` returns, or what `otherwise` makes of its error."""
    try:
        return call()
    except Exception as error:
        return otherwise(error)
