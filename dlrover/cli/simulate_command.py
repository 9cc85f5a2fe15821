"""
`dlrover simulate`: how long a job will take with the failures one has, and what spares or a lower minimum would change.

The same simulation that tests the control plane lives through the job several times; there is no formula behind it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from dlrover.simulator.forecast import Forecast, Life

MAX_TURNS = 24
"""So many lines of a timeline are shown; the plot has them all."""


def simulate(
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes on which the job trains.", min=1)] = 8,
    min_nodes: Annotated[
        int, typer.Option("--min-nodes", help="Smallest number of nodes with which the job trains; 0: all of --nodes.")
    ] = 0,
    spares: Annotated[int, typer.Option("--spares", help="Number of extra nodes that wait warm.")] = 0,
    node_unit: Annotated[
        int, typer.Option("--node-unit", help="The number of nodes in a world is a multiple of this.")
    ] = 1,
    hours: Annotated[float, typer.Option("--hours", help="Training time without any failure, in hours.")] = 24.0,
    step_time: Annotated[float, typer.Option("--step-time", help="Seconds for each step, with all nodes.")] = 1.0,
    node_mtbf: Annotated[
        float, typer.Option("--node-mtbf", help="Mean hours between two losses of one node; 0: never.")
    ] = 500.0,
    worker_mtbf: Annotated[
        float, typer.Option("--worker-mtbf", help="Mean hours between two crashes of workers on one node; 0: never.")
    ] = 200.0,
    master_mtbf: Annotated[
        float, typer.Option("--master-mtbf", help="Mean hours between two failures of the master; 0: never.")
    ] = 1000.0,
    restart: Annotated[
        float, typer.Option("--restart", help="Seconds from the start of the workers to their first step.")
    ] = 10.0,
    checkpoint_every: Annotated[float, typer.Option("--checkpoint-every", help="Seconds between checkpoints.")] = 600.0,
    replicas: Annotated[
        bool,
        typer.Option(
            "--replicas", help="Snapshots in memory are copied to other nodes, so that a lost node loses no step."
        ),
    ] = False,
    replacement: Annotated[
        float, typer.Option("--replacement", help="Seconds until the platform has replaced a lost node.")
    ] = 300.0,
    join_timeout: Annotated[
        float,
        typer.Option("--join-timeout", help="Seconds with fewer than --min-nodes nodes after which the job fails."),
    ] = 600.0,
    seeds: Annotated[
        int, typer.Option("--seeds", help="Number of simulated runs, each with other random faults.", min=1)
    ] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the first run; the next runs count up from it.")] = 1,
    compare: Annotated[bool, typer.Option(help="Also try other numbers of --spares and --min-nodes.")] = True,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a plot to this SVG file.")] = None,
) -> None:
    """Forecast a job: its time to finish, its goodput, and the best --spares and --min-nodes."""
    from rich.console import Console

    from dlrover.cli.show.forecast_plot import draw
    from dlrover.simulator.forecast import Question, best, choices, forecast

    question = Question(
        nodes=nodes,
        min_nodes=min_nodes or nodes,
        spares=spares,
        node_unit=node_unit,
        hours=hours,
        step=step_time,
        node_mtbf=node_mtbf,
        worker_mtbf=worker_mtbf,
        master_mtbf=master_mtbf,
        restart=restart,
        checkpoint_every=checkpoint_every,
        has_replicas=replicas,
        replacement=replacement,
        join_timeout=join_timeout,
    )
    if plot is not None:
        _probe(plot)
    console = Console()
    with console.status(f"simulating {hours:g} h with {nodes} nodes, {seeds} times"):
        chosen = forecast(question, num_seeds=seeds, seed=seed)
    _show(console, chosen)
    others: list[Forecast] = []
    if compare:
        with console.status("and again with other spares and minimums"):
            others = [
                chosen if choice == question else forecast(choice, num_seeds=seeds, seed=seed)
                for choice in choices(question)
            ]
        _compare(console, others, *best(others))
    if plot is not None:
        with _writing(plot):
            plot.write_text(draw(chosen, others), encoding="utf-8")
        console.print(f"picture: {plot}", markup=False, highlight=False)


@contextlib.contextmanager
def _writing(plot: Path) -> Iterator[None]:
    from dlrover.protocol.errors import ConfigError

    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--plot {plot} cannot be written: {error.strerror}. Name a file in a directory that exists."
        ) from error


def _probe(plot: Path) -> None:
    """Before the long part, so that no user waits for a picture that has no place. Leaves nothing."""
    is_new = not plot.exists()
    with _writing(plot):
        plot.open("a").close()
        if is_new:
            plot.unlink()


def _show(console: Console, chosen: Forecast) -> None:
    question, lives = chosen.question, chosen.lives
    console.print(
        f"{question.nodes} nodes, at least {question.min_nodes}, {question.spares} spare; {question.hours:g} h of "
        f"training, lived through {len(lives)} times",
        highlight=False,
    )
    hours = sorted(life.hours for life in lives if life.is_completed)
    spread = f" ({hours[0]:.1f} to {hours[-1]:.1f} h)" if hours else ""
    console.print(f"  done in      {_hours(chosen.median_hours)}{spread}", highlight=False)
    console.print(
        f"  goodput      {chosen.goodput:.1%} (worst {min(life.goodput for life in lives):.1%})", highlight=False
    )
    for name, values in (
        ("faults", [life.num_faults for life in lives]),
        ("new rounds", [life.num_restarts for life in lives]),
    ):
        console.print(f"  {name:<12} {min(values)} to {max(values)}", highlight=False)
    console.print(f"  repeated     {max(life.lost_hours for life in lives):.1f} h of training at most", highlight=False)
    for life in lives:
        if not life.is_completed:
            console.print(f"  one ended after {life.hours:.1f} h: {_reason(chosen, life)}", highlight=False)
    _tell(console, chosen.median_life)


def _reason(chosen: Forecast, life: Life) -> str:
    from dlrover.protocol.messages.job import ExitReason

    if life.reason != ExitReason.RENDEZVOUS_TIMEOUT.value:
        return life.reason
    question = chosen.question
    return f"fewer than {question.min_nodes} nodes for longer than --join-timeout {question.join_timeout:g}"


def _tell(console: Console, life: Life) -> None:
    from rich.table import Table

    table = Table("hours", "done", "nodes", title="the median life", title_justify="left")
    turns = list(life.curve)
    step = max(1, math.ceil(len(turns) / MAX_TURNS))
    for hours, part, nodes in [*turns[:-1:step], *turns[-1:]]:
        table.add_row(f"{hours:.2f}", f"{part:.1%}", str(nodes))
    console.print(table)


def _compare(console: Console, forecasts: list[Forecast], fastest: Forecast, cheapest: Forecast) -> None:
    from rich.table import Table

    table = Table("min", "spares", "done in", "worst", "goodput", "node-hours", "done", "")
    for one in forecasts:
        marks = [name for name, mark in (("fastest", fastest), ("cheapest", cheapest)) if one is mark]
        table.add_row(
            str(one.question.min_nodes),
            str(one.question.spares),
            _hours(one.median_hours),
            _hours(one.worst_hours),
            f"{one.goodput:.1%}",
            f"{one.node_hours:,.0f}",
            f"{one.num_completed} of {len(one.lives)}",
            ", ".join(marks),
        )
    console.print(table)


def _hours(hours: float) -> str:
    return "never" if math.isinf(hours) else f"{hours:.1f} h"
