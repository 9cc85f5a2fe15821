"""The rules by which nodes are replaced, each in its table: phases, exit reasons, relaunches, resources, critical nodes."""

from __future__ import annotations

import itertools
import signal

import pytest

from dlrover.core.fleet.relaunch import (
    NodeEnd,
    Terms,
    critical_ranks,
    decide,
    more_memory,
    next_phase,
    priorities,
    reason_to_stop,
    smaller,
)
from dlrover.protocol.messages.fleet import (
    NodeEventKind,
    NodeExit,
    NodePhase,
    NodeType,
    Resource,
    Strategy,
    exit_reason_of,
)
from dlrover.protocol.messages.job import ExitReason

INITIAL, P, R, S, F, D, U = (
    NodePhase.INITIAL,
    NodePhase.PENDING,
    NodePhase.RUNNING,
    NodePhase.SUCCEEDED,
    NodePhase.FAILED,
    NodePhase.DELETED,
    NodePhase.UNKNOWN,
)
REACHED = {
    INITIAL: {P, R, S, F, D},
    P: {R, S, F, D},
    R: {S, F, D},
    S: {D},
    F: {D},
    D: set(),
    U: set(),
}


@pytest.mark.parametrize(("current", "shown"), list(itertools.product(NodePhase, NodePhase)))
@pytest.mark.parametrize("kind", [NodeEventKind.ADDED, NodeEventKind.MODIFIED])
def test_a_phase_is_entered_only_from_those_before_it(
    current: NodePhase, shown: NodePhase, kind: NodeEventKind
) -> None:
    assert next_phase(current, kind, shown) == (shown if shown in REACHED[current] else None)


@pytest.mark.parametrize(("current", "shown"), list(itertools.product(NodePhase, NodePhase)))
def test_a_deletion_is_one_whatever_phase_the_platform_last_saw(current: NodePhase, shown: NodePhase) -> None:
    """Also of a node that it last saw running."""
    expected = D if current not in (D, U) else None
    assert next_phase(current, NodeEventKind.DELETED, shown) == expected


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (0, NodeExit.SUCCEEDED),
        (137, NodeExit.KILLED),
        (143, NodeExit.KILLED),
        (-9, NodeExit.KILLED),
        (-15, NodeExit.KILLED),
        (247, NodeExit.OOM),
        (1, NodeExit.FATAL),
        (134, NodeExit.FATAL),
        (-6, NodeExit.FATAL),
        (201, NodeExit.HARDWARE),
        (202, NodeExit.HARDWARE),
        (14, NodeExit.HARDWARE),
        (128, NodeExit.HARDWARE),
        (2, NodeExit.UNKNOWN),
        (139, NodeExit.UNKNOWN),
        (None, NodeExit.NONE),
    ],
)
def test_the_exit_code_tells_the_reason(exit_code: int | None, reason: NodeExit) -> None:
    assert exit_reason_of(exit_code) is reason


def test_the_kernel_knows_better_than_the_exit_code() -> None:
    assert exit_reason_of(137, is_out_of_memory=True) is NodeExit.OOM
    assert exit_reason_of(None, signal=signal.SIGTERM) is NodeExit.KILLED
    assert exit_reason_of(None, signal=signal.SIGSEGV) is NodeExit.UNKNOWN


ALLREDUCE, PS = Terms(), Terms(strategy=Strategy.PS)


@pytest.mark.parametrize(
    ("reason", "spent", "memory_mb", "terms", "is_relaunched", "is_charged", "word"),
    [
        (NodeExit.KILLED, 0, 0, Terms(is_stopping=True), False, False, "stops"),
        (NodeExit.KILLED, 0, 0, Terms(is_restarting=True), False, False, "all workers"),
        (NodeExit.FATAL, 0, 0, Terms(relaunch_always=False), False, False, "user code"),
        (NodeExit.FATAL, 0, 0, ALLREDUCE, True, True, "relaunch 1 of at most 3"),
        (NodeExit.FATAL, 3, 0, ALLREDUCE, False, False, "used up"),
        (NodeExit.RELAUNCHED, 0, 0, ALLREDUCE, False, False, "newer node"),
        (NodeExit.SUCCEEDED, 0, 0, ALLREDUCE, False, False, "done"),
        (NodeExit.OOM, 0, 655, ALLREDUCE, True, True, "relaunch 1 of at most 3 of its rank."),
        (NodeExit.OOM, 0, 65537, ALLREDUCE, True, True, "relaunch 1 of at most 3 of its rank."),
        (NodeExit.OOM, 3, 655, ALLREDUCE, False, False, "used up"),
        (NodeExit.OOM, 0, 65536, PS, False, False, "65536"),
        (NodeExit.OOM, 0, 65537, PS, False, False, "65537"),
        (NodeExit.OOM, 3, 655, PS, False, False, "used up"),
        (NodeExit.OOM, 0, 655, PS, True, True, "with 1310 MiB"),
        (NodeExit.KILLED, 0, 0, ALLREDUCE, True, False, "no cost"),
        (NodeExit.KILLED, 3, 0, ALLREDUCE, True, False, "no cost"),
        (NodeExit.UNKNOWN, 2, 0, ALLREDUCE, True, True, "relaunch 3 of at most 3"),
        (NodeExit.UNKNOWN, 3, 0, ALLREDUCE, False, False, "used up"),
        (NodeExit.HARDWARE, 0, 0, PS, True, True, "relaunch 1"),
        (NodeExit.NO_HEARTBEAT, 0, 0, ALLREDUCE, True, True, "relaunch 1"),
        (NodeExit.DIAGNOSED, 0, 0, ALLREDUCE, True, True, "relaunch 1"),
        (NodeExit.CHECK_FAILED, 3, 0, ALLREDUCE, False, False, "used up"),
        (NodeExit.NONE, 0, 0, ALLREDUCE, True, True, "no known reason"),
    ],
)
def test_the_first_rule_that_matches_decides(
    reason: NodeExit, spent: int, memory_mb: int, terms: Terms, is_relaunched: bool, is_charged: bool, word: str
) -> None:
    end = NodeEnd(
        label="worker 0 (w)",
        exit_reason=reason,
        resource=Resource(memory_mb=memory_mb),
        num_relaunches=spent,
        max_relaunches=3,
    )
    decision = decide(end, terms)
    assert (decision.is_relaunched, decision.is_charged) == (is_relaunched, is_charged)
    assert word in decision.sentence


