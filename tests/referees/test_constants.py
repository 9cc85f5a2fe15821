"""What the core decides by stays as recorded; `python -m tests.referees --record` writes down a change that is meant."""

from __future__ import annotations

from tests.referees.constants import CONSTANTS, constants
from tests.referees.recordings import first_difference


def test_every_constant_of_the_core_is_as_recorded() -> None:
    difference = first_difference(CONSTANTS.read_text(), constants(), "constants")
    assert not difference, "a limit, a default or a table changed: is that meant, and does DECISION_VERSION grow?"
