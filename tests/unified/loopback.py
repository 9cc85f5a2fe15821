"""A job in one process: instances are objects, and calls to them run in threads, through the same pickles as real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.current import Current, enter, leave
from dlrover.unified.runtime.methods import METHODS, Methods
from dlrover.unified.runtime.wire import CallHeader, Parts

ME = "me"
"""The role of this process. Given as a role, it answers its own calls."""


class LoopbackWire:
    def __init__(self, roles: Mapping[str, list[object]]) -> None:
        self._methods: dict[tuple[str, int], Methods] = {}
        self._roles = {name: len(objects) for name, objects in roles.items()}
        self._threads = ThreadPoolExecutor(32)
        for name, objects in roles.items():
            for rank, instance in enumerate(objects):
                self._methods[name, rank] = methods = Methods()
                methods.export_object(instance)

    def call(self, role: str, rank: int, header: CallHeader, parts: Parts) -> Future[Parts]:
        self.num_ranks(role)
        methods = METHODS if role == ME else self._methods[role, rank]
        return self._threads.submit(methods.answer, header, parts, f"{role}-{rank}")

    def serve(self, answer: Callable[[CallHeader, Parts], Parts]) -> None:
        raise AssertionError("nothing calls this process")

    def num_ranks(self, role: str) -> int:
        if role not in self._roles:
            raise ConfigError(f"The job has no role {role!r}. It has: {', '.join(self._roles)}.")
        return self._roles[role]

    def roles(self) -> Mapping[str, int]:
        return self._roles


@contextmanager
def loopback(**roles: list[object]) -> Iterator[Current]:
    """This process is `me-0` of a job with these roles."""
    here = Current(job="job", job_uid="uid", role=ME, rank=0, world_size=1, wire=LoopbackWire(roles))
    enter(here)
    try:
        yield here
    finally:
        leave()
        METHODS.clear()
