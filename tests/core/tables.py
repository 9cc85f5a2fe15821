"""
Tables of the core's plain functions: what each answers to values made up from its types.

A function that only computes is asked a few hundred times. Numbers come from few values, so that equals, zeros and the constants of its module meet often.
What it answers, raises or changes in its arguments is folded into one number, which `tests/referees/tables.txt` keeps.
"""

from __future__ import annotations

import contextlib
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
from dlrover.core.check.cycle import CheckCycle
from dlrover.core.check.state import NodeCheck
from dlrover.core.data.dataset import Dataset
from dlrover.core.decision import Decision
from dlrover.core.fleet.fleet import Fleet, FleetNode
from dlrover.core.job import Job
from dlrover.core.membership.nodes import Node
from dlrover.core.reactions import TABLES as TABLES_OF_REACTIONS
from dlrover.core.scaling.state import Scaling
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import Micros, NodeId, NodeRank, PlatformId, Round
from tests.core.lives.stage import Apply, Stage, read_lives

TABLES = Path(__file__).parents[1] / "referees" / "tables.txt"
NUM_CALLS = 100
DEEPEST = 6
EACH_LIFE = 12
"""So many lives give the state of one job."""
SECONDS = (0, 1, 2, 5, 30, 60, 180, 300, 600, 1800, 3600)
NUMBERS = (0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 64, 100, -1)
FRACTIONS = (0.0, 0.05, 0.1, 0.4, 0.5, 0.9, 0.97, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0, 60.0, 180.0, 300.0, 1000.0, -1.0)
IDS = (0, 1, 1, 2, 2, 3)
TEXTS = ("", "", "a", "a", "b", "other")


class CannotBuild(Exception):
    """A type that nothing can be made up for."""


class Maker:
    def __init__(self, chance: random.Random, numbers: Sequence[float]) -> None:
        self.chance = chance
        self.numbers = numbers
        self.state: JobState | None = None
        """That of a job under way, for functions that look at one."""

    def make(self, type_: Any, depth: int = 0) -> Any:
        chance = self.chance
        if self.state is not None:
            if type_ is JobState:
                return self.state
            if type_ is Decision:
                later = chance.choice((0, 0, 1, 5_000_000, 61_000_000, 3_600_000_000))
                return Decision.begin(self.state, Micros(self.state.now + later), TABLES_OF_REACTIONS)
            there = _there(self.state, type_)
            if there and chance.random() < 0.8:
                return chance.choice(there)
        if depth > DEEPEST or type_ in (JobState, Decision):
            raise CannotBuild(type_)
        if isinstance(type_, typing.NewType):
            if type_.__name__ == "Micros":
                return chance.choice(SECONDS) * 1_000_000 + chance.choice((0, 0, 0, 1, -1))
            if type_.__supertype__ is int:
                return chance.choice(IDS)
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
            size = chance.choice((0, 1, 2, 3, 4, 8)) if depth < 4 else chance.choice((0, 1, 2, 4))
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
            return self._struct(type_, depth)
        if isinstance(type_, type) and issubclass(type_, tuple) and hasattr(type_, "_fields"):
            return type_(*(self.make(hint, depth + 1) for _, _, hint in _fields_of(type_)))
        raise CannotBuild(type_)

    def _struct(self, type_: type, depth: int) -> Any:
        """One that its own checks let through: a few are tried."""
        for _ in range(6):
            values = {}
            for name, is_required, hint in _fields_of(type_):
                if not is_required and self.chance.random() < (0.25 if depth < 2 else 0.5):
                    continue
                try:
                    values[name] = self.make(hint, depth + 1)
                except (CannotBuild, ValueError, TypeError):
                    if is_required:
                        raise
            with contextlib.suppress(ValueError):
                return type_(**values)
        raise CannotBuild(type_)


def _there(state: JobState, type_: Any) -> list[Any]:
    """Those of a kind that a job has."""
    fleet = state.fleet
    found: dict[Any, Iterable[Any]] = {
        Node: state.nodes.live.values(),
        NodeId: state.nodes.live,
        NodeRank: state.nodes.holders,
        Round: (state.rendezvous.round, state.rendezvous.next_round),
        Dataset: state.data.datasets.values(),
        Scaling: (state.scaling,),
        NodeCheck: (state.check,),
        CheckCycle: () if state.check.cycle is None else (state.check.cycle,),
        Fleet: () if fleet is None else (fleet,),
        FleetNode: () if fleet is None else fleet.nodes.values(),
        PlatformId: () if fleet is None else fleet.nodes,
    }
    try:
        return list(found.get(type_, ()))
    except TypeError:  # a type that is no key
        return []


