"""What a node tells of itself may be anything: it becomes an event that terminals, pages and files can bear."""

from __future__ import annotations

import pytest

from dlrover.core.goodput.events import clean, of_node
from dlrover.protocol.messages.goodput import MAX_LABELS
from dlrover.protocol.messages.job import Incarnation, Micros, NodeId
from dlrover.protocol.messages.watch import MAX_TEXT, NodeEvent


def told(level: str = "warn", name: str = "fan", text: str = "slow", labels: dict[str, str] | None = None) -> NodeEvent:
    return NodeEvent(
        node=NodeId(3), incarnation=Incarnation(1), level=level, name=name, text=text, rank=7, labels=labels or {}
    )


def test_it_keeps_who_when_and_what() -> None:
    event = of_node(told(labels={"speed": "900"}), Micros(5))
    assert (event.node, event.rank, event.at, event.number) == (3, 7, 5, 0)
    assert (event.level, event.name, event.text, event.labels) == ("warn", "fan", "slow", {"speed": "900"})


@pytest.mark.parametrize(
    ("level", "shown"), [("info", "info"), ("warn", "warn"), ("error", "error"), ("", "info"), ("fatal", "info")]
)
def test_a_level_that_nobody_knows_is_information(level: str, shown: str) -> None:
    assert of_node(told(level), Micros(0)).level == shown


def test_an_event_has_a_name() -> None:
    assert of_node(told(name=""), Micros(0)).name == "node-event"


def test_too_many_labels_are_cut_and_long_ones_shortened() -> None:
    event = of_node(told(labels={f"{number:02}" + "k" * 80: "v" * 3000 for number in range(MAX_LABELS + 1)}), Micros(0))
    assert len(event.labels) == MAX_LABELS
    assert {len(key) for key in event.labels} == {64}
    assert {len(value) for value in event.labels.values()} == {MAX_TEXT}


def test_long_texts_end_with_a_mark() -> None:
    assert clean("x" * 10, 10) == "x" * 10
    assert clean("x" * 11, 10) == "x" * 9 + "…"


def test_what_no_terminal_can_bear_is_replaced() -> None:
    assert clean("a\nb\x1b[1m\ud800", 100) == "a\nb\ufffd[1m\ufffd"
