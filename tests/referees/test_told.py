"""What the core says beside what is written down. All 200 seeds are compared by `python -m tests.referees`."""

from __future__ import annotations

import pytest

from dlrover.core.job import DECISION_VERSION
from tests.referees.told import SEEDS, TOLD, told_of

SAMPLE = range(1, 201, 10)


def recorded() -> list[str]:
    return TOLD.read_text().splitlines()


def test_what_is_told_is_that_of_this_version_of_the_decisions() -> None:
    version, *seeds = recorded()
    assert version == f"decision version {DECISION_VERSION}", "record it: python -m tests.referees --record"
    assert [int(line.split()[0]) for line in seeds] == list(SEEDS)


@pytest.mark.parametrize("seed", SAMPLE)
def test_a_simulated_job_says_what_it_said(seed: int) -> None:
    assert told_of(seed) == recorded()[seed], "a reply, an event or an answer changed: is that meant?"
