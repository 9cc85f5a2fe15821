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

from dlrover.agent import side_thread
from dlrover.agent.monitor.old_diagnosis_data import DiagnosisData
from dlrover.agent.monitor.scrape import ScrapeError
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
        num_timeouts = 0
        while num_timeouts < MAX_TIMEOUTS:
            call = asyncio.ensure_future(_collect(collector))
            done, _ = await asyncio.wait([call], timeout=self._time_limit)
            if not done:
                num_timeouts += 1
                self._tell(name, trouble=f"it took longer than {self._time_limit:g} s")
                await asyncio.wait([call])  # a thread cannot be ended: it is left alone until it comes back
                call.exception()
            else:
                self._hear(name, call)
            await asyncio.sleep(interval)  # nobody tells when something is worth measuring
        log.warning("collector %s is asked no more: %d times too late", name, MAX_TIMEOUTS)

    def _hear(self, name: str, call: asyncio.Future[object]) -> None:
        try:
            self._tell(name, *_checked(call.result()))
        except ScrapeError as error:
            self._tell(name, trouble=str(error))
        except Exception as error:  # a collector may raise anything; that it did is all that is known
            self._tell(name, trouble=f"{type(error).__name__}: {error}")

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
    from importlib import metadata  # late: workers start sooner without it

    found: dict[str, Any] = {collector.name: collector for collector in built_in}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        try:
            collector = _with_new_name(point.load()())
            if not callable(getattr(collector, "collect", None)):
                raise TypeError("it has no method `collect`")
            is_enabled = getattr(collector, "is_enabled", None)
            if callable(is_enabled) and not is_enabled():
                continue
        except (Exception, SystemExit) as error:  # importing and building run the user's code, which may raise anything
            log.warning("collector %s is left out: %s: %s", point.name, type(error).__name__, error)
            continue
        found[point.name] = collector
    return found


class _Renamed:
    """A collector of the original's: `collect_data` is what it is called for."""

    def __init__(self, collector: Any) -> None:
        self.collect = collector.collect_data
        self.interval = getattr(collector, "interval", USUAL_INTERVAL)
        self.is_enabled = getattr(collector, "is_enabled", lambda: True)


def _with_new_name(collector: Any) -> Any:
    is_old = not hasattr(collector, "collect") and callable(getattr(collector, "collect_data", None))
    return _Renamed(collector) if is_old else collector


async def _collect(collector: Any) -> object:
    if inspect.iscoroutinefunction(collector.collect):
        try:
            return await collector.collect()
        except SystemExit as error:
            raise side_thread.as_error(error) from error
    return await side_thread.begin(collector.collect, "collector")


def _checked(answer: object) -> tuple[dict[str, float], str]:
    """As it may go to the master. Raises TypeError."""
    if answer is None:
        return {}, ""
    if isinstance(answer, DiagnosisData):
        answer = answer.data_content
    if isinstance(answer, str):
        return {}, answer[-MAX_SAMPLE_TEXT:]
    if not isinstance(answer, Mapping):
        raise TypeError(f"{type(answer).__name__} is neither numbers by name nor a text")
    numbers: dict[str, float] = {}
    for series, value in answer.items():
        if len(numbers) < MAX_SERIES and isinstance(value, int | float) and math.isfinite(value):
            numbers[str(series)[:_MAX_SERIES_NAME]] = float(value)
    return numbers, ""


def _interval(collector: Any, shortest: float) -> float:
    try:
        interval = getattr(collector, "interval", USUAL_INTERVAL)
    except Exception as error:  # a property of the user's
        log.warning("a collector's interval is taken for %g s: %s: %s", USUAL_INTERVAL, type(error).__name__, error)
        return USUAL_INTERVAL
    is_number = isinstance(interval, int | float) and math.isfinite(interval)
    return max(shortest, float(interval)) if is_number else USUAL_INTERVAL
