"""
Arguments that had another name before: scripts that give them by the older name go on working.

One thing has one name in all public classes (`tests/trainer/test_argument_names.py` has the table). Where it had another one, in the original or in a
framework whose method ours stands beside, the older name is translated here. Signatures and the reference show the new one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def older_names(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """`older_names(extra_sd="extra")`: the argument `extra` may be given as `extra_sd`, too. Only by name; its place is the same anyway."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for older in names.keys() & kwargs.keys():
                if names[older] in kwargs:
                    raise TypeError(
                        f"{function.__qualname__}: {older} is the older name of {names[older]}. Give only one of them."
                    )
                kwargs[names[older]] = kwargs.pop(older)
            return function(*args, **kwargs)

        setattr(call, _MARK, dict(names))
        return call

    return decorate


def older_names_of(function: object) -> dict[str, str]:
    """Older name to name."""
    return dict(getattr(function, _MARK, {}))


_MARK = "__older_names__"
