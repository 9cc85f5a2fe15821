"""
`dlrover brain`: run the service that many jobs share, look at what it knows, and manage its database.

`jobs`, `job` and `plans` ask a running service, over the wire, and `monitor` reports to one. The others work on the database itself, so they are for those who may open it. Neither a token nor a database's URL stands
on a command line, where every user of the machine could read it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dlrover.cli.tables import echo, table_console
from dlrover.protocol.addresses import TlsConfig
from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from dlrover.brain.config import RetentionTerms, ServiceTerms

T = TypeVar("T")

app = typer.Typer(
    name="brain",
    help="Run Brain, the service that learns from many jobs, and look at what it knows.",
    no_args_is_help=True,
)

UrlFile = Annotated[
    str,
    typer.Option(
        "--database-url-file", help="File that holds the URL of the database (DLROVER_BRAIN_DATABASE_URL_FILE)."
    ),
]
SqliteFile = Annotated[
    str, typer.Option("--sqlite", help="SQLite file to use as the database. Default: a file of this user.")
]
Address = Annotated[
    str, typer.Option("--brain", help="Brain's HOST:PORT (DLROVER_BRAIN_SERVICE_ADDR, else 127.0.0.1:50001).")
]
TokenFile = Annotated[
    str, typer.Option("--brain-token-file", help="File that holds a Brain token (DLROVER_BRAIN_TOKEN_FILE).")
]
CaFile = Annotated[
    str,
    typer.Option(
        "--brain-ca", help="CA certificate (PEM) that Brain's certificate must come from. Giving it switches TLS on."
    ),
]
Tenant = Annotated[
    str,
    typer.Option(
        "--tenant", help="Show the data of this tenant instead of your own; * for all tenants. Needs an admin's token."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print all that is known, as JSON.")]
RunDays = Annotated[float, typer.Option("--run-days", help="Days for which runs and ends of nodes are kept.", min=0.01)]
JobDays = Annotated[float, typer.Option("--job-days", help="Days for which jobs are kept.", min=0.01)]
PlanDays = Annotated[float, typer.Option("--plan-days", help="Days for which plans are kept.", min=0.01)]


@app.command()
def serve(
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any other than loopback needs tokens.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", help="Port for masters and commands; 0: any free port.", min=0, max=65535)
    ] = 50001,
    http_port: Annotated[
        str,
        typer.Option(
            "--http-port",
            help="HTTP port for browsers and for clients of the original Brain; `none`: open no such port.",
        ),
    ] = "8000",
    cert: Annotated[str, typer.Option("--tls-cert", help="PEM certificate; switches TLS on, with --tls-key.")] = "",
    key: Annotated[str, typer.Option("--tls-key", help="PEM key of the certificate.")] = "",
    database_url_file: UrlFile = "",
    sqlite: SqliteFile = "",
    run_days: RunDays = 90.0,
    job_days: JobDays = 400.0,
    plan_days: PlanDays = 400.0,
) -> None:
    """Run Brain until SIGTERM or Ctrl-C. A new SQLite file gets its tables; any other database needs `dlrover brain migrate` first."""
    _need_extra()
    from dlrover.brain.config import RetentionTerms, ServiceTerms

    if bool(cert) != bool(key):
        raise ConfigError("--tls-cert and --tls-key belong together: give both, or neither.")
    if http_port != "none" and not (http_port.isascii() and http_port.isdigit() and int(http_port) < 65536):
        raise ConfigError(f"--http-port {http_port}: give a number from 0 to 65535, or `none`.")
    terms = ServiceTerms(
        host=host,
        port=port,
        http_port=None if http_port == "none" else int(http_port),
        tls=TlsConfig(cert=cert, key=key) if cert else None,
        retention=RetentionTerms(run_days=run_days, job_days=job_days, plan_days=plan_days),
    )
    engine = _open(database_url_file, sqlite)
    asyncio.run(_serve(engine, terms))


async def _serve(engine: Engine, terms: ServiceTerms) -> None:
    from dlrover.brain.serving import RunningBrain
    from dlrover.brain.store.database import SQLITE, migrate, shown_url, version_of

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    if engine.url.drivername == SQLITE and not version_of(engine):
        migrate(engine)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with RunningBrain(engine, terms) as brain:
        http = "" if brain.http_port is None else f", HTTP on {brain.http_port}"
        who = "this machine's programs" if brain.doorkeeper.is_open else "programs with a token"
        echo(f"Brain serves {who} on {terms.host}:{brain.port}{http}. Database: {shown_url(engine.url)}")
        await ended.wait()


@app.command(name="migrate")
def migrate_tables(database_url_file: UrlFile = "", sqlite: SqliteFile = "") -> None:
    """Create the tables of a database, or upgrade them to this version. Stop every Brain on the database first."""
    _need_extra()
    from dlrover.brain.store.database import migrate, shown_url

    engine = _open(database_url_file, sqlite)
    before, after = migrate(engine)
    where = shown_url(engine.url)
    echo(
        f"{where} has version {after} already."
        if before == after
        else f"{where}: version {before or 'none'} became {after}."
    )


@app.command()
def jobs(
    name: Annotated[str, typer.Option("--name", help="Show only jobs of this name.")] = "",
    most: Annotated[
        int, typer.Option("--limit", help="Show at most this many, the newest first.", min=1, max=500)
    ] = 50,
    tenant: Tenant = "",
    brain: Address = "",
    token_file: TokenFile = "",
    ca: CaFile = "",
    is_json: Json = False,
) -> None:
    """List the jobs that Brain knows, the newest first."""
    from dlrover.cli.brain.asking import as_json, ask
    from dlrover.cli.brain.shown import job_table
    from dlrover.protocol.messages.brain import JobList, JobsAsked

    found = ask(JobsAsked(name=name, most=most, tenant=tenant), JobList, brain, token_file, ca)
    if is_json:
        echo(as_json(found))
    elif not found.jobs:
        typer.echo("Brain knows no job.")
    else:
        table_console().print(job_table(found.jobs))


@app.command()
def job(
    uid: Annotated[
        str, typer.Argument(help="Uid of the job, or its name. A name stands for the newest job of that name.")
    ],
    most: Annotated[
        int, typer.Option("--limit", help="Show at most this many runs and plans, the newest first.", min=1, max=500)
    ] = 100,
    tenant: Tenant = "",
    brain: Address = "",
    token_file: TokenFile = "",
    ca: CaFile = "",
    is_json: Json = False,
) -> None:
    """Show a job: its runs and its plans, each with the expected and the measured speed."""
    from dlrover.cli.brain.asking import as_json, ask_for_job
    from dlrover.cli.brain.shown import job_page

    found = ask_for_job(uid, most, tenant, brain, token_file, ca)
    if is_json:
        echo(as_json(found))
        return
    console = table_console()
    for part in job_page(found):
        console.print(part)


@app.command()
def plans(
    most: Annotated[
        int, typer.Option("--limit", help="Show at most this many, the newest first.", min=1, max=500)
    ] = 50,
    tenant: Tenant = "",
    brain: Address = "",
    token_file: TokenFile = "",
    ca: CaFile = "",
    is_json: Json = False,
) -> None:
    """List plans, the newest first, each with the expected and the measured speed."""
    from dlrover.cli.brain.asking import as_json, ask
    from dlrover.cli.brain.shown import plan_table
    from dlrover.protocol.messages.brain import PlanList, PlansAsked

    found = ask(PlansAsked(most=most, tenant=tenant), PlanList, brain, token_file, ca)
    if is_json:
        echo(as_json(found))
    elif not found.plans:
        typer.echo("Brain knows no plan.")
    else:
        table_console().print(plan_table(found.plans))


@app.command()
def settings(
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Value to set in the entry --entry, as KEY=VALUE; may be given again."),
    ] = None,
    entry: Annotated[
        int,
        typer.Option(
            "--entry", help="Number of the entry to change. Brain uses the first entry that fits a job.", min=1
        ),
    ] = 1,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include",
            help="The entry is only for these jobs, for example user=a,b. Keys: user, namespace, cluster, app, tenant.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="The entry is not for these jobs. The form is that of --include."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the entry --entry.")] = False,
    database_url_file: UrlFile = "",
    sqlite: SqliteFile = "",
) -> None:
    """Show the settings for jobs, or change an entry. An entry has parameters of the algorithms and other values, and the jobs that it is for."""
    _need_extra()
    from dlrover.brain.settings import change_setting, remove_setting, warnings_about
    from dlrover.brain.store.reading import find_settings

    engine = _checked(database_url_file, sqlite)
    if remove:
        if not _change(engine, lambda connection: remove_setting(connection, entry)):
            raise ConfigError(f"--entry {entry}: there is no such entry. `dlrover brain settings` lists them.")
    elif set_ or include or exclude:
        warnings = warnings_about(set_ or [])
        _change(engine, lambda connection: change_setting(connection, entry, set_ or [], include, exclude))
        for warning in warnings:
            echo(f"dlrover: warning: {warning}", err=True)
    with engine.connect() as connection:
        entries = find_settings(connection)
    for each in entries:
        echo(f"entry {each.position}")
        for title, scope in (("include", each.include), ("exclude", each.exclude)):
            for name, values in scope.items():
                echo(f"  {title} {name}={','.join(values)}")
        for name, value in each.values.items():
            echo(f"  {name} = {value}")
    if not entries:
        typer.echo("There are no settings: every parameter has its default.")


@app.command()
def tenants(
    action: Annotated[str, typer.Argument(help="What to do: list, add or remove.")] = "list",
    name: Annotated[str, typer.Argument(help="Name of the tenant whose token you add or remove.")] = "",
    role: Annotated[
        str,
        typer.Option(
            "--role",
            help="Role of the token: job, reader, admin or monitor. `remove` without --role removes the tokens of all "
            "roles.",
        ),
    ] = "",
    token_file: Annotated[
        str,
        typer.Option(
            "--token-file",
            help="Write the new token to this file, which must not exist. Without it the command prints the token.",
        ),
    ] = "",
    row_limit: Annotated[
        int | None, typer.Option("--row-limit", help="Keep at most this many runs of the tenant; 0: no limit.", min=0)
    ] = None,
    database_url_file: UrlFile = "",
    sqlite: SqliteFile = "",
) -> None:
    """List tenants, give a tenant a token, or remove a tenant's tokens. The database stores only the hash of a token."""
    _need_extra()
    from dlrover.brain.tenants import TokenRole, add_token, list_tenants, remove_tokens
    from dlrover.cli.brain.token_files import write_token

    known = [each.value for each in TokenRole]
    if action not in ("list", "add", "remove") or bool(name) == (action == "list"):
        raise ConfigError("Give `list`, `add NAME` or `remove NAME`.")
    if role and role not in known:
        raise ConfigError(f"--role {role}: give one of {', '.join(known)}.")
    engine = _checked(database_url_file, sqlite)
    if action == "add":
        import time

        chosen = TokenRole(role or TokenRole.JOB)
        with write_token(token_file) as keep:
            token = _change(
                engine, lambda connection: add_token(connection, name, chosen, time.time(), row_limit=row_limit)
            )
            keep(token)
        where = f"Its token is in {token_file}." if token_file else f"Its token, which Brain cannot show again: {token}"
        echo(f"Tenant {name} has a token with the role {chosen}. {where}")
    elif action == "remove":
        count = _change(engine, lambda connection: remove_tokens(connection, name, TokenRole(role) if role else None))
        if not count:
            raise ConfigError(f"Tenant {name} has no such token. `dlrover brain tenants` lists them.")
        echo(f"{count} token{('' if count == 1 else 's')} of {name} removed. The tenant's jobs are kept.")
    else:
        from rich.table import Table

        table = Table("TENANT", "TOKENS", "ROW LIMIT", "JOBS", box=None)
        with engine.connect() as connection:
            rows = list_tenants(connection)
        for row in rows:
            tokens = ", ".join(f"{count} {kind}" for kind, count in row.roles.items()) or "none"
            table.add_row(row.name, tokens, str(row.row_limit or "-"), str(row.num_jobs))
        if rows:
            table_console().print(table)
        else:
            typer.echo("There is no tenant. Brain serves only this machine, without tokens.")


