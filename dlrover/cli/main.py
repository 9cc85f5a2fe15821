"""
`dlrover`: what people do with jobs from a terminal, apart from starting one (`dlrover-run`).

Each command imports what it needs when it runs, so that `dlrover version` does not pay for gRPC.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrover.cli.brain.command import app as brain
from dlrover.cli.checkpoint.command import app as checkpoint
from dlrover.cli.connection import Job, JobConnection, JobOrJournal, SeveralRoles, takes_connection
from dlrover.cli.data_command import app as data
from dlrover.cli.job import command as job_commands
from dlrover.cli.ray.command import app as ray
from dlrover.cli.simulate_command import simulate
from dlrover.cli.tables import echo, table_console
from dlrover.host.plain_text import printable
from dlrover.host.standard_streams import open_standard_descriptors
from dlrover.protocol.errors import ConfigError, DLRoverError

if TYPE_CHECKING:
    from dlrover.protocol.codec import Question
    from dlrover.protocol.messages.fleet import ScaleReplicas
    from dlrover.protocol.messages.job import JobStatus

app = typer.Typer(
    name="dlrover", help="Show, control and clean up training jobs.", no_args_is_help=True, add_completion=False
)


_NODE_HELP = "Type and rank, as in `dlrover status`: worker-3 (or 3), standby-1, ps-0."


def _command(job: object = Job) -> Callable[[Callable[..., None]], object]:
    """Makes a command of a function that takes a connection to the job that it is about."""
    return lambda function: app.command()(takes_connection(function, job))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def master(context: typer.Context) -> None:
    """Start a master by hand; `dlrover master --help` lists its options."""
    from dlrover.cli import master_command

    raise typer.Exit(master_command.main(context.args))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
)
def local(context: typer.Context) -> None:
    """Run a job of several nodes on this machine; `dlrover local --help` lists its options."""
    from dlrover.cli.local import command as local_command

    raise typer.Exit(local_command.main(context.args))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def replay(context: typer.Context) -> None:
    """Print the decisions in a job's journal: what was decided, when and why."""
    from dlrover.cli.show.replay import main as replay_main

    raise typer.Exit(replay_main(context.args))


