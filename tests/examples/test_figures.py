"""The arithmetic behind the benchmark's tables."""

import statistics

import pytest
from figures import Summary, percentile, ratio, seconds, summarise, table, times
from hypothesis import given
from hypothesis import strategies as st

SAMPLES = st.lists(st.floats(min_value=0, max_value=1e6), min_size=1, max_size=50)


def test_a_percentile_lies_between_the_nearest_samples() -> None:
    samples = [4.0, 1.0, 3.0, 2.0, 5.0]
    assert percentile(samples, 0) == 1.0
    assert percentile(samples, 50) == 3.0
    assert percentile(samples, 95) == pytest.approx(4.8)
    assert percentile(samples, 100) == 5.0


def test_one_sample_is_every_percentile() -> None:
    assert percentile([7.0], 5) == percentile([7.0], 95) == 7.0


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_a_percentile_without_meaning_is_refused(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(samples, percent)


@given(SAMPLES)
def test_a_summary_is_ordered_and_has_the_median(samples: list[float]) -> None:
    summary = summarise(samples)
    assert summary is not None
    assert summary.num_samples == len(samples)
    assert summary.median == statistics.median(samples)
    assert summary.lowest <= summary.median <= summary.highest
    assert summary.p95 <= summary.highest * (1 + 1e-12)  # interpolation may round up in the last bit


def test_nothing_measured_gives_no_figure() -> None:
    assert summarise([]) is None
    assert ratio(None, summarise([1.0])) is None
    assert ratio(summarise([1.0]), None) is None
    assert (seconds(None), times(None)) == ("-", "-")


def test_a_ratio_compares_medians() -> None:
    slow, fast = Summary(3, 4.0, 9.0, 1.0, 9.0), Summary(3, 0.4, 0.5, 0.3, 0.5)
    assert times(ratio(slow, fast)) == "10.00x"


def test_a_table_is_aligned_markdown() -> None:
    assert table(["who", "s"], [["torchrun", "4.1"], ["ours", "0.3"]]).splitlines() == [
        "| who      |   s |",
        "|----------|----:|",
        "| torchrun | 4.1 |",
        "| ours     | 0.3 |",
    ]
