"""
A storage that fails or waits when it is told to: files of a directory, reached through fsspec as `faulty:///some/directory`.

fsspec's registry is the seam, so nothing of ours is replaced: the code under test finds this storage by its URL as it would find S3.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

SCHEME = "faulty"


class Plan:
    """What happens to operations: `make` directories, `write` of anything whose path contains a word."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.word = ""
        self.gate = threading.Event()
        self.gate.set()
        self.num_writes = 0
        self.num_failures = 0

    @contextmanager
    def failing(self, number: int, word: str) -> Iterator[None]:
        """Everything whose path contains the word fails with this error number."""
        self.error, self.word = OSError(number, os.strerror(number)), word
        yield
        self.error = None

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """Writes begin and do not end before the block is left."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def meet(self, path: str) -> None:
        if self.error is not None and self.word in path:
            self.num_failures += 1
            raise OSError(self.error.errno, self.error.strerror, path)


class FaultyFiles(LocalFileSystem):  # type: ignore[misc]
    protocol = SCHEME
    cachable = False
    plan: ClassVar[Plan] = Plan()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix(f"{SCHEME}://")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.plan.meet(path)
        super().makedirs(path, exist_ok=exist_ok)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode:
            self.plan.num_writes += 1
            assert self.plan.gate.wait(60), "the storage stood still for too long"
            self.plan.meet(path)
        return super()._open(path, mode, **options)


def install() -> Plan:
    """A fresh plan for one test."""
    FaultyFiles.plan = Plan()
    fsspec.register_implementation(SCHEME, FaultyFiles, clobber=True)
    return FaultyFiles.plan
