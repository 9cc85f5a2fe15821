"""The first round waits for the pre-check, for so long as it may take."""

from __future__ import annotations

import pytest

from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.job import ExitReason, Join, MasterStarted, NodeId, PlatformId, Run, Wait
from dlrover.protocol.messages.precheck import (
    OperatorResult,
    OperatorState,
    PreCheckBegan,
    PreCheckNoted,
    PreCheckStage,
)
from dlrover.protocol.messages.requests import RelaunchNode
from tests.core.fleet.fleet_scene import FleetScene
from tests.core.scene import Scene, micros, terms

PASSED = (OperatorResult(name="Disks", state=OperatorState.PASSED, num_tries=1),)


def checked(limit: float = 900.0) -> Scene:
    scene = Scene(terms(2))
    scene.do(PreCheckBegan(operators=("Disks",), limit=limit))
    scene.gather("a", "b")
    return scene


def test_nobody_trains_before_it_has_passed_and_the_status_says_why() -> None:
    scene = checked()
    assert isinstance(scene.wish("a"), Wait)
    assert "the pre-check is not over" in scene.job.status().verdict
    assert scene.job.status().pre_check.stage is PreCheckStage.CHECKING
    scene.at(30).do(PreCheckNoted(stage=PreCheckStage.PASS, results=PASSED, message="The pre-check passed."))
    assert isinstance(scene.wish("a"), Run)
    assert scene.job.status().pre_check.results == PASSED
    with pytest.raises(Rejected, match="Training has begun"):
        scene.do(PreCheckNoted(stage=PreCheckStage.FAIL, message="too late"))


def test_a_failure_for_good_ends_the_job() -> None:
    scene = checked()
    scene.do(PreCheckNoted(stage=PreCheckStage.FAIL, message="The disks are full."))
    assert scene.job.end is not None
    assert (scene.job.end.reason, scene.job.end.exit_code) == (ExitReason.PRE_CHECK_FAILED, 1)
    assert "The disks are full." in scene.job.end.message


def test_its_time_ends_and_training_begins_without_its_word() -> None:
    scene = checked(limit=60.0)
    assert scene.job.next_deadline() == micros(60)
    scene.tick(60)
    assert isinstance(scene.wish("b"), Run)
    assert scene.job.status().pre_check.stage is PreCheckStage.PASS
    assert "Disks is still open" in scene.job.status().pre_check.message


def test_a_master_that_takes_over_begins_it_again_and_a_job_without_one_does_not_wait() -> None:
    scene = checked()
    scene.at(20).do(MasterStarted(2, "a-job"))
    scene.do(PreCheckBegan(operators=("Disks",), limit=50.0))
    scene.tick(70)
    assert scene.job.status().pre_check.stage is PreCheckStage.PASS
    plain = Scene(terms(1)).gather("a")
    assert isinstance(plain.wish("a"), Run)
    assert plain.job.status().pre_check.stage is PreCheckStage.DISABLED
    with pytest.raises(Rejected, match="Training has begun"):
        plain.do(PreCheckBegan(operators=("Disks",), limit=50.0))


def test_rubbish_is_refused() -> None:
    scene = Scene(terms(1))
    for limit, names in ((0.0, ("a",)), (float("nan"), ("a",)), (1.0, ())):
        with pytest.raises(Rejected):
            scene.do(PreCheckBegan(operators=names, limit=limit))
    with pytest.raises(Rejected, match="No pre-check"):
        scene.do(PreCheckNoted(stage=PreCheckStage.PASS))


def test_a_node_from_which_nobody_came_can_be_exchanged() -> None:
    scene = FleetScene.of(2).run(0, 1).come(0)
    scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(1), reason="nobody came"))
    assert scene.fleet.holder(scene.node(1).node_type, 1).id == 2  # type: ignore[union-attr]
    assert isinstance(scene.wish("n0"), Join)
    with pytest.raises(Rejected, match="no node 99"):
        scene.do(RelaunchNode(node=NodeId(-1), platform_node=PlatformId(99)))
