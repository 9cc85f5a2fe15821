from __future__ import annotations

import asyncio

import pytest

from dlrover.host import side_thread

DEADLINE = 60.0


@pytest.mark.parametrize("raised", [SystemExit(3), StopIteration(3), KeyboardInterrupt(3), asyncio.CancelledError(3)])
async def test_what_a_task_cannot_carry_comes_back_as_an_ordinary_error(raised: BaseException) -> None:
    def call() -> None:
        raise raised

    with pytest.raises(RuntimeError, match=f"{type(raised).__name__}: 3"):
        await asyncio.wait_for(side_thread.begin(call, "test"), DEADLINE)


async def test_an_ordinary_error_stays_what_it_was() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await side_thread.begin(lambda: int("x"), "test")
