"""A store in memory that can lose its caller: after so many calls each further one fails, as for a process that was killed."""

from __future__ import annotations

from collections.abc import Callable


class Killed(BaseException):
    """The process of the caller ended here."""


class FakeKeyValues:
    """Shared by all conductors of a test. `view` gives each of them its own way to it."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        if not overwrite and key in self.values:
            return False
        self.values[key] = value
        return True

    def get(self, key: str) -> bytes | None:
        return self.values.get(key)

    def delete(self, key: str) -> None:
        self.values.pop(key, None)

    def keys(self, prefix: str) -> list[str]:
        return sorted(key for key in self.values if key.startswith(prefix))


class MortalKeyValues:
    """Dies with the given call, before or after it took effect."""

    def __init__(self, store: FakeKeyValues, *, dies_at: int, is_done: bool) -> None:
        self._store = store
        self._left = dies_at
        self._is_done = is_done

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        self._count(lambda: self._store.put(key, value, overwrite=overwrite))
        return self._store.put(key, value, overwrite=overwrite)

    def get(self, key: str) -> bytes | None:
        self._count(lambda: None)
        return self._store.get(key)

    def delete(self, key: str) -> None:
        self._count(lambda: self._store.delete(key))
        self._store.delete(key)

    def keys(self, prefix: str) -> list[str]:
        self._count(lambda: None)
        return self._store.keys(prefix)

    def _count(self, effect: Callable[[], object]) -> None:
        self._left -= 1
        if self._left == 0:
            if self._is_done:
                effect()
            raise Killed
        assert self._left > 0, "it is dead"
