"""What `dlrover scale --why` prints and draws, from a status with everything in it."""

from __future__ import annotations

from xml.etree import ElementTree

from dlrover.cli.show.scaling import draw, why_lines
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.identity import Micros
from dlrover.protocol.messages.scaling import (
    Brake,
    Configuration,
    GroupSize,
    RefusedSize,
    RoomSeen,
    ScaleCandidate,
    ScaleDecision,
    ScaleFit,
    ScaleMode,
    ScaleOutcome,
    ScalingStatus,
    SizePlan,
    SpeedPoint,
)

NOW = Micros(1_000_000_000)
BACK = "3 nodes were slower than 2: 14.1 records/s instead of 18.7."


def status() -> ScalingStatus:
    return ScalingStatus(
        mode=ScaleMode.ON,
        now=NOW,
        sentence=BACK,
        brake=Brake.COOL_DOWN,
        brake_opens_at=Micros(NOW + 12_000_000),
        min_nodes=1,
        max_nodes=8,
        target=2,
        configuration=Configuration(groups=(GroupSize(NodeType.WORKER, 2, 4.0, 2048),), micro_batch=8),
        speed=18.7,
        unit="records/s",
        cost=0.8,
        decisions=tuple(
            ScaleDecision(
                number=each, at=NOW, outcome=ScaleOutcome.TAKEN_BACK, sentence=BACK, speed_before=18.7, speed_after=14.1
            )
            for each in range(7)
        ),
        candidates=tuple(
            ScaleCandidate(
                plan=SizePlan(),
                text=f"{nodes} nodes",
                nodes=nodes,
                speed=10.0 * nodes,
                gain=0.1,
                resources=1.5,
                cost=0.8,
                brake=Brake.TAKEN_BACK,
                why="it was taken back",
            )
            for nodes in range(3, 10)
        ),
        fit=ScaleFit(
            features=("1", "network"), thetas=(0.1, 0.02), error=0.034, num_runs=5, num_counts=3, is_used=True
        ),
        points=(
            SpeedPoint(1, 10.0),
            SpeedPoint(2, 18.7),
            SpeedPoint(1, 10.1, True),
            SpeedPoint(2, 18.5, True),
            SpeedPoint(8, 40.0, True),
        ),
        refused=(RefusedSize(text="3 nodes", until=Micros(NOW + 1_800_000_000), times=1),),
        room=(RoomSeen(most=8, reason="2 of at most 8 nodes run"),),
        warnings=("worker-1 will reach its memory limit.",),
    )


def test_why_gives_sentence_five_candidates_brake_and_error() -> None:
    text = "\n".join(why_lines(status()))
    assert f"Why: {BACK}" in text
    assert "Brake: 5, cool-down; it opens in 12 s" in text
    assert text.count("held by brake 10, taken-back") == 5
    assert "Fit: median error 3.4% on 5 runs of 3 sizes, used." in text
    assert text.count("before 18.7, came 14.1 records/s") == 5, "both speeds, of the last five decisions"
    assert "2 worker of 4 cores, 2048 MiB, micro-batch 8 x 1: 18.7 records/s" in text
    assert "Room for worker: at most 8 nodes" in text
    assert "Undone 1 times: 3 nodes; it is not tried again for 1800 s." in text
    assert "Forecast by nodes (records/s): 1: 10.1, 2: 18.5, 8: 40" in text
    assert "Warning: worker-1" in text


def test_a_job_that_decided_nothing_yet_says_so() -> None:
    text = "\n".join(why_lines(ScalingStatus()))
    assert "Automatic scaling is off" in text
    assert "no decision yet" in text
    assert "Fit: none yet." in text


def test_the_picture_has_the_curve_the_points_and_the_mark() -> None:
    root = ElementTree.fromstring(draw(status()))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("polyline") == 1
    dots = [element for element in root.iter() if element.tag.endswith("rect") and element.get("rx") == "4"]
    assert len(dots) == 2
    assert any(element.text == "2 nodes" for element in root.iter())
    assert "There is no measurement yet" in draw(ScalingStatus())
