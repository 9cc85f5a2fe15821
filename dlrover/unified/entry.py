"""
What an instance runs: a function or class by its dotted name, or a script with arguments. Read and looked up before anything starts.
"""

from __future__ import annotations

import ast
import enum
import importlib.machinery
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence

from msgspec import Struct

from dlrover.protocol.errors import ConfigError


class EntryPointKind(enum.StrEnum):
    NAME = "name"
    """`package.module.Class` or `package.module.function`."""
    COMMAND = "command"
    """`script.py --and arguments`."""


class EntryPoint(Struct, frozen=True):
    kind: EntryPointKind
    text: str

    @property
    def module(self) -> str:
        return self.text.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        return self.text.rpartition(".")[2]

    @property
    def words(self) -> list[str]:
        """Of a command: the script and its arguments."""
        return shlex.split(self.text)


def read_entry(text: str) -> EntryPoint:
    """Raises `ConfigError`."""
    text = text.strip()
    words = text.split()
    first = words[0] if words else ""
    if first.endswith(".py") or "/" in text:
        return EntryPoint(EntryPointKind.COMMAND, text)
    dotted = text.replace("::", ".")
    parts = dotted.split(".")
    if len(parts) >= 2 and all(part.isidentifier() for part in parts):
        return EntryPoint(EntryPointKind.NAME, dotted)
    raise ConfigError(
        f"Entry point {text!r}: give a dotted name such as package.module.Class, or a script such as train.py --lr 0.1."
    )


def check_entry(entry: EntryPoint, role: str, *, working_dir: str = "") -> None:
    """Look the entry point up without running any of it. Raises `ConfigError` if it is certainly missing."""
    if entry.kind is EntryPointKind.COMMAND:
        path = entry.words[0]
        if not os.path.exists(os.path.join(working_dir, path)):
            raise ConfigError(
                f"Role {role}: the script {path} does not exist (looked from {working_dir or os.getcwd()})."
            )
        return
    source = _find_source(entry.module, [working_dir or os.getcwd(), *sys.path])
    if source is None:
        raise ConfigError(
            f"Role {role}: the module {entry.module} of the entry point {entry.text} cannot be found here. "
            "Check its name, or give the directory with your code as working_dir."
        )
    if source and not _defines(source, entry.attribute):
        raise ConfigError(
            f"Role {role}: the entry point {entry.text} names {entry.attribute}, but {source} does not define it."
        )


def _find_source(module: str, path: Sequence[str]) -> str | None:
    """The file; empty: it has no source. None: there is no such module. Imports nothing."""
    locations: Sequence[str] | None = path
    spec = None
    parts = module.split(".")
    for place, part in enumerate(parts):
        name = ".".join(parts[: place + 1])
        spec = importlib.machinery.PathFinder.find_spec(name, locations)
        if spec is None and place == 0 and (part in sys.builtin_module_names or name in sys.modules):
            spec = importlib.util.find_spec(name)  # an editable install has a finder of its own
        if spec is None:
            return None
        locations = spec.submodule_search_locations
        if locations is None and place < len(parts) - 1:
            return None
    assert spec is not None
    is_source = spec.origin is not None and spec.origin.endswith(".py")
    return spec.origin if is_source else ""


def _defines(path: str, name: str) -> bool:
    """Whether the module has the name at its top, as far as its text tells."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    has_star = any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree))
    if has_star or any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return True
    return any(name in _names_of(node) for node in ast.walk(tree))


def _names_of(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
    return []
