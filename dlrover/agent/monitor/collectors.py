"""
Collectors: whatever else should be measured on each node, at a period of its own. Ours, and users' own.

A collector of a user's is found under the entry point group `dlrover.collectors` and built without arguments. It has `collect()`, which gives numbers by name, or a text,
or nothing, and may have `interval` (60 s; at least 10) and `is_enabled()`. It runs in a thread with a time limit that is real: while a call still runs it is not
called again, and after three that took too long never. What it raises goes to the diagnosis in words. None can hold up the agent or another collector.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlrover.agent.monitor.old_diagnosis_data import DiagnosisData
from dlrover.agent.monitor.scrape import ScrapeError
from dlrover.host import side_thread
from dlrover.host.edges import attempt
from dlrover.host.extensions import NoAnswer, TimedCalls, build_installed
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import MAX_SAMPLE_TEXT, MAX_SERIES, MAX_TEXT, SampleTaken, WatchObservation
from dlrover.protocol.text import encodable

log = logging.getLogger("dlrover.agent")

ENTRY_POINTS = "dlrover.collectors"
TIME_LIMIT = 10.0
SHORTEST_INTERVAL = 10.0
USUAL_INTERVAL = 60.0
MAX_TIMEOUTS = 3
MAX_NAME = 64
_MAX_SERIES_NAME = 256


class Collectors:
    """All of them on this node. `run` is their task; nothing in it raises."""

    def __init__(
        self,
        load: Callable[[], Mapping[str, Any]],
        *,
        observe: Callable[[WatchObservation], None],
        who: Callable[[], tuple[NodeId, Incarnation]],
        time_limit: float = TIME_LIMIT,
        shortest: float = SHORTEST_INTERVAL,
    ) -> None:
        """`load` gives them by name. It is called when they begin, in a thread, because it imports what users wrote."""
        self._load = load
        self._observe, self._who = observe, who
        self._time_limit = time_limit
        self._shortest = shortest
        self._told: dict[str, str] = {}
        """The newest trouble of each, so that it is not told again and again."""

    async def run(self) -> None:
        """Until cancelled."""
        collectors = await side_thread.begin(self._load, "collector")
        async with asyncio.TaskGroup() as group:
            for name, collector in collectors.items():
                group.create_task(self._repeat(encodable(name[:MAX_NAME]), collector), name=f"collector {name}")

    async def _repeat(self, name: str, collector: Any) -> None:
        interval = _interval(collector, self._shortest)
        calls = TimedCalls("collector", time_limit=self._time_limit, max_timeouts=MAX_TIMEOUTS)
        while not calls.is_disabled:
            try:
                self._tell(name, *_checked(await _collect(collector, calls)))
            except NoAnswer as error:
                self._tell(name, trouble=str(error.__cause__ if isinstance(error.__cause__, ScrapeError) else error))
            except TypeError as error:
                self._tell(name, trouble=f"TypeError: {error}")
            await calls.wait_until_idle()
            await asyncio.sleep(interval)  # no event tells when something is worth measuring
        log.warning("collector %s is disabled after %d timeouts in a row", name, MAX_TIMEOUTS)

    def _tell(
        self, name: str, numbers: Mapping[str, float] | None = None, text: str = "", *, trouble: str = ""
    ) -> None:
        trouble = encodable(trouble[:MAX_TEXT])
        before = self._told.get(name, "")
        self._told[name] = trouble
        if trouble and trouble != before:
            log.warning("collector %s: %s", name, trouble)
        if not (numbers or text or (trouble and trouble != before)):
            return
        node, incarnation = self._who()
        self._observe(
            SampleTaken(
                node=node,
                incarnation=incarnation,
                kind=name,
                numbers={encodable(series): value for series, value in (numbers or {}).items()},
                text=encodable(text),
                trouble=trouble,
            )
        )


def load_collectors(built_in: Sequence[Any] = ()) -> dict[str, Any]:
    """Ours, and those that are installed here. One that cannot be loaded costs a warning, and no other."""
    found: dict[str, Any] = {collector.name: collector for collector in built_in}
    installed = build_installed(ENTRY_POINTS, what="collector", method="collect", log=log, adapt=_adapt)
    return found | dict(installed)


class _Renamed:
    """A collector of the original's: `collect_data` is what it is called for."""

    def __init__(self, collector: Any) -> None:
        self.collect = collector.collect_data
        self.interval = getattr(collector, "interval", USUAL_INTERVAL)
        self.is_enabled = getattr(collector, "is_enabled", lambda: True)


def _adapt(_name: str, collector: Any) -> Any:
    """None: it does not want to run here."""
    if not hasattr(collector, "collect") and callable(getattr(collector, "collect_data", None)):
        collector = _Renamed(collector)
    is_enabled = getattr(collector, "is_enabled", None)
    return collector if not callable(is_enabled) or is_enabled() else None


async def _collect(collector: Any, calls: TimedCalls) -> object:
    if inspect.iscoroutinefunction(collector.collect):
        return await calls.call_async(collector.collect)
    return await calls.call(collector.collect)


def _checked(answer: object) -> tuple[dict[str, float], str]:
    """As it may go to the master. Raises TypeError."""
    if answer is None:
        return {}, ""
    if isinstance(answer, DiagnosisData):
        answer = answer.data_content
    if isinstance(answer, str):
        return {}, answer[-MAX_SAMPLE_TEXT:]
    if not isinstance(answer, Mapping):
        raise TypeError(f"collect() must return a dictionary of numbers, a text or None (got {type(answer).__name__})")
    numbers: dict[str, float] = {}
    for series, value in answer.items():
        if len(numbers) < MAX_SERIES and isinstance(value, int | float) and math.isfinite(value):
            numbers[str(series)[:_MAX_SERIES_NAME]] = float(value)
    return numbers, ""


def _interval(collector: Any, shortest: float) -> float:
    def tell(error: Exception) -> None:
        log.warning(
            "A collector's interval cannot be read, so it runs every %g s: %s: %s",
            USUAL_INTERVAL,
            type(error).__name__,
            error,
        )

    interval: Any = attempt(lambda: getattr(collector, "interval", None), tell)  # a property of the user's
    is_number = isinstance(interval, int | float) and math.isfinite(interval)
    return max(shortest, float(interval)) if is_number else USUAL_INTERVAL
