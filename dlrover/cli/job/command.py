"""
`dlrover job submit | list | describe | logs | stop | suspend | resume | scale`: jobs of a cluster, and jobs on this host.

A job is found by `--addr`, by `--namespace`, else on this host, else in the cluster of the kubeconfig. If both have one of that
name, the command asks which is meant. `kubectl dlrover` is the same program.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dlrover.cli.connection import JobConnection, find_local_job
from dlrover.cli.tables import echo, table_console
from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from dlrover.cli.job.cluster_jobs import ClusterJobs
    from dlrover.platforms.kubernetes.elastic_job import ElasticJob
    from dlrover.platforms.kubernetes.objects import Pod

EXIT_INTERRUPTED = 130
WITH_COMMAND = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context of a command that takes a command line after `--`."""
T = TypeVar("T")

app = typer.Typer(name="job", help="Submit, watch and control jobs of a cluster or of this host.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the job.")]
Namespace = Annotated[
    str,
    typer.Option(
        "--namespace", "-n", help="Namespace in the cluster. Not given: that of the kubeconfig's current context."
    ),
]
Address = Annotated[
    str,
    typer.Option(
        "--addr", "--master", help="Address of the master (HOST:PORT), for a job that runs outside a cluster."
    ),
]
TokenFile = Annotated[str, typer.Option("--token-file", help="File with the job token, with --addr.")]


@app.command(context_settings=WITH_COMMAND)
def submit(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(help="File with an ElasticJob; - reads standard input. Or give -- COMMAND instead.")
    ] = "",
    namespace: Namespace = "",
    name: Annotated[str, typer.Option("--name", help="With -- COMMAND: name of the job.")] = "",
    image: Annotated[str, typer.Option("--image", help="With -- COMMAND: container image that runs it.")] = "",
    nodes: Annotated[str, typer.Option("--nodes", help="With -- COMMAND: number of nodes, N or MIN:MAX.")] = "1",
    cpu: Annotated[
        str, typer.Option("--cpu", help="With -- COMMAND: processor cores for each node, such as 4 or 500m.")
    ] = "",
    memory: Annotated[str, typer.Option("--memory", help="With -- COMMAND: memory for each node, such as 8Gi.")] = "",
    gpus: Annotated[int, typer.Option("--gpus", help="With -- COMMAND: GPUs for each node.", min=0)] = 0,
    is_suspended: Annotated[
        bool, typer.Option("--suspended", help="Submit the job suspended, so that a queue can start it.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show progress until the job ends, then exit with the job's exit code.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the ElasticJob, and create nothing.")] = False,
) -> None:
    """Create an ElasticJob in a cluster: from a file, or from a command line after `--`."""
    from dlrover.cli.job.manifest import CommandJob, job_of_command, read_documents

    # click hands the first word behind `--` to the argument if no file was given.
    command = [*([file] if file and name else []), *context.args]
    if name:
        if not command:
            raise ConfigError(
                "--name is for a command line. Give it after --: dlrover job submit --name a -- dlrover-run …"
            )
        wish = CommandJob(
            name=name,
            image=image,
            command=command,
            nodes=nodes,
            cpu=cpu,
            memory=memory,
            gpus=gpus,
            is_suspended=is_suspended,
        )
        documents = [job_of_command(wish)]
    elif not file or context.args:
        raise ConfigError("Give a FILE with an ElasticJob, or --name NAME --image IMAGE -- COMMAND.")
    else:
        documents = read_documents(file)
        if is_suspended:
            (job,) = (each for each in documents if each.get("kind") == "ElasticJob")
            job.setdefault("spec", {})["suspend"] = True
    if dry_run:
        echo(_as_yaml(documents))
        return
    raise typer.Exit(_run(namespace, lambda jobs: _submit(jobs, documents, wait=wait)))


