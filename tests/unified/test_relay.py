"""A forked worker's socket to its node: calls in both directions, what happens when the worker dies, and that nothing is opened on the way."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.methods import Methods, rpc
from dlrover.unified.runtime.relay_client import RelayWire
from dlrover.unified.runtime.relay_frames import BadFrame, WorkerWelcome, read_head, read_message
from dlrover.unified.runtime.wire import CallHeader, Parts, Raised, RoleGone, as_error, as_raised, freeze, thaw
from dlrover.unified.shell.book import KeyBook
from dlrover.unified.shell.relay import CallRelay
from dlrover.unified.shell.sender import CalleeGone
from tests.unified.key_values import FakeKeyValues

HEADER = CallHeader(id="1", method="add")


class Bomb:
    """Explodes when it is opened in any process but the right one."""

    def __reduce__(self) -> tuple[object, ...]:
        return _explode, ()


def _explode() -> None:
    raise RuntimeError("it was opened on its way")


class FakeWire:
    """Gives back what it gets."""

    def __init__(self) -> None:
        self.book = KeyBook(FakeKeyValues(), "uid")
        self.sent: list[tuple[str, int, str]] = []

    async def send(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Parts:
        self.sent.append((role, rank, header.method))
        if header.method == "gone":
            raise as_raised(RoleGone("it has ended"))
        return parts


class Adder:
    @rpc(retry=True)
    def add(self, left: int, right: int) -> int:
        return left + right


@asynccontextmanager
async def relayed(tmp_path: Path, *, takes_calls: bool = True) -> AsyncIterator[tuple[CallRelay, FakeWire, RelayWire]]:
    wire = FakeWire()
    welcome = WorkerWelcome(
        job="job", job_uid="uid", role="policy", num_ranks={"policy": 2, "other": 1}, takes_calls=takes_calls
    )
    relay = CallRelay(wire, welcome, b"config", namespace="ns", actor="node-1")
    path = os.path.join(tmp_path, "s")
    relay.open(path)
    worker = await asyncio.to_thread(RelayWire, path, 1)
    try:
        yield relay, wire, worker
    finally:
        worker.close()
        await relay.close()


def take_calls(worker: RelayWire) -> None:
    methods = Methods()
    methods.export_object(Adder())
    worker.serve(lambda header, parts: methods.answer(header, parts, "policy-1"))


@pytest.mark.parametrize("size", [10, 1 << 16, 5 << 20])
async def test_a_call_goes_out_and_its_answer_comes_back_unopened(tmp_path: Path, size: int):
    async with relayed(tmp_path) as (_, wire, worker):
        assert (worker.welcome.role, worker.config_data) == ("policy", b"config")
        parts = [pickle.dumps(Bomb()), b"x" * size]
        sent = await asyncio.to_thread(worker.call, "other", 0, HEADER, parts)  # the loop here is the node's
        answer = await asyncio.wrap_future(sent)
        assert [bytes(part) for part in answer] == parts
        assert wire.sent == [("other", 0, "add")]


async def test_an_error_comes_back_as_what_it_is(tmp_path: Path):
    async with relayed(tmp_path) as (_, _, worker):
        call = worker.call("other", 0, CallHeader(id="1", method="gone"), freeze(((), {})))
        with pytest.raises(Raised) as caught:
            await asyncio.wrap_future(call)
        assert isinstance(as_error(caught.value), RoleGone)


async def test_a_worker_that_serves_is_in_the_book_and_is_called_until_it_dies(tmp_path: Path):
    async with relayed(tmp_path) as (relay, wire, worker):
        assert wire.book.look("policy", 1) is None
        await asyncio.to_thread(take_calls, worker)
        place = wire.book.look("policy", 1)
        assert place is not None
        assert (place.incarnation, place.is_relayed, place.actor) == (1, True, "node-1")
        target = ("policy", 1, 1)
        assert thaw(await relay.answer(HEADER, target, freeze(((2, 3), {})))) == 5
        with pytest.raises(CalleeGone) as caught:
            await relay.answer(HEADER, ("policy", 1, 2), freeze(((2, 3), {})))
        assert not caught.value.was_sent
        worker.close()
        async with asyncio.timeout(120):
            while True:
                if wire.book.look("policy", 1) is None:
                    break
                await asyncio.sleep(0)
        with pytest.raises(CalleeGone):
            await relay.answer(HEADER, target, freeze(((2, 3), {})))
        again = await asyncio.to_thread(RelayWire, os.path.join(tmp_path, "s"), 1)
        await asyncio.to_thread(take_calls, again)
        place = wire.book.look("policy", 1)
        assert place is not None
        assert place.incarnation == 2, "a life above the last"
        again.close()


async def test_a_worker_of_a_role_that_takes_no_calls_cannot_serve(tmp_path: Path):
    """Its callers were refused: a declaration that is missing is found by the first run of the script."""
    async with relayed(tmp_path, takes_calls=False) as (_, wire, worker):
        with pytest.raises(ConfigError, match=r"calls serve.*Give Role.elastic\('policy', …, takes_calls=True\)"):
            await asyncio.to_thread(take_calls, worker)
        assert wire.book.look("policy", 1) is None


async def test_who_waits_for_a_worker_that_dies_is_told(tmp_path: Path):
    async with relayed(tmp_path) as (relay, _, worker):
        begun, released = threading.Event(), threading.Event()

        def hang(header: CallHeader, parts: Parts) -> Parts:
            begun.set()
            released.wait(120)
            return parts

        await asyncio.to_thread(worker.serve, hang)
        call = asyncio.ensure_future(relay.answer(HEADER, ("policy", 1, 1), freeze(((), {}))))
        await asyncio.to_thread(begun.wait, 60)
        worker.close()
        with pytest.raises(CalleeGone) as caught:
            async with asyncio.timeout(120):
                await call
        assert caught.value.was_sent
        released.set()


def test_what_is_no_frame_is_refused():
    with pytest.raises(BadFrame):
        read_head(b"\xff" * 8)
    with pytest.raises(BadFrame):
        read_message(b"\xc1")
