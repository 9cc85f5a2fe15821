"""
`dlrover data`: what became of a job's data.

`audit` reads the master's journal and proves for every dataset that the model contains each record of each epoch exactly once, or names those that
are in it twice or not at all. Exit code 0: clean; 1: not clean, or the journal cannot be read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrover.cli.tables import echo, plain_console

if TYPE_CHECKING:
    from dlrover.core.data.audit import AuditFinding

_NUM_NAMED = 20

app = typer.Typer(name="data", help="Show what happened to the data of a job.", no_args_is_help=True)


@app.callback()
def data() -> None:
    """What became of a job's data."""


@app.command()
def audit(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="The master's journal (an SQLite file).")],
    is_json: Annotated[bool, typer.Option("--json", help="Print all findings, as JSON.")] = False,
) -> None:
    """Prove from the journal that the model has seen each record exactly once."""
    from dlrover.cli.show.replay import walk_journal
    from dlrover.core.data.audit import Audit

    audit: Audit | None = None
    job = None
    for step, job in walk_journal(journal):
        datasets = job.state.data.datasets
        if audit is None or step is None:
            audit = Audit(datasets)
        else:
            audit.follow(step.record.command, step.outcome.reply, datasets)
    findings = [] if audit is None or job is None else audit.findings(job.state.data.datasets)
    if is_json:
        _print_json(findings)
    else:
        _print_table(findings)
    if not all(finding.is_clean for finding in findings):
        raise typer.Exit(1)


def _print_json(findings: list[AuditFinding]) -> None:
    import msgspec

    echo(msgspec.json.encode(findings).decode())


def _print_table(findings: list[AuditFinding]) -> None:
    from rich.table import Table

    console = plain_console(highlight=False)
    if not findings:
        console.print("The job had no datasets.")
        return
    table = Table("dataset", "in the model", "twice", "missing", "set aside", "read", "verdict")
    for finding in findings:
        table.add_row(
            finding.dataset,
            f"{finding.num_seen:,}"
            + (f" + {finding.num_trusted:,} before this journal began" if finding.num_trusted else ""),
            str(len(finding.repeated)),
            str(len(finding.missing)),
            str(finding.num_set_aside),
            "all" if finding.is_complete else "in part",
            "clean" if finding.is_clean else "NOT CLEAN",
        )
    console.print(table)
    for finding in findings:
        for what, ranges in (("twice", finding.repeated), ("missing", finding.missing)):
            for each in ranges[:_NUM_NAMED]:
                console.print(f"{finding.dataset}: {what}: records {each}", markup=False)
            if len(ranges) > _NUM_NAMED:
                console.print(f"{finding.dataset}: {what}: and {len(ranges) - _NUM_NAMED} more ranges", markup=False)