async def _submit(jobs: ClusterJobs, documents: list[dict[str, Any]], *, wait: bool) -> int:
    from dlrover.cli.job.progress import wait_for_end

    ordered = sorted(documents, key=lambda each: each.get("kind") == "ElasticJob")  # what the job needs comes first
    for document in ordered:
        await jobs.create(document, is_trial=True)
    for document in ordered:
        await jobs.create(document)
    metadata = ordered[-1]["metadata"]
    name = str(metadata["name"])
    jobs.namespace = str(metadata.get("namespace") or jobs.namespace)
    echo(f"Job {name} is submitted to {jobs.namespace}.")
    if not wait:
        return 0
    try:
        return await wait_for_end(jobs, name, echo)
    except asyncio.CancelledError:
        sys.stderr.write(f"The job {name} keeps running. Stop it with: dlrover job stop {name} -n {jobs.namespace}\n")
        raise


@app.command(name="list")
def list_jobs(
    namespace: Namespace = "",
    is_everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")] = False,
) -> None:
    """List the jobs on this host, and those of the cluster if there is one."""
    from rich.table import Table

    from dlrover.cli.job.progress import rows_of

    local = [] if namespace or is_everywhere else _local_names()
    table = Table("NAME", "WHERE", "PHASE", "READY", "ROUND", "STEP", "AGE", box=None)
    for name in local:
        table.add_row(name, "this host", "Running", "-", "-", "-", "-")
    try:
        found = _run(namespace, lambda jobs: jobs.list(is_everywhere=is_everywhere))
    except ConfigError as error:
        if not local:
            raise
        echo(f"The jobs of a cluster cannot be listed: {error}", err=True)
        found = ()
    for row in rows_of(found):
        table.add_row(*row)
    if not table.row_count:
        typer.echo("No jobs.")
        return
    table_console().print(table)


@app.command()
def describe(
    name: Name,
    namespace: Namespace = "",
    addr: Address = "",
    token_file: TokenFile = "",
) -> None:
    """Show a job: its phase and the reason, its pods, and its newest events."""
    if local := _local(name, namespace, addr, token_file):
        from dlrover.cli.show.status import show
        from dlrover.protocol.messages.job import AskStatus, JobStatus

        show(local.ask(AskStatus(), JobStatus), table_console())
        return

    async def look(jobs: ClusterJobs) -> None:
        from dlrover.cli.job.progress import page_of

        job = await jobs.get(name)
        for line in page_of(job, await jobs.pods(job), await jobs.events(job)):
            echo(line)

    _run(namespace, look)


@app.command()
def logs(
    name: Name,
    namespace: Namespace = "",
    node: Annotated[
        str,
        typer.Option(
            "--node", help="Node whose log to print: worker-3 (or 3), chief-0, or master. Not given: worker-0."
        ),
    ] = "",
    rank: Annotated[str, typer.Option("--rank", hidden=True)] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the pod ends.")] = False,
    tail: Annotated[int, typer.Option("--tail", help="Print this many lines from the end; 0: all.", min=0)] = 0,
) -> None:
    """Print the log of a node of a job in a cluster."""
    if rank:
        echo("dlrover: notice: --rank is called --node now.", err=True)

    async def read(jobs: ClusterJobs) -> None:
        job = await jobs.get(name)
        pod = _pod_of(await jobs.pods(job), node or rank or "worker-0", name)
        async for piece in jobs.log(pod, follow=follow, tail=tail or None):
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()

    _run(namespace, read)


