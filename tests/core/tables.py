"""
Tables of the core's plain functions: what each answers to values made up from its types.

The arguments of a row follow from the function's name and the number of the row. Numbers come from few values, so that equals, zeros and the constants of
its module meet often. What the function answers, raises or changes in its arguments is folded into one number, which `tests/referees/tables.txt` keeps.
Of the thousands of rows that a table could have, it has those in `rows.txt`: `tools/mutation/rows.py` chose them, each because it notices a mistake that
those before it do not. A function without such a line has the first rows.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib
import inspect
import itertools
import pkgutil
import random
import types
import typing
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import dlrover.core
from dlrover.core.data.checkpoint_text import write_checkpoint
from dlrover.core.decision import Decision
from dlrover.core.job import Job
from dlrover.core.reactions import TABLES as TABLES_OF_REACTIONS
from dlrover.core.state import JobState
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId, NodeRank, PlatformId, Round
from tests.core.lives.stage import Apply, Stage, read_lives

TABLES = Path(__file__).parents[1] / "referees" / "tables.txt"
ROWS = Path(__file__).parent / "rows.txt"
FIRST_ROWS = 60
"""Of a function for which no rows were chosen."""
MOST_TRIES, LEAST_MADE = 20, 4
"""Of so many tries so many rows have to come about."""
DEEPEST = 6
EACH_LIFE = 8
"""So many lives give the states of one job."""
SECONDS = (0, 1, 2, 5, 30, 60, 180, 300, 600, 1800, 3600)
NUMBERS = (0, 1, 1, 2, 2, 3, 4, 5, 6, 8, 10, 64, 100, -1)
FRACTIONS = (0.0, 0.05, 0.1, 0.4, 0.5, 0.9, 0.97, 1.0, 1.0, 1.5, 2.0, 3.0, 10.0, 60.0, 180.0, 300.0, 1000.0, -1.0)
IDS = (0, 1, 1, 2, 2, 3)
TEXTS = ("", "", "a", "a", "b", "other", "1", "2.5")
LATER = (0, 0, 0, 1, 5_000_000, 61_000_000, 3_600_000_000)
"""Microseconds after what a job heard last."""
LARGEST_NUMBER = 1e6
"""Of the constants that are arguments, too: a loop over more takes too long."""


class CannotBuild(Exception):
    """A type that nothing can be made up for."""


class Maker:
    def __init__(self, chance: random.Random, numbers: Sequence[float] = NUMBERS, texts: Sequence[str] = TEXTS) -> None:
        self.chance = chance
        self.numbers = numbers
        self.texts = texts
        self.job: Job | None = None
        """One under way, for functions that look at one."""
        self.known: dict[Any, tuple[Any, ...]] = {}
        """Ids, times, texts and messages that the job has, by type."""
        self.there: dict[Any, list[Any]] = {}
        """What the job has and functions may change."""
        self.omits = chance.choice((0.05, 0.3, 0.6))
        """How often something that may be left out is."""

    def look_at(self, snapshot: bytes) -> None:
        self.job = Job.decode(snapshot)
        self.there, self.known = _there(self.job.state), known_in(snapshot)

    def make(self, type_: Any, depth: int = 0) -> Any:
        chance = self.chance
        if self.job is not None:
            state = self.job.state
            if type_ is JobState:
                return state
            if type_ is Decision:
                return Decision.begin(state, self._moment(self.job), TABLES_OF_REACTIONS)
            there = self.there.get(type_) if isinstance(type_, typing.Hashable) else None
            if there and chance.random() < 0.8:
                return chance.choice(there)
            seen = self.known.get(type_) if isinstance(type_, typing.Hashable) else None
            if seen and chance.random() < 0.5:
                return chance.choice(seen)
        if depth > DEEPEST or type_ in (JobState, Decision):
            raise CannotBuild(type_)
        if isinstance(type_, typing.NewType):
            if type_.__name__ == "Micros":
                if self.job is not None and chance.random() < 0.5:
                    return self._moment(self.job)
                seconds = chance.choice(SECONDS) if chance.random() < 0.8 else chance.choice(self.numbers)
                return round(seconds * 1_000_000) + chance.choice((0, 0, 0, 1, -1))
            if type_.__supertype__ is int:
                return chance.choice(IDS)
            return self.make(type_.__supertype__, depth)
        origin, arguments = typing.get_origin(type_), typing.get_args(type_)
        if origin is typing.Annotated:
            return self.make(arguments[0], depth)
        if origin is typing.Literal:
            return chance.choice(arguments)
        if origin in (typing.Union, types.UnionType):
            if type(None) in arguments and (chance.random() < self.omits or depth == DEEPEST):
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

    def _moment(self, job: Job) -> Micros:
        """Now, somewhat later, or when the job has something to do: in time, a microsecond too early, or late."""
        chance, deadline = self.chance, job.next_deadline()
        if chance.random() < 0.5:
            return Micros(job.now + chance.choice(LATER))
        if chance.random() < 0.3:
            return Micros(job.now + round(chance.choice(self.numbers) * 1_000_000))
        times = (deadline, deadline) if deadline is not None else self.known.get(Micros, (0,))
        return Micros(chance.choice(times) + chance.choice((-1, 0, 0, 1)))

    def _plain(self, type_: Any, depth: int) -> Any:
        chance = self.chance
        if type_ is bool:
            return chance.random() < 0.5
        if type_ is int:
            return int(chance.choice(self.numbers)) if chance.random() < 0.15 else chance.choice(NUMBERS)
        if type_ is float:
            return float(chance.choice(self.numbers)) if chance.random() < 0.3 else chance.choice(FRACTIONS)
        if type_ is str:
            return chance.choice(self.texts) if chance.random() < 0.4 else chance.choice(TEXTS)
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
        texts = _texts_of(type_.__module__)
        for _ in range(6):
            values = {}
            for name, is_required, hint in _fields_of(type_):
                if not is_required and self.chance.random() < self.omits:
                    continue
                if hint is str and texts and self.chance.random() < 0.2:
                    values[name] = self.chance.choice(texts)
                    continue
                try:
                    values[name] = self.make(hint, depth + 1)
                except (CannotBuild, ValueError, TypeError):
                    if is_required:
                        raise
            with contextlib.suppress(ValueError):
                return type_(**values)
        raise CannotBuild(type_)


def _there(state: JobState) -> dict[Any, list[Any]]:
    """What a job has and functions may change, by type; and who is there."""
    found: dict[Any, list[Any]] = {
        NodeId: list(state.nodes.live),
        NodeRank: list(state.nodes.holders),
        Incarnation: [node.incarnation for node in state.nodes.live.values()],
        Round: [state.rendezvous.round, state.rendezvous.next_round],
        PlatformId: [] if state.fleet is None else list(state.fleet.nodes),
    }
    _find_changeable(state, found)
    return found


def _find_changeable(value: Any, found: dict[Any, list[Any]]) -> None:
    if isinstance(value, msgspec.Struct):
        if not value.__struct_config__.frozen:
            found.setdefault(type(value), []).append(value)
            for name in value.__struct_fields__:
                _find_changeable(getattr(value, name), found)
    elif isinstance(value, dict):
        for each in itertools.islice(value.values(), 20):
            _find_changeable(each, found)
    elif isinstance(value, tuple | list):
        for each in value[:20]:
            _find_changeable(each, found)


@functools.cache
def kept_types() -> dict[Any, frozenset[int]]:
    """What jobs have and functions may change, and which of the snapshots have some of it."""
    found: dict[Any, set[int]] = {}
    for number, snapshot in enumerate(snapshots()):
        for type_ in _there(Job.decode(snapshot).state):
            if isinstance(type_, type):
                found.setdefault(type_, set()).add(number)
    return {type_: frozenset(numbers) for type_, numbers in found.items()}


def _fitting(call: Callable[..., Any], hints: list[Any]) -> tuple[list[int], list[int]]:
    """Snapshots that have what the function asks for; and those of them that have something of its room that most have not."""
    kept = kept_types()
    wanted = set(range(len(snapshots()))).intersection(*(numbers for type_, numbers in kept.items() if type_ in hints))
    room = ".".join(call.__module__.split(".")[:3])
    rare = [numbers for type_, numbers in kept.items() if type_.__module__.startswith(f"{room}.")]
    special = wanted.intersection(set().union(*(numbers for numbers in rare if 2 * len(numbers) < len(snapshots()))))
    fitting = sorted(wanted) or list(range(len(snapshots())))
    return fitting, sorted(special) or fitting


@functools.cache
def snapshots() -> tuple[bytes, ...]:
    """Of jobs under way: of each so many lives the end, the middle, and what was before the end."""
    found = []
    for life in read_lives()[::EACH_LIFE]:
        if isinstance(life.steps[0], Apply):
            stage, size = Stage(), len(life.steps)
            for number, step in enumerate(life.steps, start=1):
                stage.play(step)
                if number in (size // 2, size * 4 // 5, size):
                    found.append(stage.job.encode())
    return tuple(found)


@functools.cache
def known_in(snapshot: bytes) -> dict[Any, tuple[Any, ...]]:
    """Of a state: its ids, times, texts, and whatever in it no function can change, by the types of the fields."""
    found: dict[Any, dict[bytes, Any]] = {}
    state = Job.decode(snapshot).state
    for dataset in state.data.datasets.values():
        with contextlib.suppress(Exception):  # one that no job has
            _collect(write_checkpoint(dataset, most_listed=100), str, found)
    _collect(state, JobState, found)
    return {type_: tuple(values.values()) for type_, values in found.items()}


def _collect(value: Any, type_: Any, found: dict[Any, dict[bytes, Any]]) -> None:
    if value is None or isinstance(value, bool | float):
        return
    if isinstance(type_, typing.NewType) or type_ is str:
        if type_ is str and " " in value:  # a sentence
            return
        found.setdefault(type_, {})[_SAYER.encode(value)] = value
    elif isinstance(value, msgspec.Struct):
        if value.__struct_config__.frozen:
            found.setdefault(type(value), {})[_SAYER.encode(value)] = value
        for name, _, hint in _fields_of(type(value)):
            _collect(getattr(value, name), hint, found)
    else:
        origin, arguments = typing.get_origin(type_), typing.get_args(type_)
        if origin in (typing.Union, types.UnionType):
            rest = [each for each in arguments if each is not type(None)]
            if len(rest) == 1 or isinstance(value, str | int | tuple | list | dict):
                _collect(value, rest[0], found)
        elif isinstance(value, dict) and len(arguments) == 2:
            for key, each in itertools.islice(value.items(), 20):
                _collect(key, arguments[0], found)
                _collect(each, arguments[1], found)
        elif isinstance(value, tuple | list) and arguments:
            hints = arguments if origin is tuple and arguments[-1] is not ... else itertools.repeat(arguments[0])
            for each, hint in zip(value[:20], hints, strict=False):
                _collect(each, hint, found)


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
        named = {name: found[name] for name in parameters if name in found}
        self.hints = {"self": owner, **named} if owner is not None and "self" in parameters else named
        self.named = {
            name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        hints = self.hints.values()
        is_ours = any(getattr(hint, "__module__", "").startswith("dlrover.") for hint in hints)
        self.is_about_job = is_ours and any(type_ in hints for type_ in (Decision, *kept_types()))
        self.fitting, self.special = _fitting(call, list(self.hints.values())) if self.is_about_job else ([], [])
        self.numbers = (*NUMBERS, *_numbers_of(call))
        own = (each for each in inspect.unwrap(call).__code__.co_consts if type(each) is str and _is_word(each))
        self.texts = (*TEXTS, *_texts_of(call.__module__), *own)


def _numbers_of(call: Callable[..., Any]) -> Iterator[float]:
    """The constants of the function and of its module, and their neighbours."""
    module = vars(importlib.import_module(call.__module__))
    named = [value for name, value in module.items() if name.lstrip("_").isupper()]
    own = inspect.unwrap(call).__code__.co_consts
    found = {value: None for value in (*named, *own) if type(value) in (int, float) and abs(value) < LARGEST_NUMBER}
    for value in found:
        yield from (value, value + 1, value - 1) if type(value) is int else (value,)


@functools.cache
def _texts_of(module: str) -> tuple[str, ...]:
    """Words that a module knows: its constants, and the keys of its tables."""
    found: dict[str, None] = {}
    for name, value in vars(importlib.import_module(module)).items():
        if name.lstrip("_").isupper():
            parts = value if isinstance(value, tuple | dict) else (value,)
            found.update((part, None) for part in parts if type(part) is str and _is_word(part))
    return tuple(found)


def _is_word(text: str) -> bool:
    return 0 < len(text) < 60 and not any(sign in text for sign in " \n{<")


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
    maker, num_made = Maker(random.Random(1)), 0
    for number in range(MOST_TRIES):
        try:
            if function.is_about_job:
                maker.look_at(snapshots()[function.fitting[number % len(function.fitting)]])
            for hint in hints.values():
                maker.make(hint)
            num_made += 1
        except (CannotBuild, ValueError, TypeError):
            continue
        if num_made == LEAST_MADE:
            return True
    return False


def read_rows() -> dict[str, tuple[int, ...]]:
    lines = (line.split() for line in ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {name: tuple(map(int, rows)) for name, *rows in lines}


CHOSEN = read_rows()


def table_of(name: str, function: Function) -> str:
    """One number for all that it answers."""
    found = hashlib.blake2b(digest_size=8)
    for row in CHOSEN.get(name, range(FIRST_ROWS)):
        found.update(answer(name, function, row) or b"")
    return found.hexdigest()


def answer(name: str, function: Function, row: int) -> bytes | None:
    """With the arguments as they are then: it may have changed them. None: nothing could be made up."""
    chance = random.Random(f"{name} {row}")
    maker = Maker(chance, function.numbers, function.texts)
    try:
        if function.is_about_job:
            numbers = function.special if chance.random() < 0.4 else function.fitting
            maker.look_at(snapshots()[chance.choice(numbers)])
        made = {key: maker.make(hint) for key, hint in function.hints.items()}
    except (CannotBuild, ValueError, TypeError):
        return None
    plain = [value for key, value in made.items() if key not in function.named]
    named = {key: value for key, value in made.items() if key in function.named}
    try:
        answer = function.call(*plain, **named)
        if inspect.isgenerator(answer):
            answer = list(answer)
    except Exception as error:  # what no job has: another mistake would be another one
        answer = type(error).__name__
    changed = [_said_by(value) if isinstance(value, Decision) else value for value in made.values()]
    return _SAYER.encode((answer, changed))


def _said_by(decision: Decision) -> tuple[object, ...]:
    return decision.state, decision.effects, decision.verdicts, decision.is_unsettled


def tables() -> str:
    return "".join(f"{name} {table_of(name, function)}\n" for name, function in functions())


_SAYER = msgspec.msgpack.Encoder(enc_hook=lambda value: vars(value) if hasattr(value, "__dict__") else str(type(value)))
