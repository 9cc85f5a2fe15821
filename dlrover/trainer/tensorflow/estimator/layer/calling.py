"""How the functions of a user are called: with those of our arguments that they name. And how what they return becomes tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf


def arguments_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """That may be given by name, without those that are bound already."""
    bound: set[str] = set()
    while isinstance(function, functools.partial):
        bound |= set(function.keywords)
        function = functools.partial(function.func, *function.args) if function.args else function.func
        if isinstance(function, functools.partial):
            break
    return tuple(name for name in inspect.signature(function).parameters if name not in bound)


def call_with(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    names = arguments_of(function)
    return function(**{name: value for name, value in given.items() if name in names})


class InputHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Starts the iterator of a dataset in each session."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._initializer: Any = None

    def begin(self) -> None:
        self._initializer = self._iterator.initializer

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self._initializer)


def read_input(input_fn: Callable[..., Any], given: Mapping[str, Any]) -> tuple[Any, Any, list[Any]]:
    """Features, labels (None if there are none), and hooks that the session needs."""
    with tf.device("/cpu:0"):
        found = call_with(input_fn, given)
        hooks = []
        if isinstance(found, tf.data.Dataset | tf.compat.v1.data.Dataset):
            iterator = tf.compat.v1.data.make_initializable_iterator(found)
            hooks.append(InputHook(iterator))
            found = iterator.get_next()
    if isinstance(found, list | tuple):
        if len(found) != 2:
            raise ValueError(
                f"An input function must return features or (features, labels); it returned {len(found)} values."
            )
        return found[0], found[1], hooks
    return found, None, hooks