@app.command()
def stop(
    name: Name,
    namespace: Namespace = "",
    addr: Address = "",
    token_file: TokenFile = "",
    reason: Annotated[str, typer.Option(help="Reason to show in the status and the report.")] = "dlrover job stop",
    is_deleted: Annotated[
        bool, typer.Option("--delete", help="Delete the job and all its objects from the cluster.")
    ] = False,
) -> None:
    """Stop a job on all its nodes, in an orderly way."""
    if local := _local(name, namespace, addr, token_file):
        from dlrover.protocol.messages.job import StopJob

        local.send(StopJob(message=reason))
        typer.echo("The job is stopping.")
        return

    async def end(jobs: ClusterJobs) -> None:
        from dlrover.cli.job.progress import is_over
        from dlrover.platforms.kubernetes.names import STOP

        job = await jobs.get(name)
        if is_deleted:
            await jobs.delete(name)
            typer.echo(f"The job {name} is being deleted.")
        elif is_over(job):
            typer.echo(f"The job {name} has ended already ({job.status.phase}).")
        else:
            await jobs.change(name, {"metadata": {"annotations": {STOP: reason or "stopped"}}})
            typer.echo(f"The job {name} is stopping.")

    _run(namespace, end)


@app.command()
def suspend(
    name: Name,
    namespace: Namespace = "",
    addr: Address = "",
    token_file: TokenFile = "",
    is_releasing: Annotated[
        bool,
        typer.Option(
            "--release/--keep-nodes", help="Let the running nodes save and exit. This is the default in a cluster."
        ),
    ] = True,
) -> None:
    """Pause a job: its nodes save and exit. `resume` starts new nodes, which continue from the checkpoint."""
    if local := _local(name, namespace, addr, token_file):
        from dlrover.protocol.messages.fleet import SuspendJob

        local.send(SuspendJob(reason="dlrover job suspend", is_releasing=is_releasing))
        typer.echo("The job is suspended. To resume it: dlrover job resume")
        return
    if not is_releasing:
        raise ConfigError("--keep-nodes is for jobs outside of a cluster: a suspended ElasticJob has no pods.")

    async def change(jobs: ClusterJobs) -> None:
        from dlrover.platforms.kubernetes.elastic_job import forgets_when_suspended

        if loss := forgets_when_suspended(await jobs.get(name)):
            echo(f"Warning: {loss}", err=True)
        await jobs.change(name, {"spec": {"suspend": True}})
        typer.echo(f"The job {name} is suspended. To resume it: dlrover job resume {name}")

    _run(namespace, change)


@app.command()
def resume(name: Name, namespace: Namespace = "", addr: Address = "", token_file: TokenFile = "") -> None:
    """Resume a suspended job."""
    if local := _local(name, namespace, addr, token_file):
        from dlrover.protocol.messages.fleet import ResumeJob

        local.send(ResumeJob())
        typer.echo("The job is resumed.")
        return
    _change(namespace, name, {"spec": {"suspend": False}}, f"The job {name} is resumed.")


@app.command()
def scale(
    name: Name,
    nodes: Annotated[int, typer.Argument(help="Number of nodes that the job should have.", min=0)],
    namespace: Namespace = "",
    node_type: Annotated[str, typer.Option("--type", help="Type of these nodes.")] = "worker",
    least: Annotated[
        int, typer.Option("--min", help="The smallest number of workers with which the job trains.", min=0)
    ] = 0,
    most: Annotated[int, typer.Option("--max", help="The largest number of workers of the job.", min=0)] = 0,
    addr: Address = "",
    token_file: TokenFile = "",
) -> None:
    """Change the number of nodes of a job. A number outside its bounds moves the bound; --min and --max set the bounds."""
    if (least or most) and node_type != "worker":
        raise ConfigError("--min and --max are bounds of the workers.")
    if not (least or nodes) <= nodes <= (most or nodes):
        raise ConfigError(f"{nodes} nodes lie outside of --min {least or nodes} and --max {most or nodes}.")
    if local := _local(name, namespace, addr, token_file):
        from dlrover.cli.node_types import node_type_of
        from dlrover.protocol.messages.fleet import NodeType, ScaleJob, ScaleReplicas
        from dlrover.protocol.messages.scaling import ScaleTo

        kind = node_type_of(node_type)
        if least or most:
            local.send(ScaleJob(min_nodes=least or nodes, max_nodes=most or nodes))
        is_world = kind is NodeType.WORKER
        local.send(
            ScaleTo(nodes=nodes, reason="dlrover job scale") if is_world else ScaleReplicas(node_type=kind, count=nodes)
        )
        typer.echo(f"The target is now {nodes} nodes of type {node_type}.")
        return

    async def change(jobs: ClusterJobs) -> None:
        job = await jobs.get(name)
        if node_type not in job.spec.replica_specs:
            known = ", ".join(job.spec.replica_specs)
            raise ConfigError(f"The job {name} has no nodes of type {node_type}. It has: {known}.")
        replica = job.spec.replica_specs[node_type]
        change = {"replicas": nodes}
        # The definition holds the number between the bounds, so a number outside moves them.
        if least or (replica.min_replicas is not None and nodes < replica.min_replicas):
            change["minReplicas"] = least or nodes
        if most or (replica.max_replicas is not None and nodes > replica.max_replicas):
            change["maxReplicas"] = most or nodes
        await jobs.change(name, {"spec": {"replicaSpecs": {node_type: change}}})
        typer.echo(f"The target of job {name} is now {nodes} nodes of type {node_type}.")

    _run(namespace, change)