@_command()
def status(
    connection: JobConnection,
    is_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """Show a running job: its stage, its nodes, and the reason for its present state."""
    from dlrover.protocol.messages.job import AskStatus, JobStatus

    reply = connection.ask(AskStatus(), JobStatus)
    _show(reply, is_json=is_json)


@_command()
def diagnosis(
    connection: JobConnection,
    is_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """Show the faults that the diagnosis found in a running job, and its analysis of the newest hang."""
    import msgspec

    from dlrover.cli.show.status import verdict_lines
    from dlrover.protocol.messages.watch import AskDiagnosis, Diagnosis

    reply = connection.ask(AskDiagnosis(), Diagnosis)
    if is_json:
        echo(msgspec.json.encode(reply).decode())
        return
    for past in reply.verdicts:
        echo("\n".join(verdict_lines(past, reply.now)))
    if not reply.verdicts:
        typer.echo("The diagnosis has found no fault in this job.")
    if reply.autopsy is not None:
        echo(f"\n{reply.autopsy.text}")


@_command(job=JobOrJournal)
def events(
    connection: JobConnection,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the job ends.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    limit: Annotated[int, typer.Option("--limit", help="Show at most this many, the newest.", min=1)] = 200,
    trace: Annotated[
        str, typer.Option("--trace", help="Write the history of the job to this file, as a trace for Perfetto.")
    ] = "",
    training_events: Annotated[
        str,
        typer.Option("--training-events", help="With --trace: directory with the events of the training processes."),
    ] = "",
) -> None:
    """Show the events of a running job, or those in a job's journal."""
    from dlrover.cli.events_command import asked, of_journal, print_events
    from dlrover.cli.show.trace import build_trace, write_trace

    if trace:
        history = connection.history()
        _write(
            lambda: write_trace(Path(trace), build_trace(history, Path(training_events) if training_events else None))
        )
        typer.echo(f"{trace}: open it in https://ui.perfetto.dev or chrome://tracing.")
    elif connection.journal is not None:
        print_events(of_journal(connection.journal, limit), is_json=is_json)
    else:
        try:
            print_events(asked(connection.send, limit=limit, follow=follow), is_json=is_json)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


@_command()
def top(
    connection: JobConnection,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit, also in a terminal.")] = False,
) -> None:
    """Watch a running job: goodput, what each node does, the newest events. Ctrl-C ends the display, not the job."""
    from dlrover.cli.show.top import show

    try:
        connection.reached  # noqa: B018  # the first look for the master
    except SeveralRoles:
        from dlrover.cli.ray.command import top_of_roles

        top_of_roles(connection.job, connection.ray, once=once)
        return
    show(connection.send, table_console(), once=once)


@_command(job=JobOrJournal)
def report(
    connection: JobConnection,
    output: Annotated[str, typer.Option("--output", "-o", help="File to write. Not given: standard output.")] = "",
    is_html: Annotated[bool, typer.Option("--html", help="Write one HTML file with plots.")] = False,
    is_markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Write Markdown. This is the default, except for files that end in .html."),
    ] = False,
) -> None:
    """Write a report of a job: how its time was spent, each fault with its cause and cost, and the events."""
    from dlrover.cli.show.post_mortem import as_html, as_markdown

    if is_html and is_markdown:
        raise ConfigError("Give --html or --markdown, not both.")
    history = connection.history()
    wants_html = is_html or (not is_markdown and output.endswith((".html", ".htm")))
    text = as_html(history) if wants_html else as_markdown(history)
    if output:
        _write(lambda: Path(output).write_text(text, encoding="utf-8"))
        typer.echo(f"{output} written.")
    else:
        sys.stdout.write(printable(text))


@_command()
def stop(
    connection: JobConnection,
    reason: Annotated[
        str, typer.Option(help="Reason to record in the journal and show in the report.")
    ] = "dlrover stop",
    message: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Stop a running job on all its nodes, in an orderly way."""
    from dlrover.protocol.messages.job import StopJob

    if message:
        _notice("--message is called --reason now.")
    connection.send(StopJob(message=message or reason))
    typer.echo("The job is stopping.")


@_command()
def scale(
    connection: JobConnection,
    nodes: Annotated[
        str,
        typer.Option("--nodes", help="Number of nodes in the world: N (kept for ten minutes), or MIN:MAX."),
    ] = "",
    replicas: Annotated[
        str,
        typer.Option(
            "--replicas", help="Number of nodes of one type outside the all-reduce world: TYPE=COUNT, such as ps=3."
        ),
    ] = "",
    is_why: Annotated[
        bool, typer.Option("--why", help="Explain why the job has its present size, and change nothing.")
    ] = False,
    auto: Annotated[
        str, typer.Option("--auto", help="Switch automatic scaling: on, off, or dry-run (decide but change nothing).")
    ] = "",
    room: Annotated[
        int,
        typer.Option("--room", help="For jobs of `dlrover local`: most nodes that may run on this host; 0: no limit."),
    ] = -1,
    picture: Annotated[
        str, typer.Option("--picture", help="With --why: write the fitted curve to this SVG file.")
    ] = "",
    is_json: Annotated[bool, typer.Option("--json", help="With --why: print all that is known, as JSON.")] = False,
) -> None:
    """Change the number of nodes of a running job, switch automatic scaling, or explain the present size."""
    from dlrover.cli.options.settings import parse_nnodes
    from dlrover.protocol.messages.fleet import ScaleJob
    from dlrover.protocol.messages.scaling import ScaleTo

    if sum((bool(nodes), bool(replicas), is_why, bool(auto), room >= 0)) != 1:
        raise ConfigError(
            "Give one of --nodes N or MIN:MAX, --replicas TYPE=COUNT, --why, --auto on|off|dry-run, --room N."
        )
    if is_why:
        _show_why(connection, picture=picture, is_json=is_json)
        return
    if auto:
        _set_scaling(connection, auto)
        return
    if room >= 0:
        _limit_room(connection, room)
        return
    command: Question
    if replicas:
        command = _scale_replicas(replicas)
        amount = f"{command.count} nodes of type {command.node_type.value}"
    else:
        amount = f"{nodes} nodes"
        try:
            min_nodes, max_nodes = parse_nnodes(nodes)
        except ConfigError as error:
            raise ConfigError(str(error).replace("--nnodes", "--nodes")) from error
        is_number = ":" not in nodes
        command = ScaleTo(nodes=max_nodes) if is_number else ScaleJob(min_nodes=min_nodes, max_nodes=max_nodes)
    connection.send(command)
    typer.echo(f"The job's target is now {amount}.")


@_command()
def migrate(
    connection: JobConnection,
    node: Annotated[str, typer.Option("--node", help=_NODE_HELP)],
    cpu: Annotated[float, typer.Option("--cpu", help="Processor cores of the new node; 0: the platform's default.")],
    memory_mb: Annotated[
        int, typer.Option("--memory-mb", help="Memory of the new node in MiB; 0: the platform's default.")
    ],
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs of the new node.")] = 0,
    gpu_type: Annotated[str, typer.Option("--gpu-type", help="Kind of these GPUs.")] = "",
) -> None:
    """Replace a node of a job by a node with other resources. The old node leaves when the new one runs."""
    from dlrover.cli.node_names import find_platform_node
    from dlrover.protocol.messages.fleet import MigrateNode, Resource
    from dlrover.protocol.messages.identity import PlatformId
    from dlrover.protocol.messages.job import AskStatus, JobStatus

    resource = Resource(cpu=cpu, memory_mb=memory_mb, gpus=gpus, gpu_type=gpu_type)
    status = connection.ask(AskStatus(), JobStatus)
    if not status.fleet:
        connection.send(MigrateNode(node=PlatformId(-1), resource=resource))  # the master says why it cannot
    found = find_platform_node(status, node)
    connection.send(MigrateNode(node=found.id, resource=resource))
    typer.echo(f"{found.label} is being replaced by a new node.")


@_command()
def suspend(
    connection: JobConnection,
    reason: Annotated[
        str, typer.Option(help="Reason to record in the journal and show in the status.")
    ] = "dlrover suspend",
    is_releasing: Annotated[
        bool,
        typer.Option(
            "--release",
            help="Let the running nodes save and exit too. The platform then starts new nodes when the job is resumed.",
        ),
    ] = False,
) -> None:
    """Suspend a job: no new nodes start until it is resumed. Running nodes keep running, unless --release is given."""
    from dlrover.protocol.messages.fleet import SuspendJob

    connection.send(SuspendJob(reason=reason, is_releasing=is_releasing))
    released = " Its nodes save and exit." if is_releasing else ""
    typer.echo(f"The job is suspended. To resume it: dlrover resume.{released}")


@_command()
def resume(
    connection: JobConnection,
) -> None:
    """Resume a suspended job."""
    from dlrover.protocol.messages.fleet import ResumeJob

    connection.send(ResumeJob())
    typer.echo("The job is resumed.")


@_command()
def restart(
    connection: JobConnection,
    reason: Annotated[
        str, typer.Option(help="Reason to record in the journal and show in the status.")
    ] = "dlrover restart",
    is_nodes: Annotated[bool, typer.Option("--nodes", help="Replace all worker nodes by new ones.")] = False,
    is_workers: Annotated[bool, typer.Option("--workers", hidden=True)] = False,
) -> None:
    """Restart the workers of a job on their present nodes, or with --nodes replace all its worker nodes."""
    from dlrover.protocol.messages.fleet import RestartJob
    from dlrover.protocol.messages.requests import RestartWorkers

    if is_workers and is_nodes:
        raise ConfigError(
            "--nodes and --workers exclude each other. Give --nodes to replace the nodes, or neither to restart "
            "only the workers."
        )
    if is_workers:
        _notice("--workers is the default and can be left out.")
    if is_nodes:
        connection.send(RestartJob(reason=reason))
        typer.echo("The job's nodes are being replaced.")
        return
    connection.send(RestartWorkers(reason=reason))
    typer.echo(
        "The job's workers stop and start again on the same nodes. (`dlrover restart --nodes` replaces the nodes.)"
    )


@_command()
def save(
    connection: JobConnection,
    reason: Annotated[
        str, typer.Option(help="Reason to record in the journal and to show in the status and to the trainers.")
    ] = "dlrover save",
) -> None:
    """Write the next save of a job to storage, also if the script would save only to memory."""
    from dlrover.protocol.messages.checkpoint import RequestSave

    connection.send(RequestSave(reason=reason))
    typer.echo(
        "The trainers write their next save to storage. `dlrover status` shows when the checkpoint is committed."
    )


@_command()
def relaunch(
    connection: JobConnection,
    node: Annotated[str, typer.Option("--node", help=_NODE_HELP)],
    cordon: Annotated[
        bool, typer.Option("--cordon", help="Start no further node of this job on the same machine.")
    ] = False,
    reason: Annotated[
        str, typer.Option(help="Reason to record in the journal and show in the status.")
    ] = "dlrover relaunch",
) -> None:
    """Replace a node of a job by a new node at once."""
    from dlrover.cli.node_names import find_node, find_platform_node
    from dlrover.protocol.messages.identity import NodeId
    from dlrover.protocol.messages.job import AskStatus, JobStatus
    from dlrover.protocol.messages.requests import RelaunchNode

    status = connection.ask(AskStatus(), JobStatus)
    if not status.fleet:  # the master says why it cannot
        connection.send(RelaunchNode(node=find_node(status, node).node, reason=reason, is_cordoned=cordon))
    found = find_platform_node(status, node)
    connection.send(RelaunchNode(node=NodeId(-1), platform_node=found.id, reason=reason, is_cordoned=cordon))
    typer.echo(f"{found.label} is being replaced by a new node.")


@_command()
def dashboard(
    connection: JobConnection,
    is_read_only: Annotated[
        bool, typer.Option("--read-only", help="Print a read-only link. It can be shared and used many times.")
    ] = False,
) -> None:
    """Print a link that opens the page of a job in a browser. The link works once, within ten minutes."""
    import time

    from dlrover.master.web.access import one_time_link, read_only_token
    from dlrover.protocol.messages.job import AskStatus, JobStatus

    reply = connection.ask(AskStatus(), JobStatus)
    if not reply.dashboard:
        raise ConfigError(f"Job {reply.job_name} has no dashboard. Start it with --enable-dashboard.")
    token = connection.reached.token
    secret = read_only_token(token) if is_read_only else one_time_link(token, time.time())
    echo(f"{reply.dashboard}?token={secret}")


@app.command()
def clean() -> None:
    """Remove leftovers of your killed jobs from this host: directories, snapshots, network namespaces and processes."""
    from dlrover.cli.launch.runtime_dir import reap, reap_snapshots, snapshot_root, user_root
    from dlrover.cli.options.environment import read_environment
    from dlrover.platforms.local.starter import remove_left_behind

    environment = read_environment(os.environ)
    removed = reap(user_root(environment), older_than=0.0)
    for left in removed:
        echo(f"removed {left.path} (job {left.job_name or 'unknown'}, ended at least {left.age:.0f} s ago)")
    typer.echo(f"{len(removed)} left-over directories removed.")
    for path in reap_snapshots(snapshot_root(environment), older_than=0.0):
        typer.echo(f"removed the snapshots in {path}")
    for name in remove_left_behind():
        typer.echo(f"removed {name}")


app.command()(simulate)
app.add_typer(brain)
app.add_typer(checkpoint)
app.add_typer(data)
app.add_typer(job_commands.app)
app.add_typer(ray)
# Short forms of `dlrover job …`; the others of that group are commands of their own above.
app.command("submit", hidden=True, context_settings=job_commands.WITH_COMMAND)(job_commands.submit)
for _name, _short in (("ls", job_commands.list_jobs), ("describe", job_commands.describe), ("logs", job_commands.logs)):
    app.command(_name, hidden=True)(_short)


@app.command()
def doctor(
    needed: Annotated[
        list[str] | None,
        typer.Option("--need", help="Require everything of this extra; may be given again.", metavar="EXTRA"),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")] = False,
) -> None:
    """Check this machine for jobs: kernel, packages, extras, platforms, variables. Exit code 1: there is a problem."""
    import msgspec

    from dlrover.cli.help.doctor import FindingState, examine, lines_of

    findings = examine(os.environ, needed or [])
    if is_json:
        echo(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        echo("\n".join(lines_of(findings)))
    raise typer.Exit(any(finding.state is FindingState.PROBLEM for finding in findings))


@app.command()
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a script that lets your shell complete commands and options: `source <(dlrover completion bash)`."""
    from dlrover.cli.help.completion import script_for

    typer.echo(script_for(shell, app), nl=False)


@app.command()
def version() -> None:
    """Print the version."""
    from importlib import metadata

    typer.echo(metadata.version("dlrover"))


def main() -> None:
    """Console script."""
    open_standard_descriptors()
    try:
        app()
    except DLRoverError as error:
        sys.stderr.write(f"dlrover: error: {printable(str(error))}\n")
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def _notice(text: str) -> None:
    """About an old spelling that still works."""
    sys.stderr.write(f"dlrover: notice: {text}\n")


def _write(write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}. Name another file.") from error


def _show_why(connection: JobConnection, *, picture: str, is_json: bool) -> None:
    import msgspec

    from dlrover.cli.show.scaling import draw, why_lines
    from dlrover.protocol.messages.scaling import AskScaling, ScalingStatus

    status = connection.ask(AskScaling(), ScalingStatus)
    if picture:
        _write(lambda: Path(picture).write_text(draw(status), encoding="utf-8"))
    if is_json:
        echo(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
    else:
        echo("\n".join(why_lines(status)))


def _set_scaling(connection: JobConnection, text: str) -> None:
    from dlrover.protocol.messages.scaling import ScaleMode, SetScaling

    try:
        mode = ScaleMode(text.lower())
    except ValueError as error:
        raise ConfigError(f"--auto {text}: give one of {', '.join(each.value for each in ScaleMode)}.") from error
    connection.send(SetScaling(mode=mode))
    typer.echo(f"Automatic scaling is {mode.value}. `dlrover scale --why` explains what it decides.")


def _limit_room(connection: JobConnection, most: int) -> None:
    import asyncio

    from dlrover.platforms.hosted.client import LocalOptions, LocalPlatform

    socket = connection.host_socket
    if socket is None:
        raise ConfigError(
            "--room works only for jobs of `dlrover local` on this host. For other jobs the platform decides "
            "how many nodes fit."
        )
    asyncio.run(LocalPlatform(LocalOptions(socket=socket), "").limit_nodes(most))
    typer.echo(f"At most {most} nodes may run on this host." if most else "Any number of nodes may run on this host.")


def _scale_replicas(text: str) -> ScaleReplicas:
    from dlrover.cli.node_types import node_type_of
    from dlrover.protocol.messages.fleet import NodeType, ScaleReplicas

    name, _, count = text.partition("=")
    try:
        if not (count.isascii() and count.isdigit()):
            raise ValueError(f"{count!r} is not a number of nodes")
        return ScaleReplicas(node_type=node_type_of(name), count=int(count))
    except ValueError as error:
        known = ", ".join(node_type.value for node_type in NodeType)
        raise ConfigError(f"--replicas {text}: give TYPE=COUNT with one of the types {known}.") from error


def _show(status: JobStatus, *, is_json: bool) -> None:
    import msgspec

    if is_json:
        echo(msgspec.json.format(msgspec.json.encode(status), indent=2).decode())
        return
    from dlrover.cli.show.status import show

    show(status, table_console())


if __name__ == "__main__":
    main()
