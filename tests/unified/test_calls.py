"""Calls between roles in one process: results and errors, batches, stubs, and what is refused."""

from __future__ import annotations

import asyncio
import pickle
from array import array

import pytest

from dlrover.unified import CallFailed, CallRefused, RoleGroup, group, rpc
from dlrover.unified.runtime.calls import evenly
from dlrover.unified.runtime.methods import Methods
from dlrover.unified.runtime.wire import CallHeader, Raised, freeze, thaw
from tests.unified.loopback import loopback


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.num_calls = 0

    @rpc()
    def double(self, numbers: list[int], offset: int = 0) -> list[int]:
        return [2 * number + offset for number in numbers]

    @rpc()
    def which(self, *args: object) -> object:
        return self.rank, args

    @rpc("renamed")
    async def later(self, value: int) -> int:
        await asyncio.sleep(0)
        return value + 1

    @rpc()
    def fail(self) -> None:
        raise KeyError("lost")

    @rpc()
    def shrink(self, numbers: list[int]) -> list[int]:
        return numbers[:1]

    @rpc(retry=True)
    def count(self) -> int:
        self.num_calls += 1
        return self.num_calls


@rpc()
def renamed(value: int) -> int: ...


@pytest.mark.parametrize("num_workers", range(1, 9))
def test_a_batch_of_any_size_equals_the_local_result(num_workers: int):
    with loopback(worker=[Worker(rank) for rank in range(num_workers)]):
        for size in range(51):
            numbers = list(range(size))
            result = group("worker").call_batch("double", size, numbers, offset=1)
            local = Worker(0).double(numbers, offset=1)
            assert list(result) == local
            assert result.wait() == local
            assert len(result) == size
            assert result[-3:] == local[-3:]
            if size:
                assert (result[0], result[-1]) == (local[0], local[-1])
            with pytest.raises(IndexError):
                result[size]


def test_a_batch_is_cut_as_evenly_as_it_can_be():
    for size in range(51):
        for parts in range(1, 9):
            sizes = [end - start for start, end in evenly(size, parts)]
            assert sum(sizes) == size
            assert max(sizes) - min(sizes) <= 1


def test_a_batch_of_the_wrong_size_is_refused_and_a_short_answer_is_an_error():
    with loopback(worker=[Worker(0), Worker(1)]):
        with pytest.raises(ValueError, match="has 2 items and the batch 3"):
            group("worker").call_batch("double", 3, [1, 2])
        with pytest.raises(ValueError, match="must return as many"):
            group("worker").call_batch("shrink", 6, list(range(6))).wait()


def test_calls_go_to_all_to_one_or_scattered():
    with loopback(worker=[Worker(rank) for rank in range(3)], none=[]):
        workers = group("worker")
        assert workers.call("which", "a").result() == [(0, ("a",)), (1, ("a",)), (2, ("a",))]
        assert workers.call("which", [7, 8, 9], _scatter=True).result() == [(0, (7,)), (1, (8,)), (2, (9,))]
        assert workers.call_rank0("which").result() == (0, ())
        assert workers[2].call("which").result() == (2, ())
        assert group("none").call("which").result() == []
        assert len(RoleGroup("absent", optional=True)) == 0
        with pytest.raises(ValueError, match="no role 'absent'"):
            group("absent")
        with pytest.raises(ValueError, match="3 elements"):
            workers.call("which", [1, 2], _scatter=True)


def test_a_stub_names_the_method():
    with loopback(worker=[Worker(0)]):
        assert group("worker").call_rank0(renamed, 4).result() == 5


async def test_an_answer_can_be_awaited_and_is_not_waited_for_in_an_event_loop():
    with loopback(worker=[Worker(0), Worker(1)]):
        assert await group("worker")[1].call("which") == (1, ())
        assert await group("worker").call("which") == [(0, ()), (1, ())]
        with pytest.raises(AssertionError, match="Await it"):
            group("worker").call_rank0("which").result()


def test_what_a_method_raises_reaches_its_caller_with_its_cause():
    with loopback(worker=[Worker(0)]):
        with pytest.raises(CallFailed, match="fail of worker-0 raised KeyError: 'lost'") as caught:
            group("worker").call_rank0("fail").result()
        assert isinstance(caught.value.__cause__, KeyError)
        assert isinstance(group("worker").call_rank0("fail").exception(), CallFailed)


def test_a_method_that_does_not_exist_is_refused_with_those_that_do():
    with (
        loopback(worker=[Worker(0)]),
        pytest.raises(CallRefused, match=r"no @rpc method 'dubble'\. It has: count, double"),
    ):
        group("worker").call_rank0("dubble").result()


def test_a_repeated_call_is_answered_from_memory():
    worker, methods = Worker(0), Methods()
    methods.export_object(worker)
    header = CallHeader(id="a", method="count", is_repeatable=True)
    assert [thaw(methods.answer(header, freeze(((), {})), "w")) for _ in range(3)] == [1, 1, 1]
    assert worker.num_calls == 1
    assert thaw(methods.answer(CallHeader(id="b", method="count"), freeze(((), {})), "w")) == 2


def test_two_functions_of_one_name_are_refused():
    methods = Methods()
    methods.export("add", sum)
    methods.export("add", sum)
    with pytest.raises(ValueError, match="'add'"):
        methods.export("add", max)


def test_large_buffers_travel_beside_the_pickle_and_are_not_copied():
    numbers = array("d", range(100_000))
    parts = freeze({"small": 1, "large": pickle.PickleBuffer(numbers)})
    assert len(parts) == 2
    assert len(parts[0]) < 200
    numbers[0] = 5.0
    assert memoryview(thaw(parts)["large"]).cast("B").cast("d")[0] == 5.0


def test_an_error_that_cannot_be_opened_still_tells_its_text():
    class Local(Exception):
        pass

    class Breaker:
        @rpc()
        def go(self) -> None:
            raise Local("here")

    methods = Methods()
    methods.export_object(Breaker())
    with pytest.raises(Raised, match="Local: here"):
        methods.answer(CallHeader(id="a", method="go"), freeze(((), {})), "w")