def _change(namespace: str, name: str, patch: dict[str, Any], said: str) -> None:
    async def change(jobs: ClusterJobs) -> None:
        await jobs.change(name, patch)
        typer.echo(said)

    _run(namespace, change)


def _run(namespace: str, work: Callable[[ClusterJobs], Awaitable[T]]) -> T:
    """In the cluster. Ctrl-C ends the command with 130."""
    from dlrover.cli.job.cluster_jobs import open_cluster

    async def run() -> T:
        async with open_cluster(namespace) as jobs:
            return await work(jobs)

    try:
        return asyncio.run(run())
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _local(name: str, namespace: str, addr: str, token_file: str) -> JobConnection | None:
    """None: the job is one of a cluster. Raises `ConfigError` if a cluster has one of that name, too."""
    if addr:
        return JobConnection(addr=addr, token_file=token_file)
    if namespace:
        return None
    if name not in _local_names():
        return None
    if _is_in_cluster(name):
        raise ConfigError(
            f"Both this host and the cluster have a job {name}. For the job of this host, give --addr "
            f"{find_local_job(name).address} --token-file {find_local_job(name).token_file}. For the job of the "
            "cluster, give --namespace NAME."
        )
    return JobConnection(job=name)


def _local_names() -> list[str]:
    import os

    from dlrover.cli.launch.runtime_dir import list_nodes, user_root
    from dlrover.cli.options.environment import read_environment

    living, _ = list_nodes(user_root(read_environment(os.environ)))
    return sorted({owner.job_name for _, owner in living if owner.master_addr})


def _is_in_cluster(name: str) -> bool:
    """Without a cluster there is no doubt about which job is meant."""

    async def look(jobs: ClusterJobs) -> ElasticJob | None:
        return await jobs.find(name)

    try:
        return _run("", look) is not None
    except ConfigError:
        return False


def _pod_of(pods: tuple[Pod, ...], node: str, name: str) -> Pod:
    """The newest pod of that node."""
    from dlrover.cli.job.progress import label_of

    wanted = f"worker-{node}" if node.isdigit() else node
    fitting = [pod for pod in pods if label_of(pod) == wanted]
    if not fitting:
        known = ", ".join(sorted({label_of(pod) for pod in pods})) or "none"
        raise ConfigError(f"The job {name} has no pod of {wanted}. It has: {known}.")
    return max(fitting, key=lambda pod: (pod.metadata.creation_timestamp is not None, pod.metadata.creation_timestamp))


def _as_yaml(documents: list[dict[str, Any]]) -> str:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"Job files need PyYAML: pip install 'dlrover[k8s]' ({error})") from error

    return str(yaml.safe_dump_all(documents, sort_keys=False)).rstrip()