@functools.cache
def snapshots() -> tuple[bytes, ...]:
    """Of jobs under way: of each so many lives the end and the middle."""
    found = []
    for life in read_lives()[::EACH_LIFE]:
        if isinstance(life.steps[0], Apply):
            stage = Stage()
            for number, step in enumerate(life.steps):
                stage.play(step)
                if number == len(life.steps) // 2:
                    found.append(stage.job.encode())
            found.append(stage.job.encode())
    return tuple(found)


@functools.cache
def _fields_of(type_: type) -> tuple[tuple[str, bool, Any], ...]:
    """Name, whether it has no default, and type."""
    hints = typing.get_type_hints(type_)
    if issubclass(type_, msgspec.Struct):
        return tuple((field.name, field.required, hints[field.name]) for field in msgspec.structs.fields(type_))
    return tuple((name, True, hints[name]) for name in hints)


class Function:
    """With the types of its arguments; of a method the object is the first."""

    def __init__(self, call: Callable[..., Any], owner: type | None = None) -> None:
        self.call = call
        self.is_method = owner is not None
        found = typing.get_type_hints(call, include_extras=True)
        parameters = inspect.signature(call).parameters
        hints = {name: found[name] for name in parameters if name in found}
        self.hints = {"self": owner, **hints} if owner is not None and "self" in parameters else hints
        self.named = {
            name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        self.is_about_job = any(hint in (JobState, Decision) for hint in self.hints.values())
        module = vars(importlib.import_module(call.__module__))
        self.constants = [
            value
            for constant, value in module.items()
            if constant.lstrip("_").isupper() and type(value) in (int, float) and abs(value) < 1e6
        ]


def functions() -> Iterator[tuple[str, Function]]:
    """Those of the core, and methods of its plain data, for whose arguments something can be made up, by their names."""
    for module in sorted(each.name for each in pkgutil.walk_packages(dlrover.core.__path__, "dlrover.core.")):
        prefix = module.removeprefix("dlrover.core.")
        for name, found in vars(importlib.import_module(module)).items():
            if getattr(found, "__module__", "") != module:
                continue
            if inspect.isfunction(found) and _is_makeable(function := Function(found)):
                yield f"{prefix}.{name}", function
            elif isinstance(found, type) and issubclass(found, msgspec.Struct) and _has_values(found):
                for method, function in _methods(found):
                    if _is_makeable(function):
                        yield f"{prefix}.{name}.{method}", function


def _methods(class_: type) -> Iterator[tuple[str, Function]]:
    for name, found in vars(class_).items():
        function = found.fget if isinstance(found, property) else found
        if inspect.isfunction(function) and not name.startswith("__"):
            yield name, Function(function, class_)


def _has_values(class_: type) -> bool:
    try:
        return bool(_fields_of(class_))
    except (TypeError, NameError):
        return False


def _is_makeable(function: Function) -> bool:
    hints = function.hints
    forbidden = ("Watch", "Picture", "Path", "ProgressLedger")
    if not hints or any(each in str(hint) for hint in hints.values() for each in forbidden):
        return False
    maker, num_made = Maker(random.Random(1), (1,)), 0
    for number in range(20):
        try:
            if function.is_about_job:
                maker.state = Job.decode(snapshots()[number]).state
            for hint in hints.values():
                maker.make(hint)
            num_made += 1
        except (CannotBuild, ValueError, TypeError):
            continue
    return num_made > 3


def table_of(name: str, function: Function) -> str:
    """One number for all that it answers."""
    found = hashlib.blake2b(digest_size=8)
    for answer in answers(name, function):
        found.update(answer)
    return found.hexdigest()


def answers(name: str, function: Function) -> Iterator[bytes]:
    """Each with the arguments as they are then: it may have changed them."""
    maker = Maker(random.Random(name), function.constants or NUMBERS)
    for _ in range(NUM_CALLS // 2 if function.is_method or function.is_about_job else NUM_CALLS):
        try:
            if function.is_about_job:
                maker.state = Job.decode(maker.chance.choice(snapshots())).state
            made = {key: maker.make(hint) for key, hint in function.hints.items()}
        except (CannotBuild, ValueError, TypeError):
            continue
        plain = [value for key, value in made.items() if key not in function.named]
        named = {key: value for key, value in made.items() if key in function.named}
        try:
            answer = function.call(*plain, **named)
            if inspect.isgenerator(answer):
                answer = list(answer)
        except Exception as error:  # what no job has: another mistake would be another one
            answer = type(error).__name__
        changed = [_said_by(value) if isinstance(value, Decision) else value for value in made.values()]
        yield _SAYER.encode((answer, changed))


def _said_by(decision: Decision) -> tuple[object, ...]:
    return decision.state, decision.effects, decision.verdicts, decision.is_unsettled


def tables() -> str:
    return "".join(f"{name} {table_of(name, function)}\n" for name, function in functions())


_SAYER = msgspec.msgpack.Encoder(enc_hook=lambda value: vars(value) if hasattr(value, "__dict__") else str(type(value)))
