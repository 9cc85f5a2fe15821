"""Bad input about data, line by line: a clear error that says what to do, and nothing is lost by it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.data import (
    AskDataCheckpoint,
    AskDataset,
    Consumption,
    DatasetSpec,
    ExchangeShards,
    ExtendStream,
    RegisterDataset,
    RestoreDataset,
    ShardError,
    StorageKind,
)
from dlrover.protocol.messages.job import Command
from tests.core.data.test_books import SPEC, Reading
from tests.core.scene import terms

STREAM = DatasetSpec(name="s", size=-1, shard_size=4, storage=StorageKind.STREAM, partitions={"p": 0})


@pytest.fixture
def scene() -> Reading:
    """Worker a holds shards 1 and 2 and has read a half of the first; worker b holds 3."""
    scene = Reading(terms(2)).begin("a", "b")
    scene.take("a", 2)
    scene.take("b")
    scene.exchange("a", consumed=(Consumption(1, 5),))
    return scene


def spec(**changes: Any) -> RegisterDataset:
    changed = replace(SPEC, **({"name": "new"} | changes))
    return RegisterDataset(dataset=changed.name, spec=changed)


def exchange(**fields: Any) -> ExchangeShards:
    return ExchangeShards(**({"dataset": "d"} | fields))


def back_to(content: str, dataset: str = "d") -> RestoreDataset:
    return RestoreDataset(dataset=dataset, content=content)


ORIGINAL: dict[str, Any] = {"dataset_name": "d", "todo": [], "doing": [], "epoch": 1, "splitter": None}

WRONG: list[tuple[str, Command, str, str]] = [
    ("registered with another size", spec(name="d", size=101), "dataset-differs", "size 100 and 101"),
    ("registered with another shard size", spec(name="d", shard_size=5), "dataset-differs", "shard_size 10 and 5"),
    ("registered with another seed", spec(name="d", seed=4), "dataset-differs", "or another name"),
    ("registered with another order", spec(name="d", shuffle=True), "dataset-differs", "shuffle False and True"),
    ("an empty dataset", spec(size=0), "malformed", "size of at least 1"),
    ("a negative size", spec(size=-5), "malformed", "size of at least 1"),
    ("shards of nothing", spec(shard_size=0), "malformed", "at least 1"),
    ("batches of nothing", spec(batch_size=0), "malformed", "at least 1"),
    ("a batch over the dataset", spec(batch_size=101), "malformed", "fewer than one batch of 101"),
    ("more epochs than can be counted", spec(size=10**8, num_epochs=1 << 40), "malformed", "Without an end it has 0 epochs"),
    ("a stream without end", spec(storage=StorageKind.STREAM, size=1 << 63, partitions={"p": 0}), "malformed", "more than can be counted"),
    ("no name", spec(name=""), "malformed", "needs a name"),
    ("a name without end", spec(name="n" * 300), "malformed", "needs a name"),
    ("a stream without partitions", spec(storage=StorageKind.STREAM, size=-1), "malformed", "give its partitions"),
    ("a shuffled stream", spec(storage=StorageKind.STREAM, size=-1, partitions={"p": 0}, shuffle=True), "malformed", "shuffle"),
    ("a partition before its beginning", spec(storage=StorageKind.STREAM, size=-1, partitions={"p": -1}), "malformed", "'p'"),
    ("an unknown dataset", exchange(dataset="no", want=1), "unknown-dataset", "register it first. Known: d"),
    ("going back with an unknown dataset", back_to("{}", "no"), "unknown-dataset", "Known: d"),
    ("an end of something that is no stream", ExtendStream(dataset="d", ends={"p": 1}), "malformed", "no stream"),
    ("a shard never taken", exchange(consumed=(Consumption(77, 1),)), "stale-lease", "held by no worker"),
    ("a shard of another", exchange(consumed=(Consumption(3, 1),)), "stale-lease", "local rank 0 of node"),
    ("an error of a shard of another", exchange(failed=(ShardError(3, "x"),)), "stale-lease", "not by the sender"),
    ("giving back a shard of another", exchange(unused=(3,)), "stale-lease", "not by the sender"),
    ("more than there is", exchange(consumed=(Consumption(1, 6),)), "malformed", "6 more were reported"),
    ("less than something", exchange(consumed=(Consumption(1, 0),)), "malformed", "0 more were reported"),
    ("a step that cannot be", exchange(consumed=(Consumption(1, 1, -2),)), "malformed", "of a report must be from -1"),
    ("one shard in two ways", exchange(failed=(ShardError(1, "x"),), unused=(1,)), "malformed", "two ways at once"),
    ("a right report with a wrong one", exchange(consumed=(Consumption(1, 5), Consumption(77, 1))), "stale-lease", "no worker"),
    ("too many at once", exchange(want=10**6), "malformed", "Up to 1024"),
    ("fewer than none", exchange(want=-1), "malformed", "not -1"),
    ("no text", back_to(""), "malformed", "Nothing has changed"),
    ("half a text", back_to('{"dataset_name": "d", "todo": [[0, 1'), "malformed", "Nothing has changed"),
    ("a text of something else", back_to("[1, 2]"), "malformed", "cannot be read"),
    ("a text without what matters", back_to('{"dataset_name": "d"}'), "malformed", "KeyError: 'epoch'"),
    ("a text of another dataset", back_to(json.dumps(ORIGINAL | {"dataset_name": "e"})), "dataset-differs", "'e'"),
    ("a text with records that are not there", back_to(json.dumps(ORIGINAL | {"todo": [[0, 101]]})), "malformed", "0 to 101"),
    ("a text that runs backwards", back_to(json.dumps(ORIGINAL | {"doing": [[9, 4]]})), "malformed", "9 to 4"),
    ("a text of the future", back_to(json.dumps(ORIGINAL | {"version": 9})), "malformed", "Update dlrover"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "code", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_it_is_refused_with_a_clear_error_and_nothing_is_lost(
    scene: Reading, command: Any, code: str, words: str
) -> None:
    before = scene.job.digest()
    with pytest.raises(Rejected) as caught:
        scene.send("a", replace(command, **scene.who("a")))
    assert caught.value.code == code
    assert words in str(caught.value)
    assert scene.job.digest() == before
    scene.exchange("a", consumed=(Consumption(1, 5), Consumption(2, 10)))
    scene.exchange("b", consumed=(Consumption(3, 10),))
    while shards := scene.take("a"):
        scene.consume("a", shards[0])
    assert (scene.state().num_consumed, scene.state().is_complete) == (100, True)


@pytest.mark.parametrize("query", [AskDataset(dataset="no"), AskDataCheckpoint(dataset="no")])
def test_a_question_about_an_unknown_dataset_is_refused(scene: Reading, query: Any) -> None:
    with pytest.raises(Rejected, match="register it first"):
        scene.job.ask(query)


def test_a_partition_that_ends_before_what_was_given_out_of_it_is_refused() -> None:
    scene = Reading(terms(1)).begin("a", spec=STREAM)
    scene.exchange("a", "s", want=1)
    with pytest.raises(Rejected, match="cannot end before"):
        scene.send("a", ExtendStream(dataset="s", ends={"p": 2}, **scene.who("a")))  # type: ignore[arg-type]