@app.command()
def prune(
    run_days: RunDays = 90.0,
    job_days: JobDays = 400.0,
    plan_days: PlanDays = 400.0,
    database_url_file: UrlFile = "",
    sqlite: SqliteFile = "",
) -> None:
    """Delete data that are older than the given numbers of days. A running Brain does so every hour."""
    _need_extra()
    from dlrover.brain.config import RetentionTerms

    engine = _checked(database_url_file, sqlite)
    retention = RetentionTerms(run_days=run_days, job_days=job_days, plan_days=plan_days)
    deleted = asyncio.run(_prune(engine, retention))
    echo(", ".join(f"{table}: {count} rows deleted" for table, count in deleted.items()))


@app.command()
def monitor(
    cluster: Annotated[
        str, typer.Option("--cluster", help="Name of the cluster (DLROVER_BRAIN_CLUSTER), as its jobs have it.")
    ] = "",
    kubeconfig: Annotated[
        str, typer.Option("--kubeconfig", help="How to reach the cluster (KUBECONFIG, or the pod's account).")
    ] = "",
    brain: Address = "",
    token_file: TokenFile = "",
    ca: CaFile = "",
) -> None:
    """Report pods and machines of a Kubernetes cluster to Brain, until SIGTERM or Ctrl-C. It needs a token with the role `monitor`, and may list and watch pods and nodes."""
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(
            "This command needs the extra `k8s` of this package; aiohttp is missing. Install it: pip install 'dlrover[k8s]'"
        )
    from dlrover.cli.brain.asking import find_way
    from dlrover.cli.brain.monitoring import watch_cluster
    from dlrover.cli.options.brain_settings import CLUSTER

    cluster = cluster or os.environ.get(CLUSTER, "").strip()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(watch_cluster(cluster, kubeconfig, find_way(brain, token_file, ca)))


