"""What must stay the same while the inside is rebuilt. All 200 traces are compared by `python -m tests.referees`."""

from __future__ import annotations

import sys

import pytest

from dlrover.core.job import DECISION_VERSION
from tests.referees import recordings
from tests.referees.recordings import first_difference

SAMPLE = range(1, 201, 10)


def recorded_traces() -> list[str]:
    return recordings.TRACES.read_text().splitlines()


def test_the_traces_are_those_of_this_version_of_the_decisions() -> None:
    version, *seeds = recorded_traces()
    assert version == f"decision version {DECISION_VERSION}", "record them: python -m tests.referees --record"
    assert [int(line.split()[0]) for line in seeds] == list(recordings.SEEDS)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_simulated_job_goes_as_it_went(seed: int) -> None:
    assert recordings.trace_of(seed) == recorded_traces()[seed], "a decision changed: is that meant?"


def test_a_recorded_journal_is_replayed_to_the_same_decisions() -> None:
    assert not first_difference(recordings.TIMELINE.read_text(), recordings.timeline(), "timeline")


def test_scripts_find_the_same_names_that_take_the_same() -> None:
    pytest.importorskip("torch")
    assert not first_difference(recordings.NAMES.read_text(), recordings.names(), "names")


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="recorded with Python 3.11: others lay out help differently"
)
def test_every_help_reads_as_it_did() -> None:
    assert not first_difference(recordings.HELP.read_text(), recordings.helps(), "help")


def test_the_first_difference_is_told_with_its_line() -> None:
    assert first_difference("a\nb\n", "a\nc\n", "it") == "it, line 2: recorded 'b', now 'c'"
    assert first_difference("a\n", "a\nc\n", "it") == "it, line 2: recorded '', now 'c'"
    assert first_difference("a\n", "a\n", "it") == ""
