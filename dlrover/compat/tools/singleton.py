"""One object per class and process, as scripts of the original ask for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def singleton(cls: Callable[..., T]) -> Callable[..., T]:
    """Calling the class gives the same object each time; the arguments of the first call count."""
    lock = threading.Lock()
    made: list[T] = []

    def instance(*arguments: Any, **named: Any) -> T:
        with lock:
            if not made:
                made.append(cls(*arguments, **named))
        return made[0]

    return instance


class Singleton:
    _lock: ClassVar[threading.RLock] = threading.RLock()
    """Guards the making, of all classes: making one may make another."""
    _instance: ClassVar[Any] = None

    @classmethod
    def singleton_instance(cls, *arguments: Any, **named: Any) -> Any:
        """The arguments of the first call count. A subclass has an object of its own."""
        if cls.__dict__.get("_instance") is None:
            with cls._lock:
                if cls.__dict__.get("_instance") is None:
                    cls._instance = cls(*arguments, **named)
        return cls.__dict__["_instance"]