async def _prune(engine: Engine, retention: RetentionTerms) -> dict[str, int]:
    from dlrover.brain.store.pruning import prune as prune_store
    from dlrover.brain.store.store import BrainStore

    store = BrainStore(engine, gather=0.0)
    store.start()
    try:
        return await prune_store(store, retention)
    finally:
        await asyncio.to_thread(store.close)


def _open(url_file: str, sqlite: str) -> Engine:
    from dlrover.brain.store.database import database_url, open_engine

    return open_engine(database_url(url_file, sqlite, os.environ))


def _checked(url_file: str, sqlite: str) -> Engine:
    """With the tables of this version; a new SQLite file gets them."""
    from dlrover.brain.store.database import SQLITE, check_version, migrate, version_of

    engine = _open(url_file, sqlite)
    if engine.url.drivername == SQLITE and not version_of(engine):
        migrate(engine)
    check_version(engine)
    return engine


def _change(engine: Engine, change: Callable[[Connection], T]) -> T:
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        return change(connection)


def _need_extra() -> None:
    """Raises ConfigError."""
    missing = [
        name for name in ("sqlalchemy", "alembic", "starlette", "uvicorn") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ConfigError(
            f"This command needs the extra `brain` of this package; {', '.join(missing)} is missing. Install it: pip install 'dlrover[brain]'"
        )
