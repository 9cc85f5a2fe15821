"""
What the core says and knows after each step of the recorded lives. After a wanted change: `python -m tests.referees --record`.

A life is called by a test that its first form comes from; `python -m tests.core.lives 17 5` shows what comes out of the steps 5 and on of life 17.
"""

from __future__ import annotations

import functools

import pytest

from tests.core.lives.stage import DIGESTS, Life, digests, read_lives, recorded_digests

LIVES = {life.name: life for life in read_lives()}


@functools.cache
def recorded() -> dict[str, list[str]]:
    return recorded_digests(DIGESTS.read_text())


def first_difference(life: Life, expected: list[str]) -> str:
    for number, (step, found) in enumerate(zip(life.steps, digests(life), strict=True)):
        if number >= len(expected) or found != expected[number]:
            return f"step {number}: {step}"
    return ""


def test_each_life_has_its_recording() -> None:
    assert list(recorded()) == list(LIVES)


TOGETHER = 4
"""Lives of one test: most take a few milliseconds."""
GROUPS = [list(LIVES)[first : first + TOGETHER] for first in range(0, len(LIVES), TOGETHER)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]} to {names[-1][:4]}")
def test_lives_go_as_they_went(names: list[str]) -> None:
    for name in names:
        difference = first_difference(LIVES[name], recorded()[name])
        assert not difference, f"{name}, {difference}: something else came out, or is known now. Is that meant?"
