"""A thousand deaths of a callee: what may run twice is answered, what may not runs once at most, and nobody waits for a role that is gone."""

from __future__ import annotations

import asyncio
import random

import pytest

from dlrover.unified.runtime.methods import Methods, rpc
from dlrover.unified.runtime.wire import (
    CallHeader,
    CallRefused,
    CallTimeout,
    InstanceLost,
    Parts,
    RoleGone,
    freeze,
    thaw,
)
from dlrover.unified.shell.book import KeyBook, Place
from dlrover.unified.shell.sender import CalleeGone, CalleeUnsure, CallSender
from tests.unified.key_values import FakeKeyValues


class Callee:
    """Dies when chance says so: before a call reaches it, while it runs, or after it has run. The next life is entered into the book."""

    def __init__(self, book: KeyBook, chance: random.Random, *, repeatable: tuple[str, ...] = ()) -> None:
        self.book, self.chance, self.repeatable = book, chance, repeatable
        self.life = 0
        self.runs: list[str] = []
        self.num_deaths = 0
        self.revive()

    @rpc()
    def note(self, mark: str) -> str:
        self.runs.append(mark)
        return mark

    def revive(self) -> None:
        self.life += 1
        self.methods = Methods()
        self.methods.export_object(self)
        place = Place(
            role="r", rank=0, incarnation=self.life, namespace="n", actor=f"a{self.life}", repeatable=self.repeatable
        )
        self.book.enter(place)

    def die(self) -> None:
        self.num_deaths += 1
        asyncio.get_running_loop().call_soon(self.revive)

    async def deliver(self, place: Place, header: CallHeader, parts: Parts) -> Parts:
        if place.incarnation != self.life:
            raise CalleeGone(was_sent=False)
        await asyncio.sleep(0)
        fate = self.chance.randrange(5)
        if fate == 0:
            self.die()
            raise CalleeGone(was_sent=True)
        result = self.methods.answer(header, parts, "r-0")
        if fate == 1:
            self.die()
            raise CalleeGone(was_sent=True)
        if fate == 2:
            raise CalleeUnsure
        return result


def job(seed: int, **more: tuple[str, ...]) -> tuple[CallSender, Callee, KeyBook]:
    book = KeyBook(FakeKeyValues(), "uid")
    callee = Callee(book, random.Random(seed), **more)
    return CallSender(book, callee, again=0.0), callee, book


def header(number: int) -> CallHeader:
    return CallHeader(id=f"call-{number}", method="note", timeout=120.0)


async def test_a_plain_call_never_runs_twice():
    sender, callee, _ = job(1)
    lost, number = [], 0
    while callee.num_deaths < 1000:
        number += 1
        try:
            assert thaw(await sender.send("r", 0, header(number), freeze(((str(number),), {})))) == str(number)
        except InstanceLost:
            lost.append(str(number))
    assert len(set(callee.runs)) == len(callee.runs), "a plain call ran twice"
    assert {str(each) for each in range(1, number + 1)} - set(callee.runs) <= set(lost)


async def test_a_repeatable_call_survives_every_death():
    sender, callee, _ = job(2, repeatable=("note",))
    number = 0
    while callee.num_deaths < 1000:
        number += 1
        assert thaw(await sender.send("r", 0, header(number), freeze(((str(number),), {})))) == str(number)
    assert set(callee.runs) == {str(each) for each in range(1, number + 1)}


async def test_a_call_to_a_role_that_has_ended_is_refused():
    sender, _, book = job(3)
    book.close("r", "it has ended")
    callee = book.look("r", 0)
    assert callee is not None
    book.leave(callee)
    with pytest.raises(RoleGone, match="it has ended"):
        await sender.send("r", 0, header(1), freeze(((), {})))
    book.reopen("r")
    book.close_all("the job ends")
    with pytest.raises(RoleGone, match="the job ends"):
        await sender.send("r", 0, header(1), freeze(((), {})))


async def test_a_call_to_a_script_that_takes_no_calls_is_refused_at_once():
    book = KeyBook(FakeKeyValues(), "uid")
    callee = Callee(book, random.Random(5))
    sender = CallSender(book, callee, silent_roles=["r"])
    with pytest.raises(CallRefused, match=r"note: role r is a script that takes no calls. .* takes_calls=True"):
        async with asyncio.timeout(120):
            await sender.send("r", 0, header(1), freeze(((), {})))
    assert callee.runs == []


async def test_a_call_waits_for_an_instance_that_starts_and_not_for_ever():
    book = KeyBook(FakeKeyValues(), "uid")
    callee = Callee(book, random.Random(4), repeatable=("note",))
    place = book.look("r", 0)
    assert place is not None
    book.leave(place)
    sender = CallSender(book, callee)
    call = asyncio.ensure_future(sender.send("r", 0, header(1), freeze((("x",), {}))))
    await asyncio.sleep(0)
    assert not call.done()
    book.enter(place)
    assert thaw(await call) == "x"
    with pytest.raises(CallTimeout, match="has not started within"):
        await sender.send("r", 1, CallHeader(id="z", method="note", timeout=0.0), freeze(((), {})))


def test_an_entry_of_a_former_life_does_not_remove_a_newer_one():
    book = KeyBook(FakeKeyValues(), "uid")
    old, new = (Place(role="r", rank=0, incarnation=life, namespace="n", actor="a") for life in (1, 2))
    book.enter(old)
    book.enter(new)
    book.leave(old)
    assert book.look("r", 0) == new
    assert [book.next_life("r", 0) for _ in range(3)] == [1, 2, 3]
