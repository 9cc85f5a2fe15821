"""Modules, classes and versions by name, as scripts of the original look them up."""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Importer:
    """Each gives what was imported and whether that worked."""

    @staticmethod
    def import_module(module_name: str, msg: str | None = None, raise_if_error: bool = True) -> tuple[Any, bool]:
        return _imported(lambda: importlib.import_module(module_name), msg, raise_if_error)

    @staticmethod
    def import_module_content(
        content_with_module: str, msg: str | None = None, raise_if_error: bool = True
    ) -> tuple[Any, bool]:
        """`module.Name`"""
        module, _, name = content_with_module.rpartition(".")
        return _imported(lambda: getattr(importlib.import_module(module), name), msg, raise_if_error)

    @staticmethod
    def import_first_available_module_content(
        import_module_content_names: Sequence[str], msg: str | None = None, raise_if_error: bool = True
    ) -> tuple[Any, bool]:
        for name in import_module_content_names:
            found, is_there = Importer.import_module_content(name, msg, raise_if_error)
            if is_there:
                return found, True
        log.warning("none of %s can be imported", import_module_content_names)
        return None, False


def get_class(module_class: str) -> Any:
    return Importer.import_module_content(module_class)[0]


def import_callable(module_callable: str) -> Callable[..., Any]:
    """Raises ValueError for what cannot be imported or called."""
    try:
        found = get_class(module_callable)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{module_callable!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"{module_callable} is not callable; name a function or a class")
    return found  # type: ignore[no-any-return]


def new_instance(module_class: str, *arguments: Any, **named: Any) -> Any:
    return import_callable(module_class)(*arguments, **named)


def _imported(load: Callable[[], Any], msg: str | None, raise_if_error: bool) -> tuple[Any, bool]:
    try:
        return load(), True
    except Exception as error:  # an import runs the user's code
        if raise_if_error:
            raise
        log.warning("%s", msg or error)
        return None, False


def get_dlrover_version() -> str:
    return get_installed_version("dlrover") or "Unknown"


def get_installed_version(package_name: str) -> str | None:
    try:
        return importlib.metadata.version(package_name)
    except importlib.metadata.PackageNotFoundError:
        return None


def get_version_from_setup(setup_file: str) -> str:
    found = re.search(r"version=['\"]([^'\"]+)['\"]", Path(setup_file).read_text())
    if found is None:
        raise ValueError(f"{setup_file} names no version")
    return found.group(1)


def get_class_by_module_and_class_name(module_name: str, class_name: str) -> Any:
    """None if the module has no such name."""
    return getattr(importlib.import_module(module_name), class_name, None)


def get_methods_by_class(clz: type, with_protect: bool = False) -> list[tuple[str, Callable[..., Any]]]:
    members = inspect.getmembers(clz, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
    return [(name, method) for name, method in members if with_protect or not name.startswith("_")]
