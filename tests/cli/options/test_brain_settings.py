"""Which Brain a job speaks with."""

from __future__ import annotations

import argparse

import pytest

from dlrover.cli.options.brain_settings import ADDRESS, brain_of
from dlrover.protocol.errors import ConfigError


def options(**given: str) -> argparse.Namespace:
    return argparse.Namespace(**{"brain": "", "brain_token_file": "", "brain_ca": "", "recipe": "", **given})


def test_a_wrong_address_in_a_variable_costs_the_job_its_brain_only() -> None:
    terms, notes = brain_of(options(), {ADDRESS: "http://brain:8000"})
    assert terms is None
    assert len(notes) == 1
    assert notes[0].startswith("The job runs without Brain: ")
    assert ADDRESS in notes[0]


def test_a_wrong_address_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="--brain http://brain:8000"):
        brain_of(options(brain="http://brain:8000"), {ADDRESS: "brain:50001"})


def test_the_command_line_wins_over_the_variable() -> None:
    terms, notes = brain_of(options(brain="here:7"), {ADDRESS: "there:8"})
    assert terms is not None
    assert (terms.address, notes) == ("here:7", ())


def test_a_recipe_without_brain_is_refused() -> None:
    with pytest.raises(ConfigError, match="--recipe nightly has no effect without Brain"):
        brain_of(options(recipe="nightly"), {})
