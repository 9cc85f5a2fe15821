"""A stream under faults: feeders, the server and the trainer die at any moment, and each key is in exactly one batch of the final model."""

from __future__ import annotations

import random

import pytest

from dlrover.unified.runtime.stream_server import StreamServer

BATCH = 4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def server(clock: Clock) -> StreamServer:
    """Answers at once: `wait` is 0."""
    return StreamServer(batch=BATCH, lease=10.0, clock=clock, wait=0.0)


def item(step: int, key: int) -> bytes:
    return f"{step}/{key}".encode()


def test_a_batch_has_the_keys_of_its_step_in_order_whoever_made_them():
    stream = server(Clock())
    assert stream.get(3) is None
    first, second = stream.take("a", 1, 2), stream.take("b", 1, 9)
    assert (first, second) == ([(3, 12), (3, 13)], [(3, 14), (3, 15)])
    for step, key in [*second, *first]:
        assert stream.put(step, key, item(step, key))
        assert not stream.put(step, key, b"again"), "a key that is there already is dropped"
    assert stream.get(3) == [(key, item(3, key)) for key in range(12, 16)]
    assert stream.get(3) == [(key, item(3, key)) for key in range(12, 16)], "every rank gets the same"
    assert stream.take("a", 1, 9) == []


def test_keys_of_a_feeder_that_died_go_to_others_at_its_return_or_after_the_lease():
    clock = Clock()
    stream = server(clock)
    stream.get(0)
    assert len(stream.take("a", 1, BATCH)) == BATCH
    assert stream.take("b", 1, 1) == []
    assert stream.take("a", 2, 1) == [(0, 0)], "the next life of the feeder gave all back"
    assert stream.take("b", 1, 9) == [(0, 1), (0, 2), (0, 3)]
    clock.now = 11.0
    assert stream.take("c", 1, 9) == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert stream.put(0, 0, b"late"), "an item is an item, whoever makes it"


def test_a_step_that_is_over_takes_nothing_any_more():
    stream = server(Clock())
    for step in range(5):
        stream.get(step)
    assert not stream.put(0, 0, b"x")
    assert stream.get(0) is None, "a trainer that was restored asks for it again"
    assert stream.put(0, 0, b"x")


def test_a_thousand_producers_that_die_between_their_put_and_the_get_lose_and_repeat_nothing():
    chance, stream = random.Random(1), server(Clock())
    lives, used, step, num_deaths = {"a": 1, "b": 1}, [], 0, 0
    while num_deaths < 1000:
        found = stream.get(step)
        if found is not None:
            assert found == [(key, item(step, key)) for key, _ in found]
            used += [key for key, _ in found]
            step += 1
        feeder = chance.choice("ab")
        taken = stream.take(feeder, lives[feeder], chance.randint(1, 3))
        put = taken[: chance.randint(1, 3)]
        for number, key in put:
            assert stream.put(number, key, item(number, key)), "no other has made it meanwhile"
        lives[feeder] += 1  # it dies here; its next life gives back what it had not put
        num_deaths += bool(put)
    assert used == list(range(step * BATCH)), "each key once, in order"
    assert step > 100


@pytest.mark.parametrize("seed", range(20))
def test_every_key_is_once_in_the_final_model_whoever_dies(seed: int):
    """Fifty deaths in each run, a thousand in all: of a producer between its put and the consumer's get, of the server, of the trainer."""
    chance, clock = random.Random(seed), Clock()
    stream = server(clock)
    saved, step, used = 0, 0, {}
    lives = {"a": 1, "b": 1}
    held: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    num_deaths = 0
    while num_deaths < 50 or step < 40:
        clock.now += chance.random()
        found = stream.get(step)
        if found is not None:
            assert [key for key, _ in found] == list(range(step * BATCH, (step + 1) * BATCH))
            assert found == [(key, item(step, key)) for key, _ in found]
            used[step] = [key for key, _ in found]
            step += 1
            if chance.random() < 0.5:
                saved = step
        feeder = chance.choice("ab")
        if not held[feeder]:
            held[feeder] = stream.take(feeder, lives[feeder], chance.randint(1, 3))
        elif chance.random() < 0.8:
            number, key = held[feeder].pop()
            stream.put(number, key, item(number, key))
        fate = chance.random()
        if fate < 0.1:  # it has put some of its items, and others not
            num_deaths += 1
            lives[feeder] += 1
            held[feeder] = []
        elif fate < 0.13:
            num_deaths += 1
            stream = server(clock)
        elif fate < 0.16:  # the trainer goes back to what it saved
            num_deaths += 1
            used = {number: keys for number, keys in used.items() if number < saved}
            step = saved
    keys = [key for number in sorted(used) for key in used[number]]
    assert keys == list(range(step * BATCH)), "each key once, in order"
