"""
Both ends of a stream, and the weights that go the other way.

    batch = Stream("samples").get(step)             # a trainer, after it has restored `step`
    for task in Stream("samples").tasks():          # a feeder, for ever
        task.put(make(task.key, weights.fetch(task.step)))

A trainer that restores step s asks for s again. It must be determined by the key, the step and the weights of the step what a feeder puts.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from dlrover.protocol.errors import ConfigError
from dlrover.unified.runtime.calls import RoleActor
from dlrover.unified.runtime.current import current
from dlrover.unified.runtime.methods import METHODS, rpc
from dlrover.unified.runtime.wire import Ending, RoleGone

CALL_TIMEOUT = 600.0
"""Seconds for the stream or the trainer to be back. They are restarted, or the job ends."""
KEPT_WEIGHTS = 2
WEIGHTS_WAIT = 10.0


class FeederTask(Struct, frozen=True):
    stream: str
    step: int
    key: int

    def put(self, item: object) -> None:
        """From now on the stream owns it: this instance may die."""
        _ask(self.stream, 0, "put", self.step, self.key, pickle.dumps(item))


class Stream:
    def __init__(self, name: str) -> None:
        """Raises `ConfigError` if the job has no such stream."""
        current().wire.num_ranks(name)
        self.name = name

    def get(self, step: int) -> list[tuple[int, Any]]:
        """(key, item) in the order of keys; the same for every rank that asks. Waits as long as it takes."""
        while True:
            found = _ask(self.name, 0, "get", step)
            if found is not None:
                return [(key, pickle.loads(item)) for key, item in found]

    def tasks(self, *, most: int = 1) -> Iterator[FeederTask]:
        """What this instance shall make; ends when the instance is asked to end. `most`: keys that it takes at a time."""
        me = current()
        try:
            while not me.ending.is_set():
                for step, key in _ask(self.name, 0, "take", me.name, me.incarnation, most):
                    yield FeederTask(self.name, step, key)
        except (Ending, RoleGone):  # or the job is over
            return

    def statistics(self) -> dict[str, int]:
        found: dict[str, int] = _ask(self.name, 0, "statistics")
        return found


class Weights:
    """From rank 0 of one role to all who ask. Kept in the memory of the publisher, which publishes again after a restart."""

    def __init__(self, role: str, name: str = "weights") -> None:
        current().wire.num_ranks(role)
        self.role = role
        self._name = name
        self._published: dict[int, bytes] = {}
        self._changed = threading.Condition()  # the publisher's thread and those of callers
        self._is_serving = False
        self._newest: tuple[int, Any] | None = None

    def publish(self, step: int, state: object) -> None:
        """As it is now: it is copied. Before the trainer asks for the batch of the step."""
        me = current()
        if (me.role, me.rank) != (self.role, 0):
            raise ConfigError(f"Only rank 0 of {self.role} may publish its weights; this is {me.name}.")
        data = pickle.dumps(state)
        with self._changed:
            self._published[step] = data
            for old in sorted(self._published)[:-KEPT_WEIGHTS]:
                del self._published[old]
            self._changed.notify_all()
        if not self._is_serving:
            self._is_serving = True
            METHODS.export_object(self, self._name)
            serve()

    def fetch(self, step: int) -> Any:
        """Waits until they are published. The last ones are kept."""
        if self._newest is None or self._newest[0] != step:
            while (data := _ask(self.role, 0, f"{self._name}.weights_of", step)) is None:
                pass
            self._newest = (step, pickle.loads(data))
        return self._newest[1]

    @rpc(retry=True)
    def weights_of(self, step: int) -> bytes | None:
        """None: not yet, ask again."""
        with self._changed:
            self._changed.wait_for(lambda: step in self._published, WEIGHTS_WAIT)
            return self._published.get(step)


def serve(instance: object = None) -> None:
    """Let others call this process: the `@rpc` methods of the object, and what was exported. For scripts; classes of entry points are served anyway."""
    me = current()
    if instance is not None:
        METHODS.export_object(instance)
    me.wire.serve(lambda header, parts: METHODS.answer(header, parts, me.name))


def _ask(role: str, rank: int, method: str, *args: Any) -> Any:
    return RoleActor(role, rank).send(method, args, retry=True, timeout=CALL_TIMEOUT).result()
