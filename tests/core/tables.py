"""
Tables of the core's plain functions: what each answers to values made up from its types.

A function that only computes is asked a few hundred times. Numbers come from few values, so that equals, zeros and the constants of its module meet often.
What it answers, raises or changes in its arguments is folded into one number, which `tests/referees/tables.txt` keeps.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import inspect
import pkgutil
import random
import types
import typing
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import dlrover.core

TABLES = Path(__file__).parents[1] / "referees" / "tables.txt"
NUM_CALLS = 150
DEEPEST = 6
SECONDS = (0, 1, 2, 5, 30, 60, 180, 300, 600, 1800, 3600)
NUMBERS = (0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 64, 100, -1)
FRACTIONS = (0.0, 0.05, 0.1, 0.4, 0.5, 0.9, 0.97, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0, 60.0, 180.0, 300.0, 1000.0, -1.0)
TEXTS = ("", "a", "a", "b", "c", "other")


class CannotBuild(Exception):
    """A type that nothing can be made up for."""


class Maker:
    def __init__(self, chance: random.Random, numbers: Sequence[float]) -> None:
        self.chance = chance
        self.numbers = numbers

    def make(self, type_: Any, depth: int = 0) -> Any:
        chance = self.chance
        if depth > DEEPEST:
            raise CannotBuild(type_)
        if isinstance(type_, typing.NewType):
            if type_.__name__ == "Micros":
                return chance.choice(SECONDS) * 1_000_000 + chance.choice((0, 0, 0, 1, -1))
            return self.make(type_.__supertype__, depth)
        origin, arguments = typing.get_origin(type_), typing.get_args(type_)
        if origin is typing.Annotated:
            return self.make(arguments[0], depth)
        if origin is typing.Literal:
            return chance.choice(arguments)
        if origin in (typing.Union, types.UnionType):
            if type(None) in arguments and (chance.random() < 0.3 or depth == DEEPEST):
                return None
            return self.make(chance.choice([each for each in arguments if each is not type(None)]), depth)
        if origin in (list, Sequence, Iterable, Collection, Container) or (origin is tuple and arguments[-1] is ...):
            size = chance.choice((0, 1, 2, 2, 3, 4, 5)) if depth < 3 else chance.choice((0, 1, 2))
            found = [self.make(arguments[0], depth + 1) for _ in range(size)]
            return tuple(found) if origin is tuple else found
        if origin is tuple:
            return tuple(self.make(each, depth + 1) for each in arguments)
        if origin in (dict, Mapping):
            size = chance.choice((0, 1, 2, 3, 4)) if depth < 3 else chance.choice((0, 1, 2))
            keys = [self.make(arguments[0], depth + 1) for _ in range(size)]
            return {key: self.make(arguments[1], depth + 1) for key in keys}
        return self._plain(type_, depth)

    def _plain(self, type_: Any, depth: int) -> Any:
        chance = self.chance
        if type_ is bool:
            return chance.random() < 0.5
        if type_ is int:
            return int(chance.choice(self.numbers)) if chance.random() < 0.15 else chance.choice(NUMBERS)
        if type_ is float:
            return float(chance.choice(self.numbers)) if chance.random() < 0.3 else chance.choice(FRACTIONS)
        if type_ is str:
            return chance.choice(TEXTS)
        if type_ is bytes:
            return chance.choice(TEXTS).encode()
        if type_ is object:
            return chance.choice((*NUMBERS, *TEXTS))
        if isinstance(type_, type) and issubclass(type_, enum.Enum):
            return chance.choice(list(type_))
        if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
            values = {}
            for name, is_required, hint in _fields_of(type_):
                if not is_required and chance.random() < (0.25 if depth < 2 else 0.5):
                    continue
                try:
                    values[name] = self.make(hint, depth + 1)
                except (CannotBuild, ValueError, TypeError):
                    if is_required:
                        raise
            return type_(**values)
        if isinstance(type_, type) and issubclass(type_, tuple) and hasattr(type_, "_fields"):
            return type_(*(self.make(hint, depth + 1) for _, _, hint in _fields_of(type_)))
        raise CannotBuild(type_)


@functools.cache
def _fields_of(type_: type) -> tuple[tuple[str, bool, Any], ...]:
    """Name, whether it has no default, and type."""
    hints = typing.get_type_hints(type_)
    if issubclass(type_, msgspec.Struct):
        return tuple((field.name, field.required, hints[field.name]) for field in msgspec.structs.fields(type_))
    return tuple((name, True, hints[name]) for name in hints)


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public ones of the core for whose arguments something can be made up, by their names."""
    for module in sorted(each.name for each in pkgutil.walk_packages(dlrover.core.__path__, "dlrover.core.")):
        for name, function in vars(importlib.import_module(module)).items():
            is_own = inspect.isfunction(function) and function.__module__ == module and not name.startswith("_")
            if is_own and _is_makeable(function):
                yield f"{module.removeprefix('dlrover.core.')}.{name}", function


def _is_makeable(function: Callable[..., Any]) -> bool:
    hints = _hints(function)
    forbidden = ("JobState", "Decision", "Watch", "Picture", "Path")
    if not hints or any(each in str(hint) for hint in hints.values() for each in forbidden):
        return False
    maker, num_made = Maker(random.Random(1), (1,)), 0
    for _ in range(20):
        try:
            for hint in hints.values():
                maker.make(hint)
            num_made += 1
        except (CannotBuild, ValueError, TypeError):
            continue
    return num_made > 3


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    found = typing.get_type_hints(function, include_extras=True)
    return {name: found[name] for name in inspect.signature(function).parameters if name in found}


def table_of(name: str, function: Callable[..., Any]) -> str:
    """One number for all that it answers."""
    found = hashlib.blake2b(digest_size=8)
    for answer in answers(name, function):
        found.update(answer)
    return found.hexdigest()


def answers(name: str, function: Callable[..., Any]) -> Iterator[bytes]:
    constants = [
        value
        for constant, value in vars(importlib.import_module(function.__module__)).items()
        if constant.lstrip("_").isupper() and type(value) in (int, float) and abs(value) < 1e6
    ]
    chance = random.Random(name)
    maker = Maker(chance, constants or NUMBERS)
    hints = _hints(function)
    parameters = inspect.signature(function).parameters
    for _ in range(NUM_CALLS):
        try:
            made = {key: maker.make(hint) for key, hint in hints.items()}
        except (CannotBuild, ValueError, TypeError):
            continue
        plain = [value for key, value in made.items() if parameters[key].kind is not inspect.Parameter.KEYWORD_ONLY]
        named = {key: value for key, value in made.items() if parameters[key].kind is inspect.Parameter.KEYWORD_ONLY}
        try:
            answer = function(*plain, **named)
            if inspect.isgenerator(answer):
                answer = list(answer)
        except Exception as error:  # what no job has: another mistake would be another one
            answer = type(error).__name__
        yield _SAYER.encode((answer, list(made.values())))


def tables() -> str:
    return "".join(f"{name} {table_of(name, function)}\n" for name, function in functions())


_SAYER = msgspec.msgpack.Encoder(enc_hook=lambda value: vars(value) if hasattr(value, "__dict__") else str(type(value)))