@pytest.mark.parametrize(("before", "after"), [(655, 1310), (8192, 16384), (20000, 28192), (60000, 65536), (0, 0)])
def test_memory_is_doubled_within_limits(before: int, after: int) -> None:
    assert more_memory(Resource(cpu=2, memory_mb=before)) == Resource(cpu=2, memory_mb=after)


@pytest.mark.parametrize(
    ("resource", "less"),
    [
        (Resource(cpu=16, memory_mb=2048), Resource(cpu=8, memory_mb=2048)),
        (Resource(cpu=16, memory_mb=16384), Resource(cpu=8, memory_mb=8192)),
        (Resource(cpu=8, memory_mb=12288), None),
        (Resource(cpu=8, memory_mb=12290), Resource(cpu=8, memory_mb=6145)),
        (Resource(cpu=9, memory_mb=0), Resource(cpu=5, memory_mb=0)),
        (Resource(cpu=32, memory_mb=65536, gpus=1), None),
        (Resource(), None),
    ],
)
def test_a_node_that_waits_asks_for_half_but_not_for_too_little(resource: Resource, less: Resource | None) -> None:
    assert smaller(resource, Resource()) == less


@pytest.mark.parametrize(
    ("described", "less"),
    [
        (Resource(cpu=16, memory_mb=16384), None),
        (Resource(cpu=16), Resource(cpu=16, memory_mb=8192)),
        (Resource(memory_mb=16384), Resource(cpu=8, memory_mb=16384)),
        (Resource(gpu_type="a100"), Resource(cpu=8, memory_mb=8192)),
    ],
)
def test_what_the_user_described_is_never_halved(described: Resource, less: Resource | None) -> None:
    assert smaller(Resource(cpu=16, memory_mb=16384), described) == less


@pytest.mark.parametrize(
    ("node_type", "reason", "has_begun", "expected"),
    [
        (NodeType.PS, NodeExit.OOM, False, ExitReason.PS_OOM),
        (NodeType.PS, NodeExit.FATAL, True, ExitReason.PS_ERROR),
        (NodeType.PS, NodeExit.FATAL, False, ExitReason.CODE_ERROR),
        (NodeType.WORKER, NodeExit.FATAL, False, ExitReason.CODE_ERROR),
        (NodeType.WORKER, NodeExit.FATAL, True, ExitReason.WORKER_ERROR),
        (NodeType.WORKER, NodeExit.OOM, True, ExitReason.WORKER_OOM),
        (NodeType.CHIEF, NodeExit.UNKNOWN, True, ExitReason.WORKER_ERROR),
        (NodeType.EVALUATOR, NodeExit.OOM, True, ExitReason.EVALUATOR_OOM),
        (NodeType.EVALUATOR, NodeExit.HARDWARE, True, ExitReason.EVALUATOR_ERROR),
    ],
)
def test_the_job_ends_for_the_reason_of_the_node_it_cannot_do_without(
    node_type: NodeType, reason: NodeExit, has_begun: bool, expected: ExitReason
) -> None:
    assert reason_to_stop(node_type, reason, has_training_begun=has_begun) is expected


@pytest.mark.parametrize(
    ("text", "strategy", "ranks"),
    [
        ("", Strategy.PS, {0: 3}),
        ("", Strategy.ALLREDUCE, {}),
        ("0:1", Strategy.PS, {0: 1}),
        ("0:3,2:1", Strategy.ALLREDUCE, {0: 3, 2: 1}),
        ("0:9", Strategy.ALLREDUCE, {0: 5}),
        ("all", Strategy.PS, {0: 3, 1: 3, 2: 3}),
        ("none", Strategy.PS, {}),
        ("0", Strategy.PS, None),
        ("0:x", Strategy.PS, None),
    ],
)
def test_critical_nodes_are_named_by_rank(text: str, strategy: Strategy, ranks: dict[int, int] | None) -> None:
    assert critical_ranks(text, 3, 3, strategy) == ranks


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", ["high", "high", "low", "low", "low"]),  # round(2.5), as Python rounds
        ("0.7", ["high", "high", "high", "high", "low"]),
        ("0.25", ["high", "low", "low", "low", "low"]),
        ("0.05", ["low"] * 5),
        ("1", ["high"] * 5),
        ("low", ["low"] * 5),
        ("", [""] * 5),
        ("0", None),
        ("1.5", None),
        ("urgent", None),
    ],
)
def test_a_share_of_the_nodes_has_high_priority(text: str, expected: list[str] | None) -> None:
    assert priorities(text, 5) == expected
