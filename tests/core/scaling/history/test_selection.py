"""Which algorithm of history answers which question."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlrover.core.scaling.history.parameters import PHASE_KEY, default_of, parameters_of
from dlrover.core.scaling.history.seen import OUT_OF_MEMORY, FormerRun, HistoryPlan, JobSeen, NodeSeen
from dlrover.core.scaling.history.selection import HistoryAnswer, HistoryAsked, answer
from dlrover.protocol.messages.fleet import NodeType
from dlrover.protocol.messages.scaling import Configuration, GroupSize, JobFacts
from tests.core.scaling.history.seen_jobs import completed, record, running, servers

NOW = 1_000_000.0
USED = (record((4.0, 6.0), worker_cpu=2.0, memory=1000.0, step=step) for step in (100, 200, 300, 400, 500, 600))
FORMER = completed(*USED, began_at=NOW - 3600)
RUN = FormerRun(
    number=1,
    configuration=Configuration(groups=(GroupSize(node_type=NodeType.WORKER, count=3, cpu=4.0),)),
    seconds=100.0,
    steps=100,
    step_time=1.0,
)
HOT = running(
    *[record((9.5, 1.0), workers=2, step=100 * count) for count in range(1, 7)],
    nodes=servers(10.0, 10.0),
    facts=JobFacts(dataset_size=10**9, batch_size=10, num_epochs=1, recv_op_count=249),
)
"""Its first server is hot."""


def asked(
    job: JobSeen | None = None, *former: JobSeen, config: dict[str, str] | None = None, **names: str
) -> HistoryAnswer:
    question = HistoryAsked(now=NOW, config=config or {}, **names)  # type: ignore[arg-type]
    return answer(question, job or running(), former or (FORMER,), {})


def algorithms(found: HistoryAnswer) -> list[str]:
    return [] if found.plan is None else found.plan.algorithm.split("+")


def plan_of(found: HistoryAnswer) -> HistoryPlan:
    assert found.plan is not None, found.sentence
    return found.plan


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ("job_stage_create", ["optimize_job_worker_create_resource", "optimize_job_ps_create_resource"]),
        ("job_stage_ps_initial", ["optimize_job_ps_init_adjust_resource"]),
        ("job_stage_worker_initial", ["optimize_job_worker_resource"]),
        ("job_stage_running", ["optimize_job_hot_ps_resource"]),
        ("job_stage_ps_running", ["optimize_job_hot_ps_resource"]),
        ("job_stage_worker_running", ["optimize_job_worker_resource"]),
    ],
)
def test_each_stage_has_its_algorithms(stage: str, named: list[str]) -> None:
    found = asked(HOT, stage=stage)
    assert algorithms(found) == named
    assert (found.level, found.similar, found.error) == (1, 1, "")
    assert found.sentence == plan_of(found).sentence


def test_a_plan_of_two_algorithms_has_the_groups_and_sentences_of_both() -> None:
    found = plan_of(asked(stage="job_stage_create"))
    assert [group.node_type for group in found.groups] == [NodeType.WORKER, NodeType.PS]
    assert found.sentence.startswith("Workers of completed jobs used")
    assert "1 completed jobs used 10.0 cores of servers" in found.sentence


def test_a_hot_server_is_a_wish_for_that_node() -> None:
    found = plan_of(asked(HOT, stage="job_stage_ps_running"))
    assert [node.id for node in found.nodes] == [0]
    assert found.groups == ()


def test_a_job_without_former_ones_gets_the_servers_of_the_settings() -> None:
    found = asked(running(), completed(uid="without records", began_at=NOW), stage="job_stage_create")
    assert algorithms(found) == ["optimize_job_ps_cold_create_resource"]


def test_a_job_that_ran_out_of_memory_has_other_algorithms() -> None:
    workers, on_servers = OUT_OF_MEMORY
    node = NodeSeen(id=0, node_type=NodeType.WORKER, memory_mb=1000.0, is_oom=True)
    job = running(exit_reason=workers, nodes=(node,))
    assert algorithms(asked(job, stage="job_stage_create"))[0] == "optimize_job_worker_create_oom_resource"
    job = running(*HOT.records, exit_reason=on_servers, nodes=(*HOT.nodes, replace(node, node_type=NodeType.PS)))
    assert algorithms(asked(job, stage="job_stage_ps_initial")) == ["optimize_job_ps_oom_resource"]


def test_a_job_is_not_its_own_example_and_jobs_that_began_after_it_are_none() -> None:
    job = running(began_at=NOW - 100)
    assert asked(job, replace(FORMER, uid="this"), stage="job_stage_create").similar == 0
    assert asked(job, replace(FORMER, began_at=NOW - 100), stage="job_stage_create").similar == 1
    assert asked(job, replace(FORMER, began_at=NOW - 99), stage="job_stage_create").similar == 0
    assert asked(running(), replace(FORMER, began_at=NOW), stage="job_stage_create").similar == 1
    assert asked(running(), replace(FORMER, began_at=NOW + 1), stage="job_stage_create").similar == 0


def test_the_settings_say_how_far_back_examples_are() -> None:
    for hours, similar in (("1", 1), ("0.9", 0)):
        found = asked(stage="job_stage_create", config={"query.backward.time-period.hour": hours})
        assert found.similar == similar


@pytest.mark.parametrize("by_name", [{"optimizer": "start_like"}, {"config": {"optimizer": "start_like"}}])
def test_an_optimizer_is_asked_by_its_name(by_name: dict[str, object]) -> None:
    found = asked(running(), replace(FORMER, runs=(RUN,)), stage="job_stage_create", **by_name)  # type: ignore[arg-type]
    assert algorithms(found) == ["start_like"]
    assert asked(**by_name).plan is None, "no run is known"  # type: ignore[arg-type]


def test_the_percentile_needs_runs_with_uses() -> None:
    found = asked(optimizer="percentile")
    assert (found.plan, found.error) == (None, "")
    assert found.sentence.startswith("Nothing should change: 1 completed job with the same recipe")
    assert (found.level, found.similar) == (1, 1)


@pytest.mark.parametrize("name", ["base_optimizer", "BaseOptimizer"])
def test_the_base_optimizers_change_nothing(name: str) -> None:
    found = asked(optimizer=name)
    assert (found.plan, found.error) == (None, "")


@pytest.mark.parametrize(
    "by_name",
    [
        {"algorithm": "optimize_job_ps_cold_create_resource"},
        {"config": {"optimize-algorithm": "optimize_job_ps_cold_create_resource"}},
        {"algorithm": "optimize_job_ps_cold_create_resource", "optimizer": "unknown"},
        {"algorithm": "optimize_job_ps_cold_create_resource", "processor": "base_optimize_processor"},
    ],
    ids=str,
)
def test_an_algorithm_is_asked_by_its_name_before_any_optimizer(by_name: dict[str, object]) -> None:
    found = asked(stage="job_stage_worker_initial", **by_name)  # type: ignore[arg-type]
    assert algorithms(found) == ["optimize_job_ps_cold_create_resource"]


def test_the_processor_of_stages_ignores_names() -> None:
    found = asked(
        stage="job_stage_create",
        processor="running_training_job_optimize_request_processor",
        algorithm="unknown",
        optimizer="unknown",
    )
    assert algorithms(found) == ["optimize_job_worker_create_resource", "optimize_job_ps_create_resource"]


def test_the_processor_of_names_without_a_name_changes_nothing() -> None:
    for stage in ("", "job_stage_create"):
        found = asked(processor="base_optimize_processor", stage=stage)
        assert (found.plan, found.error) == (None, "")
    assert "invalid event type" in asked(processor="base_optimize_processor", stage="another").error


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"stage": "another"}, "invalid event type 'another'"),
        ({}, "invalid event type ''"),
        ({"processor": "another", "stage": "job_stage_create"}, "The processor 'another' is unknown."),
        ({"optimizer": "another"}, "The optimizer 'another' is unknown."),
        ({"algorithm": "another"}, "The algorithm 'another' is unknown."),
        (
            {"stage": "job_stage_create", "config": {PHASE_KEY: "late"}},
            "is 'late'. Give one of initial, sample, stable",
        ),
    ],
    ids=str,
)
def test_an_unknown_name_is_an_error_that_says_which(names: dict[str, object], said: str) -> None:
    found = asked(config={"optimizer.no": "1", **names.pop("config", {})}, **names)  # type: ignore[call-overload, arg-type, dict-item]
    assert said in found.error
    assert (found.plan, found.sentence) == (None, found.error)
    assert len(found.warnings) == 1, "a setting without effect is told as well"


def test_the_phase_follows_from_the_stage_or_from_the_question() -> None:
    idle = [record((2.0,), workers=2, step=100 * count) for count in range(1, 7)]
    job = running(*idle, nodes=servers(10.0), facts=HOT.facts)
    first = asked(job, stage="job_stage_worker_initial")
    later = asked(job, stage="job_stage_worker_running")
    counts = [plan_of(found).groups[0].count for found in (first, later)]
    assert counts == [8, 6], (
        "a server at 20 % bears four times the workers; later they become at most four more at a time"
    )
    for text, like in (("initial", first), ("stable", later)):
        found = asked(job, stage="job_stage_worker_running", config={PHASE_KEY: text})
        assert found.plan == like.plan
    assert asked(job, stage="job_stage_worker_initial", config={PHASE_KEY: "stable"}).plan == later.plan


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "x", "", str(2.0**53 + 2)])
def test_a_setting_that_is_no_number_is_told_and_its_default_used(text: str) -> None:
    given, warnings = parameters_of({"optimizer.ps.cold.replica": text, "query.backward.time-period.hour": "2"})
    assert (given.cold_servers, given.backward_hours) == (4, 2.0)
    assert len(warnings) == 1
    assert "4 is used" in warnings[0]


def test_settings_are_read_in_their_units() -> None:
    settings = {
        "optimizer.ps.cold.memory": str(2**30),
        "optimizer.ps.cold.replica": "2.5",
        "optimizer.ps.cold.cpu": "0",
    }
    given, warnings = parameters_of({**settings, "another.key": "1", PHASE_KEY: "initial"})
    assert (given.cold_memory, given.cold_servers, given.cold_cpu, warnings) == (1024.0, 2, 0.0, ())
    assert parameters_of({"optimizer.ps.cold.cpu": str(2.0**53)})[0].cold_cpu == 2.0**53
    assert default_of("optimizer.ps.cold.memory") == 16 * 2**30
    assert default_of("optimizer.ps.cold.cpu") == 12.0


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.worker.cpu.min", "optimizer.worker.create.cpu.min"),
        ("optimizer.ps.cold.replicas", "optimizer.ps.cold.replica"),
        ("optimizer.nothing.like.it", ""),
    ],
)
def test_a_setting_without_effect_is_told_with_the_one_that_was_meant(key: str, meant: str) -> None:
    ((warning,), expected) = parameters_of({key: "1"})[1], f" Did you mean {meant!r}?" if meant else ""
    assert warning == f"The setting {key!r} has no effect.{expected}"
