"""Snapshots of models whose reading the master has not confirmed: they say themselves what they contain."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402

from dlrover.protocol.messages.data import Claim, RestoreAgreed  # noqa: E402
from dlrover.trainer.data import data_steps  # noqa: E402
from dlrover.trainer.sharding_client import ShardingClient  # noqa: E402
from dlrover.trainer.stand_in import StandIn  # noqa: E402
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType  # noqa: E402
from tests.trainer.data.test_sharding_client import WatchedLink  # noqa: E402


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WatchedLink:
    found = WatchedLink()
    monkeypatch.setattr(data_steps, "current_link", lambda: found)
    forget_readers()
    monkeypatch.setenv("DLROVER_SNAPSHOT_DIR", str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    return found


def forget_readers() -> None:
    """As in a process that has just begun."""
    for feed in list(data_steps.feeds):
        data_steps.feeds.discard(feed)
    data_steps.model_loaded.clear()


def reader(link: WatchedLink) -> ShardingClient:
    return ShardingClient("d", 4, 1, 40, num_minibatches_per_shard=2, ahead=4, link=link)


def test_a_snapshot_taken_while_the_master_is_away_knows_what_it_contains(
    link: WatchedLink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = reader(link)
    checkpointer = DdpCheckpointer(tmp_path / "checkpoints")
    seen = torch.zeros(40, dtype=torch.int64)
    shards = [client.fetch_shard(), client.fetch_shard()]
    assert None not in shards
    with client._feed._news:  # an answer that is still on its way would say that the master is there
        assert client._feed._news.wait_for(lambda: len(client._feed._queue) == 3, timeout=30)
    link.may_answer.clear()  # it hears nothing and says nothing from here on
    for step, (shard, begin) in enumerate([(shards[0], 0), (shards[0], 4), (shards[1], 0)], 1):
        assert shard is not None
        seen[shard.start + begin : shard.start + begin + 4] += 1
        client.report_batch_done(4, step=step)
    assert not data_steps.confirm()
    began_at = time.monotonic()
    assert not data_steps.confirm(30)
    assert time.monotonic() - began_at < 10, "nobody waits for a master that is known to be away"
    assert data_steps.unconfirmed(2) == {"d": [Claim(0, 0, 8, 2)]}
    result = checkpointer.save_checkpoint(3, {"seen": seen}, storage_type=StorageType.DISK)
    assert result, "it is in memory"
    assert "The next save goes to storage" in result.message
    assert not checkpointer.wait_latest_checkpoint(30), "not in storage"
    assert not (tmp_path / "checkpoints").exists()

    # The worker dies with its reports; the next life restores the snapshot and reads the rest.
    again = WatchedLink()
    again.inner = link.inner
    forget_readers()
    alone = link.inner._job
    assert alone is not None
    dataset = alone._job.state.data.datasets["d"]
    dataset.end_leases(dataset.all_readers())  # as the end of its round does
    monkeypatch.setattr(data_steps, "current_link", lambda: again)
    state = checkpointer.load_checkpoint()
    checkpointer.close()
    [told] = [each for each in again.asked if isinstance(each, RestoreAgreed)]
    assert (told.step, told.claims) == (3, {"d": (Claim(0, 0, 12, 3),)})
    with reader(again) as client:
        counts: Counter[int] = Counter({index: int(count) for index, count in enumerate(state["seen"])})
        while (shard := client.fetch_shard()) is not None:
            counts.update(range(shard.start, shard.end))
            client.report_batch_done(shard.end - shard.start, step=4)
    assert counts == Counter(range(40))
    link.may_answer.set()


@pytest.mark.parametrize("is_named", [True, False])
def test_a_rank_that_loads_a_model_wants_no_shards_before_the_first_one_has_spoken(
    link: WatchedLink, tmp_path: Path, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(DdpCheckpointer(tmp_path / "checkpoints")) as checkpointer:
        assert checkpointer.save_checkpoint(1, {"weight": torch.ones(4)}, storage_type=StorageType.DISK)
        assert checkpointer.wait_latest_checkpoint(30)
        agreement = checkpointer._engine._agreement
        monkeypatch.setattr(agreement, "ranks", replace(agreement.ranks, global_rank=1))
        path = str(tmp_path / "checkpoints" / "1") if is_named else ""
        with reader(link) as client:
            assert client.fetch_shard() is not None
            assert checkpointer.load_checkpoint(path)["weight"].sum() == 4
            client.report_batch_done(4, step=2)
            assert client._feed.flush()
    assert not [each for each in link.asked if isinstance(each, RestoreAgreed)], "another rank speaks for all"
    assert [each.has_model for each in link.exchanges if each.consumed] == [True]
    assert not link.exchanges[0].has_model


def test_a_checkpoint_that_nobody_helped_to_commit_says_what_is_left_to_read(link: WatchedLink, tmp_path: Path) -> None:
    """Without a master, and in another process of the script: the data go on where the model is."""
    with closing(DdpCheckpointer(tmp_path / "checkpoints")) as checkpointer:
        with reader(link) as client:
            shard = client.fetch_shard()
            assert shard is not None
            client.report_batch_done(4, step=1)
            assert checkpointer.save_checkpoint(1, {"weight": torch.ones(4)}, storage_type=StorageType.DISK)
            client.report_batch_done(4, step=2)
        assert checkpointer.wait_latest_checkpoint(30)
        link.inner = StandIn()
        assert checkpointer.load_checkpoint(str(tmp_path / "checkpoints" / "1"))["weight"].sum() == 4
    with reader(link) as client:
        left: Counter[int] = Counter()
        while (shard := client.fetch_shard()) is not None:
            left.update(range(shard.start, shard.end))
            client.report_batch_done(shard.end - shard.start, step=2)
    assert left == Counter(range(4, 40))


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_model_from_memory_helps_out_books_that_were_lost(link: WatchedLink, tmp_path: Path, is_lost: bool) -> None:
    """What the newest checkpoint in storage says is told only to books that know nothing."""
    with closing(DdpCheckpointer(tmp_path / "checkpoints")) as checkpointer:
        with reader(link) as client:
            for step, storage in enumerate((StorageType.DISK, StorageType.MEMORY), 1):
                assert client.fetch_shard() is not None
                client.report_batch_done(8, step=step)
                assert data_steps.confirm(30), "a save waits only for a moment"
                assert checkpointer.save_checkpoint(step, {"weight": torch.ones(4)}, storage_type=storage)
        assert checkpointer.wait_latest_checkpoint(30)
        if is_lost:
            link.inner = StandIn()
        assert checkpointer.load_checkpoint()
    [told] = [each for each in link.asked if isinstance(each, RestoreAgreed)]
    assert (told.step, bool(told.data_state)) == (2, is_lost)
    with reader(link) as client:
        shard = client.fetch_shard()
        assert shard is not None
        assert shard.start == (8 if is_lost else 16)


def test_a_file_without_a_manifest_lets_nobody_wait(link: WatchedLink, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(4)}, tmp_path / "other.pt")
    with closing(DdpCheckpointer(tmp_path / "checkpoints")) as checkpointer:
        assert checkpointer.load_checkpoint(str(tmp_path / "other.pt"))
    assert not data_steps.model_loaded.is_set()


def test_a_storage_save_that_could_only_be_made_in_memory_is_made_up_for(link: WatchedLink, tmp_path: Path) -> None:
    """As soon as the master is heard again, whatever the next save was to be."""
    client = reader(link)
    checkpointer = DdpCheckpointer(tmp_path / "checkpoints")
    shard = client.fetch_shard()
    assert shard is not None
    link.may_answer.clear()
    client.report_batch_done(4, step=1)
    [feed] = data_steps.feeds
    assert not feed.flush(timeout=0.01)
    assert feed.is_late
    assert checkpointer.save_checkpoint(1, {"step": 1}, storage_type=StorageType.DISK)
    link.may_answer.set()
    assert feed.flush(timeout=30)
    assert not feed.is_late, "whoever answers is waited for again"
    assert checkpointer.save_checkpoint(2, {"step": 2}, storage_type=StorageType.MEMORY)
    assert checkpointer.wait_latest_checkpoint(30)
    assert (tmp_path / "checkpoints" / "dlrover_latest.txt").read_text() == "2"
    checkpointer.close()
    client.close()


def test_a_master_that_answers_is_not_late_any_more_although_nobody_waited_for_it(link: WatchedLink) -> None:
    """Else every later storage save would give a busy master a few milliseconds only."""
    with reader(link) as client:
        shard = client.fetch_shard()
        assert shard is not None
        [feed] = data_steps.feeds
        link.may_answer.clear()
        client.report_batch_done(4, step=1)
        assert not feed.flush(timeout=0.01)
        assert feed.is_late
        link.may_answer.set()
        deadline = time.monotonic() + 30
        while feed.unanswered():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not feed.is_late


def test_a_model_that_was_restored_before_any_feed_existed_is_told_when_the_first_one_begins(tmp_path: Path) -> None:
    """A fresh process: `import dlrover` brings what reads shards only when it is used, after the restore."""
    code = """
import sys
import types
from dlrover.trainer.data import data_steps
from dlrover.trainer.torch.flash_checkpoint.restoring import data_return
rank_1 = types.SimpleNamespace(ranks=types.SimpleNamespace(global_rank=1))
assert "dlrover.trainer.data.shard_feed" not in sys.modules
data_return.tell_restored(rank_1, None, "unused", None)
assert not data_steps.model_loaded.is_set(), "not before there are shards: asking costs a restart some milliseconds"
from dlrover.trainer.sharding_client import ShardingClient
client = ShardingClient("d", 4, 1, 40)
assert data_steps.model_loaded.is_set()
data_steps.model_loaded.clear()
data_return.tell_restored(rank_1, None, "unused", None)
assert data_steps.model_loaded.is_set(), "at once from now on"
client.close()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
