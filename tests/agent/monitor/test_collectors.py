"""Collectors of a node: an HTTP address that answers in every way, and users' own that do as well."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.agent.config import WatchConfig
from dlrover.agent.monitor.collectors import Collectors, load_collectors
from dlrover.agent.monitor.old_diagnosis_data import TrainingLog, WorkerTrainingMetric
from dlrover.agent.monitor.progress import WorkerWatch
from dlrover.agent.monitor.scrape import Scrape, ScrapeError, fetch, parse, scrapes, xpu_timer
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.job import Incarnation, NodeId
from dlrover.protocol.messages.watch import MAX_SERIES, SampleTaken, WatchObservation
from tests.agent.lab import DEADLINE, until

METRICS = """# HELP XPU_TIMER_COMMON_HANG whether it hangs
exposer_scrapes_total 7
XPU_TIMER_COMMON_HANG{rank="0",note="a } b"} 1
XPU_TIMER_COMMON_HANG{rank="1"} 0 1700000000000
XPU_TIMER_MM_KERNEL_FLOPS{rank="0"} 3.5e3
plain 2
not_a_number NaN
half{rank="0"
broken one two
"""


@asynccontextmanager
async def server(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        listening.close()


def say(data: bytes) -> Callable[[asyncio.StreamWriter], Awaitable[None]]:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def test_lines_become_numbers_and_what_is_none_is_left_out() -> None:
    assert parse(METRICS) == {
        'XPU_TIMER_COMMON_HANG{rank="0",note="a } b"}': 1.0,
        'XPU_TIMER_COMMON_HANG{rank="1"}': 0.0,
        'XPU_TIMER_MM_KERNEL_FLOPS{rank="0"}': 3500.0,
        "plain": 2.0,
    }
    assert len(parse("\n".join(f"a{number} 1" for number in range(10_000)))) == MAX_SERIES
    assert parse("x" * 1000 + " 1\n\x00\x01 2 3 4\n} 1") == {"}": 1.0}


async def test_the_kernel_profiler_is_asked_for_what_counts() -> None:
    async with server(say(b"HTTP/1.0 200 OK\r\nA: b\r\n\r\n" + METRICS.encode())) as url:
        port = int(url.split(":")[2].split("/")[0])
        assert [each.name for each in scrapes([url], port)] == ["xpu-timer", f"scrape-127.0.0.1:{port}"]
        assert len(await xpu_timer(port).collect()) == 2
        assert len(await Scrape("mine", url.replace("127.0.0.1", "localhost")).collect()) == 4


async def test_whatever_answers_there_is_an_end_and_a_word() -> None:
    hold = asyncio.Event()

    async def mute(_writer: asyncio.StreamWriter) -> None:
        await hold.wait()

    async with server(mute) as url:
        with pytest.raises(ScrapeError, match=r"did not answer within 0.2 s"):
            await fetch(url, timeout=0.2)
        hold.set()
    for said, expected in (
        (b"HTTP/1.1 503 Not Now\r\n\r\n", "answered 503"),
        (b"\x00\xff rubbish", "does not speak"),
        (b"", "speak"),
    ):
        async with server(say(said)) as url:
            with pytest.raises(ScrapeError, match=expected):
                await fetch(url)
    with pytest.raises(ScrapeError):
        await fetch(url)  # nobody listens any more
    assert await xpu_timer(int(url.split(":")[2].split("/")[0])).collect() == {}, "the workers begin it, or never"
    async with server(say(b"HTTP/1.0 200 OK\r\n\r\n" + b"line 1\n" * 100_000)) as url:
        assert len(await fetch(url, max_bytes=10_000)) < 10_000


@pytest.mark.parametrize(
    "url", ["", "localhost:9400", "ftp://a/b", "http://", "http://a:99999999/", "http://a/b c", "http://a/\r\nX: y"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--scrape"):
        Scrape("mine", url)


class Mine:
    def __init__(self, answer: object, interval: float = 0.01) -> None:
        self.answer = answer
        self.interval = interval
        self.num_calls = 0
        self.let_go = threading.Event()

    def collect(self) -> object:
        self.num_calls += 1
        if self.answer == "hold":
            self.let_go.wait(60)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


class Async(Mine):
    async def collect(self) -> object:  # type: ignore[override]
        return super().collect()


class Moody(Mine):
    """Its interval cannot be asked for."""

    @property
    def interval(self) -> float:
        raise RuntimeError("no device, no interval")

    @interval.setter
    def interval(self, value: float) -> None: ...


async def test_users_own_are_asked_apart_from_each_other_and_what_they_raise_is_told_once() -> None:
    observed: list[WatchObservation] = []
    mine: Mapping[str, Any] = {
        "numbers": Mine({"a": 1, "bad": float("nan"), 3: 2.5, "text": "x"}),
        "text": Mine("x" * 100_000),
        "lost": Mine(RuntimeError("GPU is lost")),
        "leaving": Mine(SystemExit(3)),
        "leaving async": Async(SystemExit(3)),
        "wrong": Mine(7),
        "nothing": Mine(None),
        "old": Mine(TrainingLog(logs=["one", "two"])),
    }
    moody = Moody({"a": 1})
    held = Mine("hold")

    def run(mine: Mapping[str, Any], time_limit: float) -> asyncio.Future[None]:
        collectors = Collectors(
            lambda: mine,
            observe=observed.append,
            who=lambda: (NodeId(7), Incarnation(3)),
            time_limit=time_limit,
            shortest=0.01,
        )
        return asyncio.ensure_future(collectors.run())

    running = asyncio.gather(run({**mine, "moody": moody}, DEADLINE), run({"held": held}, 0.1))

    def of(kind: str) -> list[SampleTaken]:
        return [each for each in observed if isinstance(each, SampleTaken) and each.kind == kind]

    await until(
        lambda: held.num_calls and of("held") and of("moody") and all(each.num_calls > 30 for each in mine.values())
    )
    assert of("numbers")[0].numbers == {"a": 1.0, "3": 2.5}
    assert len(of("text")[0].text) == 65536
    assert [each.trouble for each in of("lost")] == ["RuntimeError: GPU is lost"]
    assert [each.trouble for each in of("leaving")] == ["RuntimeError: SystemExit: 3"]
    assert [each.trouble for each in of("leaving async")] == ["RuntimeError: SystemExit: 3"]
    assert "must return a dictionary" in of("wrong")[0].trouble
    assert of("nothing") == []
    assert of("moody")[0].numbers == {"a": 1.0}
    assert of("old")[0].text == "one\ntwo"
    assert held.num_calls == 1, "not again while it still runs"
    held.let_go.set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_halves_of_characters_reach_neither_message_nor_log(caplog: pytest.LogCaptureFixture) -> None:
    """They come from names of files that are no UTF-8, and nothing that has one can be sent or written."""
    half, observed = "caf\udce9", list[WatchObservation]()
    mine = {"text": Mine(half), half: Mine({half: 1}), "lost": Mine(FileNotFoundError(half))}
    collectors = Collectors(lambda: mine, observe=observed.append, who=lambda: (NodeId(7), Incarnation(3)))
    running = asyncio.ensure_future(collectors.run())
    await until(lambda: len(observed) == 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    for each in observed:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=SampleTaken) == each
        assert "caf?" in repr(each)
    assert "FileNotFoundError: caf?" in caplog.text
    caplog.text.encode()


def test_a_collector_that_leaves_when_it_is_loaded_costs_a_warning_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "mine-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[dlrover.collectors]\nbad = leaving:Mine\ngood = staying:Mine\n")
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    (tmp_path / "staying.py").write_text("class Mine:\n    def collect(self): return {}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(load_collectors()) == ["good"]
    assert "The collector bad is not used: SystemExit: 3" in caplog.text
    sys.modules.pop("staying", None)


async def test_the_watch_of_an_agent_has_them_measure() -> None:
    observed: list[WatchObservation] = []
    watch = WorkerWatch(WatchConfig())
    watch.connect(observed.append, lambda: (NodeId(7), Incarnation(3)))
    watch.collect(lambda: {"mine": Mine({"a": 1})})
    running = asyncio.ensure_future(watch.run())
    sample = await until(lambda: next((each for each in observed if isinstance(each, SampleTaken)), None))
    assert (sample.node, sample.kind, sample.numbers) == (7, "mine", {"a": 1.0})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_data_of_the_original_survive_their_json() -> None:
    metric = WorkerTrainingMetric(timestamp=5, data_type="XPU_TIMER_METRIC", data_content="a 1", is_final_result=True)
    assert WorkerTrainingMetric.from_json(metric.to_json()) == metric
    log = TrainingLog.from_json(TrainingLog(logs=["a", "b"], node_rank=3).to_json())
    assert (log.logs, log.node_rank) == (["a", "b"], 3)
