"""
Every number, name and table that the core decides by: what its modules and classes, and those of `agreed`, define, and what their
functions take if nothing is given.

A journal is replayed with the constants of the version that reads it. Another limit or default can lead the same commands
elsewhere, so a change here is a change of the decisions: ask whether `DECISION_VERSION` has to grow, then record it.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType

import msgspec

import dlrover.agreed
import dlrover.core

CONSTANTS = Path(__file__).parent / "constants.txt"


def constants() -> str:
    names = [
        found.name
        for room in (dlrover.agreed, dlrover.core)
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
        if not found.ispkg
    ]
    modules = [importlib.import_module(name) for name in names]
    return "".join(f"{line}\n" for module in modules for line in _defined(module))


def _defined(module: ModuleType) -> Iterator[str]:
    for name in _assigned(module):
        yield f"{module.__name__}:{name} = {_shown(getattr(module, name))}"
    for name, value in vars(module).items():
        if getattr(value, "__module__", "") != module.__name__:
            continue
        if inspect.isclass(value):
            yield from (f"{module.__name__}:{line}" for line in _of_class(value))
        elif isinstance(value, FunctionType):
            yield from (f"{module.__name__}:{name}({line})" for line in _parameters(value))


def _assigned(module: ModuleType) -> Iterator[str]:
    """Not what it imports from where it is defined."""
    for statement in ast.parse(inspect.getsource(module)).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        for target in targets:
            for each in ast.walk(target) if isinstance(target, ast.expr) else ():
                if isinstance(each, ast.Name) and each.id != "__all__":
                    yield each.id


def _of_class(class_: type) -> Iterator[str]:
    if issubclass(class_, enum.Enum):
        yield from (f"{class_.__name__}.{member.name} = {member.value!r}" for member in class_)
    elif issubclass(class_, msgspec.Struct):
        for field in msgspec.structs.fields(class_):
            if field.default is not msgspec.NODEFAULT:
                yield f"{class_.__name__}.{field.name} = {_shown(field.default)}"
            elif field.default_factory is not msgspec.NODEFAULT:
                yield f"{class_.__name__}.{field.name} = {_shown(field.default_factory())}"
    for name, member in vars(class_).items():
        function = getattr(member, "__func__", member)  # of a class method
        if isinstance(function, FunctionType) and function.__module__ == class_.__module__:
            yield from (f"{class_.__name__}.{name}({line})" for line in _parameters(function))
        elif (
            isinstance(member, int | float | str | tuple)
            and not name.startswith("_")
            and not issubclass(class_, enum.Enum)
        ):
            yield f"{class_.__name__}.{name} = {_shown(member)}"


def _parameters(function: FunctionType) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty:
            yield f"{parameter.name}={_shown(parameter.default)}"


def _shown(value: object) -> str:
    """Two values that decide differently look different; sentences are for people and only said to be there."""
    match value:
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case str() if " " in value:
            return "a sentence"
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case re.Pattern():
            return f"/{value.pattern}/ {value.flags}"
        case dict():
            return "{" + ", ".join(f"{_shown(key)}: {_shown(each)}" for key, each in value.items()) + "}"
        case tuple() | list():
            return "(" + ", ".join(_shown(each) for each in value) + ")"
        case frozenset() | set():
            return "{" + ", ".join(sorted(_shown(each) for each in value)) + "}"
        case msgspec.Struct():
            fields = ((name, getattr(value, name)) for name in value.__struct_fields__)
            return f"{type(value).__name__}({', '.join(f'{name}={_shown(each)}' for name, each in fields)})"
        case type() | FunctionType():
            return f"{value.__module__}.{value.__qualname__}"
        case _:
            return f"a {type(value).__name__}"
