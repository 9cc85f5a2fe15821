"""Shards that are held back until the ranks have said which model they go on with: who waits for them asks once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.protocol.messages.data import AwaitRestore, DatasetSpec, ExchangeShards
from dlrover.protocol.messages.job import Reply, WorkerRequest
from dlrover.protocol.messages.kv import MAX_WAIT
from dlrover.trainer import environment
from dlrover.trainer.agent_link import AgentLink
from dlrover.trainer.data import data_steps
from dlrover.trainer.data.shard_feed import ShardFeed
from tests.trainer.torch.store_lab import StoreLab

DEADLINE = 60.0
OBSERVED = 1.5
"""Seconds in which a worker that asks every tenth of a second is seen to do it."""


class CountedLink:
    """A worker's real link to its agent, and what went over it."""

    def __init__(self, inner: AgentLink) -> None:
        self._inner = inner
        self._news = threading.Condition()
        self.asked: list[WorkerRequest] = []

    def ask(self, request: WorkerRequest, *, timeout: float) -> Reply:
        with self._news:
            self.asked.append(request)
            self._news.notify_all()
        return self._inner.ask(request, timeout=timeout)

    def number_of(self, kind: type) -> int:
        return sum(isinstance(each, kind) for each in self.asked)

    def comes_to(self, kind: type, number: int, *, within: float = DEADLINE) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self.number_of(kind) >= number, timeout=within)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreLab]:
    lab = StoreLab(tmp_path)
    monkeypatch.setenv("DLROVER_AGENT_SOCKET", lab.where.agent_socket)
    monkeypatch.setenv("DLROVER_ROUND", str(lab.where.round))
    environment.current.cache_clear()
    try:
        yield lab
    finally:
        data_steps.model_loaded.clear()
        data_steps.feeds.clear()
        environment.current.cache_clear()
        lab.close()


def test_a_worker_that_is_held_back_asks_once_and_its_reports_go_on(lab: StoreLab) -> None:
    link = CountedLink(lab.link())
    feed = ShardFeed(DatasetSpec(name="d", size=100, shard_size=10), link=link, ahead=1)
    shards = [feed.take(DEADLINE)]
    data_steps.loaded()  # another rank will say which model that is

    def read() -> None:
        while (shard := feed.take(DEADLINE)) is not None:
            shards.append(shard)

    reader = threading.Thread(target=read)
    reader.start()
    assert link.comes_to(AwaitRestore, 1)
    asked = link.number_of(ExchangeShards)
    assert not link.comes_to(ExchangeShards, asked + 1, within=OBSERVED), "nothing is asked while it waits"
    assert shards[0] is not None
    feed.consumed(shards[0], 10)
    assert feed.flush(DEADLINE), "the master hears what was read"
    assert link.number_of(AwaitRestore) == 1, "the first question still waits"
    assert len(shards) < 10

    data_steps.restored(None, link=lab.link())
    reader.join(MAX_WAIT / 2)
    assert len(shards) == 10, "the word itself ends the wait, not its deadline"
    assert link.number_of(AwaitRestore) == 1
    feed.close()
