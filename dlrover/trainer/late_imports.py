"""
Do something to a module as soon as a script imports it, and never import it ourselves.

A worker that does not need torch shall not pay for it, and one that does shall find it hooked from its first line on.
"""

from __future__ import annotations

import importlib.abc
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dlrover.host.edges import contained

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """At once if it is imported already. What the callback raises becomes a warning: an import of the user's never fails by it."""
    module = sys.modules.get(name)
    if module is not None:
        _call(callback, module)
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.waiting.setdefault(name, []).append(callback)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """In place of the real one for the time of the import; asking where a module could be found does not count as one."""

    def __init__(self, real: Any, finder: _Finder) -> None:
        self._real = real
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        for callback in self._finder.waiting.pop(module.__name__, []):
            _call(callback, module)


def _call(callback: Callback, module: ModuleType) -> None:
    def warn(error: Exception) -> None:
        text = f"dlrover cannot observe {module.__name__} ({type(error).__name__}: {error}). Training continues."
        warnings.warn(text, RuntimeWarning, stacklevel=4)  # of who calls `_call`

    with contained(warn):  # the program of the user
        callback(module)
