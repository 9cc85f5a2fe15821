"""
Users' own diagnosticians: found under the entry point group `dlrover.diagnosticians`, run here, at the edge.

A diagnostician is built without arguments and has `diagnose(portrait)`, which gives verdicts (`dlrover.protocol.messages.watch.Verdict`), or nothing. It may
have an `interval` in seconds, at least ten. It runs in a thread with a time limit that is real: while a call that took too long still
runs, it is not called again, and after a few such calls never. What it concludes enters the watch like any other verdict.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from dlrover.core.diagnosis.picture import FailedWorkers, Picture, Scene
from dlrover.core.diagnosis.samples import Sample
from dlrover.core.failures.hangs import MAX_CULPRITS, MAX_EVIDENCE
from dlrover.host.extensions import NoAnswer, TimedCalls, build_installed
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
        self._calls = {
            name: TimedCalls("diagnosis", time_limit=time_limit, max_timeouts=MAX_TIMEOUTS) for name in self._plugins
        }

    @classmethod
    def load(cls) -> UserDiagnosticians:
        """One that cannot be loaded costs a warning, and no other."""
        return cls(
            dict(build_installed(ENTRY_POINTS, what="diagnostician", method="diagnose", log=log, adapt=_translate))
        )

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
            log.warning("a diagnostician returned an invalid verdict, which is ignored: %s", error)
            return None
        return msgspec.structs.replace(
            decoded,
            evidence=tuple(sentence[:MAX_TEXT] for sentence in decoded.evidence[:MAX_EVIDENCE]),
            culprits=decoded.culprits[:MAX_CULPRITS],
            reasoning=decoded.reasoning[:MAX_TEXT],
            diagnostician=decoded.diagnostician[:128],
        )

    def close(self) -> None:
        for calls in self._calls.values():
            calls.close()

    async def _repeat(
        self, name: str, plugin: Any, picture: Callable[[], Picture], hear: Callable[[object], None]
    ) -> None:
        interval = _interval(plugin)
        while not self._calls[name].is_disabled:
            await asyncio.sleep(interval)  # no event tells when a user's own check is due
            for verdict in await self.ask(name, plugin, portrait_of(picture())):
                hear(verdict)
        log.warning("diagnostician %s is disabled after %d timeouts in a row", name, MAX_TIMEOUTS)

    async def ask(self, name: str, plugin: Any, portrait: Portrait) -> list[object]:
        calls = self._calls[name]
        try:
            return await calls.call(lambda: _call(plugin, portrait))
        except NoAnswer as error:
            log.warning("diagnostician %s failed: %s", name, error)
        await calls.wait_until_idle()
        return []


def _translate(name: str, plugin: Any) -> Any:
    return Translated(name, plugin) if isinstance(plugin, OldDiagnostician) else plugin


def _call(plugin: Any, portrait: Portrait) -> list[object]:
    answer = plugin.diagnose(portrait)
    if answer is None:
        return []
    if isinstance(answer, Verdict):
        return [answer]
    if not isinstance(answer, Iterable):
        raise TypeError(f"the answer must be a list of verdicts (got {type(answer).__name__})")
    return list(answer)[:MAX_VERDICTS]


def _interval(plugin: Any) -> float:
    interval = getattr(plugin, "interval", 60.0)
    return max(SHORTEST_INTERVAL, interval) if isinstance(interval, int | float) else 60.0
