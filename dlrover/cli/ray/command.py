"""
`dlrover ray run | list | status | logs | attach | stop | clean`: jobs in a Ray cluster that exists.

First Ctrl-C stops the job in good order, a second one at once. A killed driver leaves the job running, and `attach` finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrover.cli.console import say_block
from dlrover.cli.tables import echo, table_console
from dlrover.host.plain_text import printable
from dlrover.protocol.errors import ConfigError, DLRoverError, JobError, Unavailable

if TYPE_CHECKING:
    from dlrover.cli.ray.driver import SubmittedJob
    from dlrover.cli.ray.messages import HostNews, JobOver
    from dlrover.cli.ray.plan import RayRun

EXIT_USAGE = 2
EXIT_MASTER_LOST = 23
PREFIX = "dlrover ray: "

app = typer.Typer(name="ray", help="Run jobs on a Ray cluster that exists.", no_args_is_help=True)

Address = Annotated[
    str,
    typer.Option(
        "--address",
        help="Address of the cluster's head, HOST:PORT. Not given: RAY_ADDRESS, or the cluster of this machine.",
    ),
]
JobName = Annotated[str, typer.Argument(help="Name of the job, or the beginning of it; not needed if only one runs.")]


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def run(context: typer.Context) -> None:
    """Run an elastic job on a Ray cluster; `dlrover ray run --help` lists its options."""
    raise typer.Exit(main(context.args))


@app.command(name="list")
def list_jobs(address: Address = "") -> None:
    """List the jobs of the cluster, and ended jobs whose result was not fetched yet."""
    from rich.table import Table

    from dlrover.platforms.ray.access import connected
    from dlrover.platforms.ray.store import Registry

    with connected(address) as ray:
        registry = Registry()
        table = Table("job", "state", "what", box=None, pad_edge=False)
        for name in registry.names():
            table.add_row(printable(name), *_state_of(ray, name))
        for name in registry.results():
            result = registry.result(name)
            if result is not None:
                table.add_row(
                    printable(name), "ended", f"exit code {result.exit_code}; `dlrover ray attach {name}` shows it"
                )
        if table.row_count:
            table_console().print(table)
        else:
            echo("No job runs in this cluster.")


@app.command()
def status(
    job: JobName = "",
    address: Address = "",
    is_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """Show a running job: its stage, its nodes, and the reason for its present state."""
    import msgspec

    from dlrover.cli.show.roles import view_of_roles
    from dlrover.cli.show.status import show
    from dlrover.protocol.messages.job import AskStatus, JobStatus
    from dlrover.protocol.rpc.client import ask

    with found_job(job, address) as found:
        account = found.account()
        if not account.address:  # a job of several roles, whose masters are those of its elastic roles
            report = found.roles()
            if is_json:
                echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
            else:
                table_console().print(view_of_roles(report))
            return
        reply = asyncio.run(ask(account.address, AskStatus(), token=account.token, tls=account.tls, timeout=10.0))
        assert isinstance(reply, JobStatus), f"the master answered AskStatus with {type(reply).__name__}"
        if is_json:
            echo(msgspec.json.format(msgspec.json.encode(reply), indent=2).decode())
        else:
            show(reply, table_console())


@app.command()
def logs(
    job: JobName = "",
    address: Address = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
) -> None:
    """Print the output of a job's nodes: the newest 4 MiB, and with -f also later output."""
    with found_job(job, address) as found:
        try:
            asyncio.run(found.follow(_print, is_following=follow, takes_result=False))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@app.command()
def attach(job: JobName = "", address: Address = "") -> None:
    """Show the output of a job as `dlrover ray run` does, and exit with the job's exit code. Ctrl-C leaves the job running."""
    from dlrover.cli.ray.driver import find_job, take_result
    from dlrover.platforms.ray.access import connected

    with connected(address) as ray:
        result = take_result(job) if job else None
        if result is not None:
            say_block(result.report or f"{PREFIX}job {job} ended with exit code {result.exit_code}\n")
            raise typer.Exit(result.exit_code)
        raise typer.Exit(_follow(find_job(ray, job), stops_job=False))


@app.command()
def stop(job: JobName = "", address: Address = "") -> None:
    """Stop a running job on all its nodes, in an orderly way."""
    with found_job(job, address) as found:
        found.stop()
        echo(f"Job {found.name} is stopping.")


@app.command()
def clean(address: Address = "") -> None:
    """Remove leftovers of killed jobs from the cluster, and results that were not fetched."""
    from dlrover.cli.ray.driver import clean as remove_left
    from dlrover.platforms.ray.access import connected

    with connected(address) as ray:
        removed = remove_left(ray)
    for what in removed:
        echo(f"removed: {what}")
    echo(f"{len(removed)} left-overs removed.")


def main(argv: Sequence[str] | None = None) -> int:
    """`dlrover ray run`."""
    from dlrover.cli.ray.plan import read_run

    try:
        return run_job(read_run(sys.argv[1:] if argv is None else argv, os.environ))
    except DLRoverError as error:
        say_block(f"dlrover ray run: error: {error}\n")
        return EXIT_USAGE if isinstance(error, ConfigError) else 1


