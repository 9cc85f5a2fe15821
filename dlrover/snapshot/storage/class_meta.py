"""
A class of the user's, named so that another process can build it: by module, class and plain arguments.

A storage or a deletion strategy is made in the trainer and used in the agent. It travels as words, never as a pickle, so the agent runs
only code that can be imported by name. What cannot travel that way is refused in the trainer, where the user can correct it.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any, Self

import msgspec
from msgspec import Struct

from dlrover.protocol.errors import ConfigError

_NESTED = "$class"
"""Marks an argument that is itself an object described by a `ClassMeta`."""


class ClassMeta(Struct):
    module_path: str = ""
    class_name: str = ""
    kwargs: dict[str, Any] = {}
    search_path: str = ""
    """Directory to look in where the module is not found otherwise: a script's own directory is no path of the agent's."""


class Rebuildable:
    """Remembers with what it was built, so that it can be built again elsewhere."""

    _built_with: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        made._built_with = (args, kwargs)
        return made

    def get_class_meta(self) -> ClassMeta:
        args, kwargs = self._built_with
        try:
            bound = inspect.signature(type(self)).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{type(self).__name__} cannot be described for the agent ({error}). Give it a get_class_meta() of its own."
            ) from error
        named: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            match bound.signature.parameters[name].kind:
                case inspect.Parameter.VAR_KEYWORD:
                    named.update(value)
                case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.POSITIONAL_ONLY:
                    raise ConfigError(
                        f"{type(self).__name__} takes positional arguments (*args), so the agent cannot build "
                        "it. Give it a get_class_meta() of its own."
                    )
                case _:
                    named[name] = value
        return ClassMeta(module_path=type(self).__module__, class_name=type(self).__qualname__, kwargs=named)


def describe(thing: object, interface: type) -> ClassMeta:
    """
    Words for an object with a `get_class_meta`, checked: another process will be able to build it from them, as an `interface`.

    Raises ConfigError with what to change.
    """
    ask = getattr(thing, "get_class_meta", None)
    if ask is None:
        raise ConfigError(
            f"{type(thing).__name__} has no get_class_meta(). Derive it from CheckpointStorage or "
            "CheckpointDeletionStrategy of dlrover.python.common.storage."
        )
    given: Any = ask()
    name = f"{given.module_path}.{given.class_name}"
    if given.module_path == "__main__":
        raise ConfigError(
            f"{given.class_name} is defined in the script itself, which the agent cannot import. Put it into a module beside the script "
            "and import it from there."
        )
    kwargs = {key: _plain(value) for key, value in dict(given.kwargs or {}).items()}
    try:
        kwargs = msgspec.json.decode(msgspec.json.encode(kwargs))
    except (TypeError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"The arguments of {name} cannot be handed to the agent as JSON ({error}). Use numbers, text, lists and dictionaries."
        ) from error
    meta = ClassMeta(
        module_path=given.module_path,
        class_name=given.class_name,
        kwargs=kwargs,
        search_path=given.search_path
        if isinstance(given, ClassMeta) and given.search_path
        else found_in(given.module_path),
    )
    find_class(meta, interface)
    return meta


def build(meta: ClassMeta, interface: type) -> Any:
    """Import the class, check that it is an `interface`, and make the object. Raises ConfigError."""
    cls = find_class(meta, interface)
    kwargs = {key: _object(value) for key, value in meta.kwargs.items()}
    try:
        return cls(**kwargs)
    except (Exception, SystemExit) as error:  # code of the user's: the caller has to hear of it in one form
        raise ConfigError(
            f"{meta.module_path}.{meta.class_name} cannot be built with {kwargs}: {type(error).__name__}: {error}"
        ) from error


def find_class(meta: ClassMeta, interface: type) -> Any:
    """A subclass of `interface`, or a class that has all of its abstract methods."""
    found: Any = _import(meta)
    try:
        for part in meta.class_name.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigError(
            f"The module {meta.module_path} has no class {meta.class_name}. Define the class at the top level "
            "of the module, where the agent can find it."
        ) from error
    name = f"{meta.module_path}.{meta.class_name}"
    if not isinstance(found, type):
        raise ConfigError(f"{name} is not a class. Name a class derived from {interface.__name__}.")
    wanted = sorted(getattr(interface, "__abstractmethods__", ()))
    missing = [method for method in wanted if not callable(getattr(found, method, None))]
    if not issubclass(found, interface) and (missing or not wanted):
        lacks = f" It lacks {', '.join(missing)}." if missing else ""
        raise ConfigError(f"{name} is not a {interface.__name__}.{lacks} Derive it from {interface.__name__}.")
    return found


def _import(meta: ClassMeta) -> Any:
    try:
        return importlib.import_module(meta.module_path)
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == meta.module_path.split(".")[0]
        if not is_missing or not meta.search_path or meta.search_path in sys.path:
            raise _not_importable(meta, error) from error
    sys.path.append(meta.search_path)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(meta.module_path)
    except (Exception, SystemExit) as error:
        raise _not_importable(meta, error) from error


def _not_importable(meta: ClassMeta, error: BaseException) -> ConfigError:
    return ConfigError(
        f"{meta.module_path}.{meta.class_name} cannot be imported here: {type(error).__name__}: {error}. The class has to be importable by "
        "its module's name on every node: install it, or put its directory into PYTHONPATH before the job starts."
    )


def found_in(module_path: str) -> str:
    """The directory that has to be searched to find a module that is imported already."""
    top = sys.modules.get(module_path.split(".")[0])
    file: str | None = getattr(top, "__file__", None)
    if not file:  # a package without __init__ may lie in several places; its first is the likeliest
        parts = list(getattr(top, "__path__", ()))
        return os.path.dirname(os.path.abspath(parts[0])) if parts else ""
    directory = os.path.dirname(os.path.abspath(file))
    return os.path.dirname(directory) if os.path.basename(file) == "__init__.py" else directory


def _plain(value: Any) -> Any:
    if isinstance(value, Rebuildable):
        return {_NESTED: describe(value, Rebuildable)}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value


def _object(value: Any) -> Any:
    if isinstance(value, dict) and list(value) == [_NESTED]:
        return build(msgspec.convert(value[_NESTED], ClassMeta), Rebuildable)
    return value
