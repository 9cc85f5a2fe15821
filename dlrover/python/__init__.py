"""
The import paths of the original DLRover that users have in their scripts.

One finder, one table (`aliases`): an old module is made on demand from the names that it had, each taken from where it lives
now, at first use. Importing this package (Python does it for every path below, and the small packages below `dlrover.trainer` that have
nothing of their own do it) puts the finder in place. A path that is not in the table does not exist; a name whose part of the
software is not there yet says so.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from dlrover.python.aliases import ALIASES, MISSING

_MODULES = {*ALIASES, *MISSING}
_PACKAGES = {
    ".".join(parts[:end]) for module in _MODULES if (parts := module.split(".")) for end in range(1, len(parts))
}


class _OldModule(ModuleType):
    def __getattr__(self, name: str) -> object:
        _refuse_if_missing(self.__name__, name)
        target = ALIASES.get(self.__name__, {}).get(name)
        if target is None:
            raise AttributeError(f"{self.__name__} has no {name!r} in this implementation of DLRover")
        module, _, attribute = target.partition(":")
        value: object = getattr(importlib.import_module(module), attribute)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *ALIASES.get(self.__name__, {})})


class _OldModuleLoader(InspectLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _OldModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__all__"] = sorted(ALIASES.get(module.__name__, ()))

    def get_code(self, fullname: str) -> CodeType | None:
        """For `python -m`."""
        _refuse_if_missing(fullname, "main")
        target = ALIASES.get(fullname, {}).get("main")
        if target is None:
            raise ImportError(f"{fullname} cannot be run", name=fullname)
        module, _, attribute = target.partition(":")
        return compile(f"import sys\nfrom {module} import {attribute}\nsys.exit({attribute}())\n", fullname, "exec")

    def get_source(self, fullname: str) -> str | None:
        return None

    def is_package(self, fullname: str) -> bool:
        return fullname in _PACKAGES


def _refuse_if_missing(module: str, name: str) -> None:
    missing = MISSING.get(module, {}).get(name)
    if missing is not None:
        raise ImportError(
            f"{module}.{name} is not available in this version of DLRover: it belongs to {missing}. Leave out "
            "the code that uses it, or run this script with the original DLRover.",
            name=module,
        )


class OldPathFinder(MetaPathFinder):
    """Knows the modules of the table and the packages above them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_package = fullname in _PACKAGES
        if not is_package and fullname not in _MODULES:
            return None
        return ModuleSpec(fullname, _OldModuleLoader(), origin="alias table", is_package=is_package)


if not any(isinstance(finder, OldPathFinder) for finder in sys.meta_path):
    sys.meta_path.append(OldPathFinder())
