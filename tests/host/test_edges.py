"""What ends at an edge, what passes it, and what is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from dlrover.host.edges import Edge, attempt, contained, exit_contained, handed_over, logged

CASES = [
    (contained, ValueError, True),
    (contained, StopIteration, True),
    (contained, SystemExit, False),
    (contained, KeyboardInterrupt, False),
    (contained, asyncio.CancelledError, False),
    (exit_contained, ValueError, True),
    (exit_contained, SystemExit, True),
    (exit_contained, asyncio.CancelledError, False),
    (handed_over, ValueError, True),
    (handed_over, KeyboardInterrupt, True),
]


@pytest.mark.parametrize(("edge", "kind", "ends"), CASES)
def test_an_edge_tells_what_ends_there_and_lets_the_rest_pass(
    edge: Callable[[Callable[[BaseException], object]], Edge], kind: type[BaseException], ends: bool
) -> None:
    told: list[BaseException] = []
    error = kind()
    try:
        with edge(told.append):
            raise error
    except kind:
        assert not ends
    assert told == [error] * ends


def test_nothing_is_told_of_a_block_that_ends_well() -> None:
    told: list[BaseException] = []

    def answer() -> int:
        with contained(told.append):
            return 7
        return 0

    assert answer() == 7
    assert told == []


def test_a_logged_error_has_its_values_and_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with logged(logging.getLogger("dlrover.test"), "bug in step %d", 3):
        raise ValueError("odd")
    (record,) = caplog.records
    assert record.getMessage() == "bug in step 3"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


def test_an_attempt_answers_with_what_the_error_says() -> None:
    assert attempt(lambda: int("7"), lambda _error: 0) == 7
    assert attempt(lambda: int("x"), lambda error: -len(error.args)) == -1
    with pytest.raises(SystemExit):
        attempt(lambda: exit(3), lambda _error: None)
