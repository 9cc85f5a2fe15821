"""
Users' own diagnosticians: found under the entry point group `dlrover.diagnosticians`, run here, at the edge.

A diagnostician is built without arguments and has `diagnose(portrait)`, which gives verdicts (`dlrover.protocol.messages.watch.Verdict`), or nothing. It may
have an `interval` in seconds, at least ten. It runs in a thread with a time limit that is real: while a call that took too long still
runs, it is not called again, and after a few such calls never. What it concludes enters the watch like any other verdict.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.core.diagnosis.picture import FailedWorkers, Picture, Scene
from dlrover.core.diagnosis.samples import Sample
from dlrover.core.failures.hangs import MAX_CULPRITS, MAX_EVIDENCE
from dlrover.master.diagnosis.old_diagnosticians import OldDiagnostician, Translated
from dlrover.protocol.messages.watch import MAX_TEXT, ResourceReport, Verdict, WorkerProgress

log = logging.getLogger(__name__)

ENTRY_POINTS = "dlrover.diagnosticians"
TIME_LIMIT = 10.0
SHORTEST_INTERVAL = 10.0
MAX_TIMEOUTS = 3
MAX_VERDICTS = 16
"""Of one call."""


class Portrait(Struct, frozen=True, kw_only=True):
    """The job at one moment; nothing in it changes any more."""

    scene: Scene
    workers: tuple[WorkerProgress, ...]
    resources: tuple[ResourceReport, ...]
    failures: tuple[FailedWorkers, ...]
    samples: tuple[Sample, ...] = ()
    """Of collectors, oldest first."""


def portrait_of(picture: Picture) -> Portrait:
    return Portrait(
        scene=picture.scene,
        workers=tuple(record.progress for record in picture.heard()),
        resources=tuple(picture.resources.values()),
        failures=tuple(picture.failures),
        samples=tuple(picture.samples),
    )


class UserDiagnosticians:
    """All of them. Nothing here raises once it is built."""

    def __init__(self, plugins: Mapping[str, Any] | None = None, *, time_limit: float = TIME_LIMIT) -> None:
        self._plugins = dict(plugins or {})
        self._time_limit = time_limit
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._num_timeouts = dict.fromkeys(self._plugins, 0)

    @classmethod
    def load(cls) -> UserDiagnosticians:
        """One that cannot be loaded costs a warning, and no other."""
        plugins: dict[str, Any] = {}
        for point in metadata.entry_points(group=ENTRY_POINTS):
            try:
                plugin = point.load()()
                if isinstance(plugin, OldDiagnostician):
                    plugin = Translated(point.name, plugin)
                if not callable(getattr(plugin, "diagnose", None)):
                    raise TypeError("it has no method `diagnose`")
            except (
                Exception,
                SystemExit,
            ) as error:  # importing and building run the user's code, which may raise anything
                log.warning("diagnostician %s is left out: %s: %s", point.name, type(error).__name__, error)
                continue
            plugins[point.name] = plugin
        return cls(plugins)

    def __bool__(self) -> bool:
        return bool(self._plugins)

    async def run(self, picture: Callable[[], Picture], hear: Callable[[object], None]) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, plugin in self._plugins.items():
                group.create_task(self._repeat(name, plugin, picture, hear))

    def check(self, verdict: object) -> Verdict | None:
        """As it may go into a command; None: it cannot."""
        try:
            decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict)
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            log.warning("a diagnostician gave no verdict: %s", error)
            return None
        return msgspec.structs.replace(
            decoded,
            evidence=tuple(sentence[:MAX_TEXT] for sentence in decoded.evidence[:MAX_EVIDENCE]),
            culprits=decoded.culprits[:MAX_CULPRITS],
            reasoning=decoded.reasoning[:MAX_TEXT],
            diagnostician=decoded.diagnostician[:128],
        )

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _repeat(
        self, name: str, plugin: Any, picture: Callable[[], Picture], hear: Callable[[object], None]
    ) -> None:
        interval = _interval(plugin)
        while self._num_timeouts[name] < MAX_TIMEOUTS:
            await asyncio.sleep(interval)  # nothing tells when a user's own check is due
            for verdict in await self.ask(name, plugin, portrait_of(picture())):
                hear(verdict)
        log.warning("diagnostician %s is asked no more: %d times too late", name, MAX_TIMEOUTS)

    async def ask(self, name: str, plugin: Any, portrait: Portrait) -> list[object]:
        if self._threads is None:
            self._threads = concurrent.futures.ThreadPoolExecutor(
                max(1, len(self._plugins)), thread_name_prefix="diagnosis"
            )
        call = asyncio.wrap_future(self._threads.submit(_call, plugin, portrait))
        try:
            done, _ = await asyncio.wait([call], timeout=self._time_limit)
            if not done:
                self._num_timeouts[name] += 1
                log.warning("diagnostician %s took longer than %g s", name, self._time_limit)
                await asyncio.wait([call])  # a thread cannot be ended: it is left alone until it comes back
            return await call
        except (Exception, SystemExit) as error:  # an extension may raise anything; the job goes on without its answer
            log.warning("diagnostician %s failed: %s: %s", name, type(error).__name__, error)
            return []


def _call(plugin: Any, portrait: Portrait) -> list[object]:
    answer = plugin.diagnose(portrait)
    if answer is None:
        return []
    if isinstance(answer, Verdict):
        return [answer]
    if not isinstance(answer, Iterable):
        raise TypeError(f"{type(answer).__name__} is no list of verdicts")
    return list(answer)[:MAX_VERDICTS]


def _interval(plugin: Any) -> float:
    interval = getattr(plugin, "interval", 60.0)
    return max(SHORTEST_INTERVAL, interval) if isinstance(interval, int | float) else 60.0
