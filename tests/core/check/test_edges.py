"""The last value that is taken, and the first that is not."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.core.check.evidence import CheckRules
from dlrover.core.check.pre_check import is_wanted
from dlrover.protocol.messages.precheck import PreCheckStage


@pytest.mark.parametrize(
    "rules",
    [
        {"straggler_ratio": 1.0},
        {"straggler_ratio": 999_999.9},
        {"straggler_floor_ms": 0.0, "straggler_share": 0.0},
        {"straggler_floor_ms": 999_999_999_999.0, "straggler_share": 999_999.9},
        {"max_phases": 2, "max_straggler_phases": 1},
    ],
)
def test_rules_at_their_limits(rules: dict[str, Any]) -> None:
    CheckRules(**rules)


@pytest.mark.parametrize(
    "rules",
    [
        {"straggler_ratio": 0.99},
        {"straggler_ratio": 1e6},
        {"straggler_floor_ms": -0.1},
        {"straggler_floor_ms": 1e12},
        {"straggler_share": -0.1},
        {"straggler_share": 1e6},
        {"max_phases": 1},
        {"max_straggler_phases": 0},
    ],
)
def test_rules_beyond_their_limits(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"straggler|phases"):
        CheckRules(**rules)


@pytest.mark.parametrize("stage", PreCheckStage)
def test_a_master_runs_the_pre_check_unless_it_has_an_answer_or_training_began(stage: PreCheckStage) -> None:
    assert is_wanted(stage, 0) == (stage in (PreCheckStage.DISABLED, PreCheckStage.CHECKING))
    assert not is_wanted(stage, 1)
