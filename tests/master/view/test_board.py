"""Levels with versions: whoever comes gets what it lacks, and nothing grows without bound."""

from __future__ import annotations

import math

import msgspec

from dlrover.master.view.board import MAX_GONE, MAX_SERIES, Board
from dlrover.master.view.series import MAX_POINTS, Series


def test_a_reader_gets_what_changed_since_it_looked_and_nothing_else() -> None:
    board = Board()
    board.put("nodes", "0", {"step": 1})
    board.put("nodes", "1", {"step": 1})
    board.publish()
    assert board.delta(0).is_whole
    assert set(board.delta(0).sections["nodes"]) == {"0", "1"}

    seen = board.version
    board.put("nodes", "0", {"step": 1})  # as before
    board.put("nodes", "1", {"step": 2})
    board.publish()
    delta = board.delta(seen)
    assert not delta.is_whole
    assert delta.sections == {"nodes": {"1": {"step": 2}}}
    assert board.delta(board.version).sections == {}


def test_what_was_not_published_is_not_told() -> None:
    board = Board()
    board.publish()
    board.put("job", "", {"stage": "running"})
    assert board.delta(0).sections == {}


def test_a_reader_that_was_away_hears_who_is_gone_or_gets_everything() -> None:
    board = Board()
    for node in range(MAX_GONE + 5):
        board.put("nodes", str(node), node)
    board.publish()
    seen = board.version
    board.keep("nodes", {str(node) for node in range(1, MAX_GONE + 5)})
    board.publish()
    assert board.delta(seen).sections == {"nodes": {"0": None}}
    board.keep("nodes", {"7"})
    board.publish()
    assert board.delta(seen).is_whole, "too many went to remember each"
    assert board.delta(seen).sections == {"nodes": {"7": 7}}


def test_a_version_of_another_life_gets_everything() -> None:
    board = Board()
    board.put("job", "", 1)
    board.publish()
    assert board.delta(99).is_whole


def test_a_series_stays_bounded_over_any_time_and_keeps_its_ends() -> None:
    series = Series()
    for second in range(20_000):
        series.add(second, float(second), float(second))
    points = series.since(-1)
    assert MAX_POINTS / 4 < len(points) <= MAX_POINTS
    assert points[0][0] < 200
    assert points[-1][0] > 19_000
    assert [value for _, value in points] == sorted(value for _, value in points)


def test_a_reader_of_a_series_gets_new_points_or_all_after_a_merge() -> None:
    board = Board()
    for second in range(10):
        board.point("loss", second, 1.0 / (second + 1))
        board.publish()
    assert board.delta(8).series["loss"].points == [(8.0, 0.111111), (9.0, 0.1)]
    assert not board.delta(8).series["loss"].is_whole
    seen = board.version
    for second in range(10, MAX_POINTS + 10):
        board.point("loss", second, 0.0)
        board.publish()
    assert board.delta(seen).series["loss"].is_whole


def test_numbers_that_are_none_are_shown_as_such_and_names_are_bounded() -> None:
    board = Board()
    board.point("loss", 0.0, 1.0)
    board.point("loss", 1.0, math.nan)
    board.point("loss", 2.0, math.inf)
    for index in range(100):
        board.point(f"metric {index}", 0.0, 1.0)
    board.publish()
    told = msgspec.json.decode(board.encoded(0))
    assert told["series"]["loss"]["points"] == [[0.0, 1.0], [1.0, None], [2.0, None]]
    assert len(told["series"]) == MAX_SERIES
