"""What the job does when the watch has found that it stands still."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.commit_order import replay
from dlrover.core.failures.hangs import MAX_CULPRITS, MAX_EVIDENCE
from dlrover.protocol.errors import Rejected
from dlrover.protocol.messages.goodput import TimeClass
from dlrover.protocol.messages.job import (
    End,
    ExitReason,
    FailureKind,
    Join,
    Micros,
    NodeId,
    NodeRank,
    RestartPolicy,
    Round,
    Run,
    StopCause,
)
from dlrover.protocol.messages.watch import (
    MAX_TEXT,
    ActionKind,
    Culprit,
    FaultClass,
    FaultFound,
    HangFound,
    Verdict,
)
from tests.core.scene import Scene, terms


def a_verdict(scene: Scene, name: str = "b", action: ActionKind = ActionKind.RESTART_WORKERS) -> Verdict:
    return Verdict(
        fault=FaultClass.STOPPED,
        diagnostician="training_hang",
        culprits=(Culprit(node=NodeId(scene.agents[name].node), global_rank=1),),
        evidence=("Rank 1 is stopped.",),
        confidence=0.99,
        action=action,
    )


def two(restarts: RestartPolicy | None = None) -> Scene:
    scene = Scene(terms(2, restarts=restarts))
    scene.attach("a")
    scene.attach("b")
    scene.join("a")
    scene.join("b")
    assert scene.job.state.rendezvous.is_active
    return scene


def meet_again(scene: Scene) -> None:
    scene.join("a")
    scene.join("b")
    assert scene.job.state.rendezvous.is_active


def found(scene: Scene, **details: object) -> HangFound:
    round_ = scene.job.state.rendezvous.round
    return HangFound(round=Round(round_), verdict=a_verdict(scene, **details), stalled_for=6.0)  # type: ignore[arg-type]


def test_a_hang_restarts_all_workers_and_is_charged_to_the_culprits_node() -> None:
    scene = two()
    scene.at(10).do(found(scene))
    for agent in scene.agents.values():
        wish = scene.job.desired(agent.node).wish
        assert isinstance(wish, Join)
        assert wish.cause is StopCause.FAILURE
    meet_again(scene)
    restarts = scene.job.state.restarts
    assert restarts.num_restarts == 1
    assert restarts.spent == {scene.agents["b"].node_rank: 1}
    assert restarts.incident is not None
    assert restarts.incident.first.failure.kind is FailureKind.DIAGNOSED
    assert "stopped" in restarts.incident.first.failure.message


def test_a_finding_about_a_former_round_changes_nothing() -> None:
    scene = two()
    late = found(scene)
    scene.at(10).do(late)
    with pytest.raises(Rejected, match="not the active one"):
        scene.do(late)
    meet_again(scene)
    with pytest.raises(Rejected, match="not the active one"):
        scene.do(late)


def test_a_verdict_that_only_notifies_is_no_command() -> None:
    scene = two()
    with pytest.raises(Rejected, match="changes nothing"):
        scene.do(found(scene, action=ActionKind.NOTIFY))


def test_with_no_restarts_allowed_a_hang_ends_the_job_with_its_reason() -> None:
    scene = two(RestartPolicy(max_restarts=0))
    scene.at(10).do(found(scene))
    end = scene.job.end
    assert end is not None
    assert end.reason is ExitReason.HANG_ERROR
    assert "Rank 1 is stopped" in end.message


def test_too_many_hangs_within_an_hour_end_the_job_and_old_ones_do_not_count() -> None:
    scene = two(RestartPolicy(max_restarts=100))
    for number in range(1, 6):
        scene.at(100 * number).do(found(scene))
        meet_again(scene)
    assert scene.job.end is None
    scene.at(5000)  # an hour later
    for _ in range(6):
        scene.now = Micros(scene.now + 1_000_000)
        scene.do(found(scene))
        meet_again(scene)
    scene.do(found(scene))
    assert scene.job.end is not None
    assert scene.job.end.reason is ExitReason.HANG_ERROR
    assert isinstance(scene.job.desired(scene.agents["a"].node).wish, End)
    assert replay(None, scene.journal).job.digest() == scene.job.digest()


NOBODY = Culprit(node=NodeId(-1), global_rank=-1)


def fault(scene: Scene, action: ActionKind, **details: object) -> FaultFound:
    return FaultFound(
        round=scene.job.state.rendezvous.round, verdict=replace(a_verdict(scene, action=action), **details)
    )


class TestFaultFound:
    """The round makes progress, and the verdict says to act all the same."""

    def test_it_restarts_the_workers_and_counts_as_a_hang(self) -> None:
        scene = two()
        scene.at(10).do(fault(scene, ActionKind.RESTART_WORKERS))
        assert isinstance(scene.wish("a"), Join)
        assert [hang.at for hang in scene.job.state.hangs.recent] == [scene.now]
        assert scene.job.state.goodput.places[NodeRank(0)].micros.get(TimeClass.HANG, 0) == 0, "it made progress"

    def test_a_node_that_no_platform_replaces_is_not_restarted_either(self) -> None:
        scene = two()
        outcome = scene.at(10).do(fault(scene, ActionKind.RELAUNCH_NODE))
        assert isinstance(scene.wish("a"), Run)
        assert len(outcome.verdicts) == 1
        assert scene.job.state.hangs.recent == []

    @pytest.mark.parametrize(("reasoning", "said"), [("It never will.", "It never will."), ("", "says to stop")])
    def test_it_may_end_the_job(self, reasoning: str, said: str) -> None:
        scene = two()
        scene.at(10).do(fault(scene, ActionKind.STOP_JOB, reasoning=reasoning))
        assert scene.end.reason is ExitReason.HANG_ERROR
        assert said in scene.end.message


class TestRefusedFindings:
    @pytest.mark.parametrize("seconds", [-0.1, float("inf"), float("nan")])
    def test_a_hang_lasts_a_finite_time(self, seconds: float) -> None:
        scene = two()
        with pytest.raises(Rejected) as refused:
            scene.do(replace(found(scene), stalled_for=seconds))
        assert refused.value.code == "malformed"
        scene.do(replace(found(scene), stalled_for=0.0))

    def test_after_the_end_nothing_is_found(self) -> None:
        scene = two()
        late = found(scene)
        scene.stop()
        with pytest.raises(Rejected) as refused:
            scene.do(late)
        assert refused.value.code == "job-ended"

    @pytest.mark.parametrize(
        ("largest", "larger"),
        [
            ({"evidence": ("x",) * MAX_EVIDENCE}, {"evidence": ("x",) * (MAX_EVIDENCE + 1)}),
            ({"evidence": ("x" * MAX_TEXT,)}, {"evidence": ("x" * (MAX_TEXT + 1),)}),
            ({"reasoning": "x" * MAX_TEXT}, {"reasoning": "x" * (MAX_TEXT + 1)}),
            ({"diagnostician": "x" * MAX_TEXT}, {"diagnostician": "x" * (MAX_TEXT + 1)}),
            ({"culprits": (NOBODY,) * MAX_CULPRITS}, {"culprits": (NOBODY,) * (MAX_CULPRITS + 1)}),
        ],
    )
    def test_a_verdict_has_a_size(self, largest: dict[str, object], larger: dict[str, object]) -> None:
        scene = two()
        with pytest.raises(Rejected) as refused:
            scene.do(fault(scene, ActionKind.RESTART_WORKERS, **larger))
        assert refused.value.code == "too-large"
        scene.do(fault(scene, ActionKind.RESTART_WORKERS, **largest))
