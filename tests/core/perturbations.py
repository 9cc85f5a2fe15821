"""
Messages a little beside those that were sent: each field at its edges, and each message at another time.

A command that arrives is well formed, and that is all that is known of it. So the job refuses with a code, or takes it; it never fails. The edges are
those of the handler's own limits, and what people get wrong: nothing, one too many, the other choice, the same twice.
"""

from __future__ import annotations

import enum
import random
import sys

import msgspec

from dlrover.core.job import HANDLERS
from dlrover.protocol.messages.job import Command

LATER = (1, 1_000_000, 5_000_000, 30_000_000, 61_000_000, 601_000_000)
"""Microseconds after which the neighbour of a command may come instead."""
LARGEST = 5_000
MOST_ITEMS = 300
"""Limits up to which texts, numbers and tuples are made up that reach them."""


def around(command: Command, chance: random.Random, count: int) -> list[Command]:
    """Up to so many neighbours of a command, all of them well formed."""
    limits = _limits(command)
    found = []
    for _ in range(count):
        try:
            neighbour = _neighbour(command, limits, chance)
            found.append(_DECODER.decode(msgspec.msgpack.encode(neighbour)))
        except (ValueError, TypeError, OverflowError):  # no message: it never reaches a job
            continue
    return found


def _limits(command: Command) -> list[int]:
    """Those of the module that has the handler. What is as large as a large limit is left out: it takes as long."""
    module = sys.modules[HANDLERS[type(command)].__module__]
    found = [
        value for name, value in vars(module).items() if name.lstrip("_").isupper() and type(value) in (int, float)
    ]
    limits = {int(value) for value in found if 1 < value < 2**62}
    return sorted({limit + by for limit in limits for by in (-1, 0, 1) if limit <= LARGEST or by == 1})


def _neighbour(value: object, limits: list[int], chance: random.Random) -> object:
    """One field of it, or of what is in it, is another."""
    match value:
        case msgspec.Struct() if value.__struct_fields__:
            name = chance.choice(value.__struct_fields__)
            return msgspec.structs.replace(value, **{name: _neighbour(getattr(value, name), limits, chance)})
        case enum.Enum():
            return chance.choice(list(type(value)))
        case bool():
            return not value
        case int():
            return chance.choice([-1, 0, 1, 2, value - 1, value + 1, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, *limits])
        case float():
            edges = (0.0, -1.0, value + 1.0, value * 2, 1e-9, 1e9, 1e18, float("inf"), float("nan"))
            return chance.choice([*edges, *map(float, limits)])
        case str():
            longest = [limit for limit in limits if limit <= LARGEST]
            return chance.choice(["", f"{value}x", "other", *("x" * limit for limit in longest)])
        case bytes():
            return chance.choice([b"", value + b"x"])
        case tuple() | list() if value:
            short = [limit for limit in limits if limit <= MOST_ITEMS]
            index = chance.randrange(len(value))
            other = [*value[:index], _neighbour(value[index], limits, chance), *value[index + 1 :]]
            many = [value[0]] * chance.choice(short) if short else []
            return type(value)(chance.choice([(), [*value, *value], value[::-1], value[1:], other, other, other, many]))
        case dict() if value:
            key = chance.choice(list(value))
            less = {other: each for other, each in value.items() if other != key}
            return chance.choice([{}, less, {**value, key: _neighbour(value[key], limits, chance)}])
        case None:
            return chance.choice([0, 1, -1, "x"])
    return value


_DECODER = msgspec.msgpack.Decoder(Command)
