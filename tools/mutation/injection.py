"""
Puts a mutant into a process that has the real module loaded already.

A mistake in a function replaces the code of the living function: whoever imported it has the mutant. A mistake in the body
of a module or of a class, or in a function that only such a body calls, is in effect only when the module is executed, so
everything of ours is imported again.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from tools.mutation.mutants import Mutant

Place = tuple[str, str, int]
"""File, qualified name and first line of a definition."""


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def living_functions(root: Path) -> dict[Place, list[FunctionType]]:
    """All functions of ours, by their definition: wherever they are held, and whatever decorates them."""
    found: dict[Place, list[FunctionType]] = {}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{root}/"):
            code = each.__code__
            found.setdefault((code.co_filename, code.co_qualname, code.co_firstlineno), []).append(each)
    return found


def replace_function(mutant: Mutant, root: Path, living: dict[Place, list[FunctionType]]) -> None:
    code = next(
        each
        for each in codes_in(mutant.compile(root))
        if each.co_qualname == mutant.function and each.co_firstlineno == mutant.first_line
    )
    for function in living[str(root / mutant.path), mutant.function, mutant.first_line]:
        function.__code__ = code


def codes_in(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from codes_in(each)


def import_anew(mutant: Mutant, root: Path, packages: tuple[str, ...]) -> None:
    """Forgets all modules of these packages; the next import of the mutant's module finds the mutant."""
    forget(packages)
    sys.meta_path.insert(0, _MutantFinder(mutant, root))


def forget(packages: tuple[str, ...]) -> None:
    """The next import of a module of these packages executes it again."""
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


class _MutantFinder(MetaPathFinder):
    def __init__(self, mutant: Mutant, root: Path) -> None:
        self.file = root / mutant.path
        self.name = module_name(mutant.path)
        self.code = mutant.compile(root)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        loader = _MutantLoader(fullname, str(self.file))
        loader.mutant = self.code
        return importlib.util.spec_from_file_location(fullname, self.file, loader=loader)


class _MutantLoader(SourceFileLoader):
    mutant: CodeType

    def get_code(self, fullname: str) -> CodeType:
        return self.mutant
