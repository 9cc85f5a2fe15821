"""Jobs and plans of Brain, as tables."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from dlrover.protocol.units import amount

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dlrover.protocol.messages.brain import JobRecord, JobRow, PlanRow
    from dlrover.protocol.messages.scaling import Configuration, RunMeasured, SizePlan

MIB = 2**20


def job_table(jobs: Sequence[JobRow]) -> Table:
    table = Table("UID", "NAME", "RECIPE", "BEGAN", "ENDED AS", "RUNS", "STEPS", "CORE-HOURS", box=None)
    for job in jobs:
        recipe = job.recipe.name or job.recipe.script_name
        end = job.end_reason or "-"
        hours = f"{job.core_hours:.2f}"
        table.add_row(job.uid, job.name, recipe, _when(job.began_at), end, str(job.num_runs), str(job.steps), hours)
    return table


def job_page(found: JobRecord) -> Iterator[RenderableType]:
    job = found.job
    recipe = job.recipe.name or job.recipe.script_name or "unknown"
    end = f"ended as {job.end_reason} at {_when(job.ended_at)}" if job.ended_at is not None else "not ended"
    yield f"{job.name or job.uid} of {job.user or 'unknown user'}: {job.strategy}, recipe {recipe}, began {_when(job.began_at)}, {end}"
    yield f"{job.steps} steps, {job.core_hours:.2f} core-hours, {job.num_runs} runs"
    yield _run_table(found.runs)
    if found.plans:
        yield plan_table(found.plans, is_of_one_job=True)
    if found.node_ends:
        table = Table(
            "NODE", "TYPE", "ENDED AS", "AT", "MEMORY", title="Nodes that ended", title_justify="left", box=None
        )
        for node in found.node_ends:
            memory = amount(node.resource.memory_mb * MIB) if node.resource.memory_mb else "-"
            table.add_row(str(node.node), node.node_type, node.kind, _when(node.at), memory)
        yield table


def plan_table(plans: Sequence[PlanRow], *, is_of_one_job: bool = False) -> Table:
    first = () if is_of_one_job else ("JOB",)
    table = Table(
        *first,
        "AT",
        "BY",
        "OUTCOME",
        "PLAN",
        "EXPECTED",
        "REACHED",
        "WHY",
        title="Plans",
        title_justify="left",
        box=None,
    )
    for plan in plans:
        by = "the job" if plan.number else plan.algorithm
        job = () if is_of_one_job else (plan.job,)
        row = (
            _when(plan.at),
            by,
            plan.outcome,
            plan_text(plan.plan),
            _speed(plan.expected_speed),
            _speed(plan.speed_after),
        )
        table.add_row(*job, *row, plan.sentence)
    return table


def plan_text(plan: SizePlan) -> str:
    parts = []
    for group in plan.groups:
        count = "" if group.count is None else f"{group.count} "
        sizes = [f"{group.cpu:g} cores"] if group.cpu else []
        sizes += [amount(group.memory_mb * MIB)] if group.memory_mb else []
        parts.append(f"{count}{group.node_type}" + (f" of {', '.join(sizes)}" if sizes else ""))
    parts += [f"node {node.platform_node}" for node in plan.nodes]
    if plan.micro_batch is not None:
        parts.append(f"micro-batch {plan.micro_batch}")
    return "; ".join(parts) or "-"


def _run_table(runs: Sequence[RunMeasured]) -> Table:
    table = Table(
        "RUN",
        "CONFIGURATION",
        "SECONDS",
        "STEPS",
        "STEP TIME",
        "RECORDS/S",
        "MEMORY",
        title="Runs",
        title_justify="left",
        box=None,
    )
    for run in runs:
        memory = max((use.memory_mb for use in run.types), default=0.0)
        table.add_row(
            str(run.number),
            _configuration(run.configuration),
            f"{run.seconds:.0f}",
            str(run.steps),
            f"{run.step_time:.4g} s",
            _speed(run.records_per_second),
            amount(memory * MIB) if memory else "-",
        )
    return table


def _configuration(configuration: Configuration) -> str:
    return ", ".join(
        f"{group.count} {group.node_type}" + (f" of {group.cpu:g} cores" if group.cpu else "")
        for group in configuration.groups
    )


def _speed(speed: float) -> str:
    return f"{speed:.4g}" if speed else "-"


def _when(at: float | None) -> str:
    return "-" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