def run_job(run: RayRun) -> int:
    """Submit it and, unless it is detached, follow it to its end."""
    # Before gRPC is imported anywhere.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from dlrover.cli.ray.driver import submit
    from dlrover.platforms.ray.access import connected

    for note in run.notes:
        say_block(f"{PREFIX}{note}\n")
    with connected(run.address, working_dir=run.working_dir) as ray:
        say_block(f"{PREFIX}cluster at {ray.get_runtime_context().gcs_address}, Ray {ray.__version__}\n")
        job = submit(ray, run)
        say_block(f"{PREFIX}job {job.name}: {run.plan.summary}\n")
        if run.is_detached:
            say_block(f"{PREFIX}`dlrover ray attach {job.name}` shows it, `dlrover ray stop {job.name}` ends it\n")
            return 0
        return _follow(job, stops_job=True)


def _follow(job: SubmittedJob, *, stops_job: bool) -> int:
    try:
        over = asyncio.run(_show(job, stops_job=stops_job))
    except JobError as error:
        say_block(f"{PREFIX}{error}\n")
        return EXIT_MASTER_LOST
    if over is None:
        return 130
    if over.report:
        say_block(over.report)
    job.await_gone()
    return over.exit_code


async def _show(job: SubmittedJob, *, stops_job: bool) -> JobOver | None:
    """None: the person has left, and the job goes on."""
    from dlrover.cli.local.display import Display
    from dlrover.cli.ray.driver import take_result
    from dlrover.cli.ray.messages import JobOver
    from dlrover.host.console import PATIENCE

    try:
        account = await asyncio.to_thread(job.account)
    except Unavailable:
        # It could not even begin, and is gone.
        if (result := take_result(job.name)) is None:
            raise
        return JobOver(result.exit_code, result.report)
    is_terminal = sys.stderr.isatty() and sys.stdout.isatty()
    display = Display(account.address, account.token, tls=account.tls, is_terminal=is_terminal, prefix=PREFIX)
    left = asyncio.Event()
    stopping: list[asyncio.Task[None]] = []

    def on_signal(number: int) -> None:
        if not stops_job:
            left.set()
            return
        if number == signal.SIGINT or not stopping:
            display.say(
                "stopping the job; press Ctrl-C again to kill it at once" if not stopping else "killing the job"
            )
            stopping.append(asyncio.ensure_future(asyncio.to_thread(job.stop, number)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, int(number))

    def show(news: HostNews) -> None:
        if news.address:
            display.move(news.address)
        if news.num_lost:
            display.say(f"{news.num_lost} older lines are not shown; the log files on the nodes have them")
        _show_items(display, news)

    with display:
        asking = asyncio.ensure_future(display.run())
        following = asyncio.ensure_future(job.follow(show))
        leaving = asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait([following, leaving], return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        finally:
            for task in (asking, following, leaving):
                task.cancel()
            await asyncio.gather(asking, following, leaving, *stopping, return_exceptions=True)
            await display.drain(PATIENCE)


def _show_items(display: Any, news: HostNews) -> None:
    from dlrover.cli.ray.messages import Said, ShownLine

    for item in news.items:
        if isinstance(item, ShownLine):
            display.line(item.node, item.line, item.is_error)
        elif isinstance(item, Said):
            display.say(item.text)
        else:
            display.change(item)


def _print(news: HostNews) -> None:
    from dlrover.cli.ray.messages import ShownLine

    for item in news.items:
        if isinstance(item, ShownLine):
            stream = sys.stderr if item.is_error else sys.stdout
            stream.write(f"[{item.node}] {item.line.decode(errors='replace')}")
    sys.stdout.flush()


def elastic_roles(job: str) -> list[str]:
    """Names of those roles of a multi-role job that are jobs of their own."""
    from dlrover.platforms.ray.store import Registry

    return sorted(name for name in Registry().names() if name.startswith(f"{job}."))


def top_of_roles(job: str, address: str, *, once: bool) -> None:
    """Of a multi-role job as a whole."""
    from dlrover.cli.show.roles import watch_roles

    with found_job(job, address) as found:
        watch_roles(found.roles, table_console(), once=once, is_over=found.is_over)


def _state_of(ray: Any, name: str) -> tuple[str, str]:
    from dlrover.cli.ray.driver import find_job

    try:
        account = find_job(ray, name).account(timeout=5.0)
    except (Unavailable, ConfigError) as error:
        return "not answering", str(error)
    return "running", account.summary + (f"; master at {account.address}" if account.address else "")


@contextlib.contextmanager
def found_job(job: str, address: str) -> Iterator[SubmittedJob]:
    """The job, as long as the context lasts."""
    from dlrover.cli.ray.driver import find_job
    from dlrover.platforms.ray.access import connected

    with connected(address) as ray:
        yield find_job(ray, job)
