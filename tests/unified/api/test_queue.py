"""`DataQueue` (spec 11, §19, row 19): `get` waits, the owner is named once, and no call is repeated behind the back of its caller."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.unified.api.queue import DataQueue
from dlrover.unified.runtime.methods import METHODS
from dlrover.unified.runtime.wire import CallTimeout
from tests.unified.fake_ray import fake_ray
from tests.unified.loopback import loopback


def use_a_queue() -> None:
    owned: DataQueue[int] = DataQueue("numbers", is_master=True, size=3)
    found: DataQueue[int] = DataQueue("numbers")
    assert owned.get_nowait() == []
    with pytest.raises(CallTimeout, match="numbers received no item within 0 s"):
        found.get(timeout=0.0)
    with ThreadPoolExecutor() as threads:
        one = threads.submit(found.get, 5)
        while "get" not in waiting(owned):
            assert not one.done(), "an empty list was given for an item"
        owned.put(1)
        assert one.result(120) == [1], "at least one, and not the whole batch"

        three = threads.submit(found.get, 3, exactly=True)
        owned.put(2, 3)
        assert not three.done()
        owned.put(4)
        assert three.result(120) == [2, 3, 4]

        full = threads.submit(owned.put, 5, 6, 7, 8)
        rest: list[int] = []
        while len(rest) < 4:
            rest += found.get(4)
        full.result(120)
        assert rest == [5, 6, 7, 8]
    assert found.qsize() == 0
    assert METHODS.repeatable() == [], (
        "a call whose owner dies raises InstanceLost: its items are lost, and that is told"
    )


def waiting(queue: DataQueue[int]) -> str:
    """What the owner is asked at the moment."""
    server = METHODS._functions[f"queue.{queue.name}.get"].__self__  # type: ignore[attr-defined]
    return "get" if server._turns else ""


async def test_a_queue_waits_for_items_and_loses_none_silently(monkeypatch: pytest.MonkeyPatch):
    with fake_ray(monkeypatch), loopback(me=[object()]):
        await asyncio.to_thread(use_a_queue)


def test_a_queue_needs_room():
    with pytest.raises(ConfigError, match="size must be at least 1"):
        DataQueue("numbers", size=0)
