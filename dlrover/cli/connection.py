"""
How a command on a terminal reaches the job that it is about.

Each such command takes one `JobConnection`. `takes_connection` writes the options that make one (which job, where its master is,
which token, which certificates) into the command's signature, so that they are the same everywhere.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar, get_type_hints

import typer

from dlrover.protocol.errors import ConfigError

if TYPE_CHECKING:
    from dlrover.cli.show.history import History
    from dlrover.protocol.addresses import TlsConfig
    from dlrover.protocol.codec import Question
    from dlrover.protocol.messages.job import Reply

ASK_TIMEOUT = 10.0
MASTER_FILE = "master.json"
"""In the directory of a launcher that hosts the master; it says where the journal is."""

HOST_SOCKET = "host.sock"

Job = Annotated[
    str, typer.Argument(help="Name of a job on this host, or the beginning of it; not needed if only one runs.")
]
JobOrJournal = Annotated[
    str,
    typer.Argument(
        help="Name of a job on this host, or the beginning of it (not needed if only one runs), or the file of a journal."
    ),
]
Address = Annotated[str, typer.Option("--addr", "--master-addr", help="Master's HOST:PORT, or DLROVER_MASTER_ADDR.")]
RayCluster = Annotated[
    str, typer.Option("--ray", help="The job runs on this Ray cluster: HOST:PORT, or auto for the one of this machine.")
]
TokenFile = Annotated[str, typer.Option("--token-file", help="File with the job token, or DLROVER_JOB_TOKEN.")]
TlsCa = Annotated[
    str,
    typer.Option(
        "--tls-ca",
        help="CA certificates (PEM) that the master's certificate must come from. Giving it switches TLS on.",
    ),
]
TlsCert = Annotated[str, typer.Option("--tls-cert", help="Your certificate (PEM), if the master asks for one.")]
TlsKey = Annotated[str, typer.Option("--tls-key", help="The key of your certificate (PEM).")]

_OPTIONS = {
    "job": Job,
    "addr": Address,
    "ray": RayCluster,
    "token_file": TokenFile,
    "tls_ca": TlsCa,
    "tls_cert": TlsCert,
    "tls_key": TlsKey,
}
R = TypeVar("R")


class SeveralRoles(ConfigError):
    """A master was asked for, and the job has one for each of its elastic roles."""

    def __init__(self, job: str, elastic: Sequence[str]) -> None:
        masters = f" Name one with a master: {', '.join(elastic)}." if elastic else ""
        super().__init__(
            f"Job {job} has several roles, and no master of its own.{masters} `dlrover top {job} --ray …` and "
            f"`dlrover ray status {job}` show all roles."
        )


class Reached(NamedTuple):
    """A master, what opens it, and how to trust it."""

    address: str
    token: str
    tls: TlsConfig | None


@dataclass(frozen=True)
class JobConnection:
    """As the options say; the master is looked for when it is needed."""

    job: str = ""
    addr: str = ""
    ray: str = ""
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    may_be_journal: bool = False
    """In place of a job's name the file of a journal may be given."""

    @functools.cached_property
    def reached(self) -> Reached:
        from dlrover.cli.launch.discovery import read_token_file
        from dlrover.cli.options.environment import read_environment
        from dlrover.protocol.addresses import TlsConfig

        if self.ray:
            return self._find_on_ray()
        environment, address = read_environment(os.environ), self._given_address
        token = read_token_file(self.token_file) if self.token_file else environment.job_token
        has_tls = self.tls_ca or self.tls_cert or self.tls_key
        tls = TlsConfig(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key) if has_tls else None
        if not address:
            found = self._find_local_job()
            address, tls = found.address, tls or found.tls
            token = token or read_token_file(found.token_file)
        return Reached(address, token, tls)

    @property
    def _given_address(self) -> str:
        """By option or environment; empty: the job is to be found on this host."""
        from dlrover.cli.options.environment import read_environment
        from dlrover.protocol.addresses import parse_address

        if self.addr:
            return str(parse_address(self.addr, shown=f"--addr {self.addr}"))
        given = "" if self.job else read_environment(os.environ).master_addr
        return str(parse_address(given, shown=f"DLROVER_MASTER_ADDR={given}")) if given else ""

    def send(self, question: Question) -> Reply:
        import asyncio

        from dlrover.cli.options.environment import read_environment
        from dlrover.protocol.rpc.client import ask

        address, token, tls = self.reached
        timeout = read_environment(os.environ).client_timeout or ASK_TIMEOUT
        return asyncio.run(ask(address, question, token=token, tls=tls, timeout=timeout))

    def ask(self, question: Question, answer: type[R]) -> R:
        """For questions that have one kind of answer."""
        reply = self.send(question)
        assert isinstance(reply, answer), f"the master answered {type(question).__name__} with {type(reply).__name__}"
        return reply

    @property
    def journal(self) -> Path | None:
        """The file that was given instead of the name of a job."""
        return Path(self.job) if os.path.isfile(self.job) else None

    @property
    def host_socket(self) -> str | None:
        """Of `dlrover local`, which hosts the nodes of the job on this machine; None: it does not."""
        if self._given_address:
            return None
        path = os.path.join(self._find_local_job().directory, HOST_SOCKET)
        return path if os.path.exists(path) else None

    def history(self) -> History:
        """From the journal where we can read it, else from what the master knows."""
        from dlrover.cli.show.history import ask_history, read_history

        journal = self.journal
        if journal is None and not self.ray and not self._given_address:
            journal = _journal_of(self._find_local_job())
        return read_history(journal) if journal is not None else ask_history(self.send)

    def _find_on_ray(self) -> Reached:
        """The job's host knows its master and the token."""
        from dlrover.cli.ray.command import elastic_roles, found_job

        if self.addr:
            raise ConfigError("Give --addr or --ray, not both: each names the job's master.")
        with found_job(self.job, self.ray) as job:
            account = job.account()
            if not account.address:
                raise SeveralRoles(job.name, elastic_roles(job.name))
        return Reached(account.address, account.token, account.tls)

    def _find_local_job(self) -> RunningJob:
        return find_local_job(self.job, otherwise=", nor is there such a file" if self.may_be_journal else "")


def takes_connection(command: Callable[..., None], job: object = Job) -> Callable[..., None]:
    """The command as typer shall see it: its parameter `connection` replaced by the options of one, at the end."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters
    names = [name for name in own if name != "connection"]
    kinds = {**_OPTIONS, "job": job}
    parameters = [own[name].replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY) for name in names]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=kind)
        for name, kind in kinds.items()
    ]

    @functools.wraps(command)
    def as_typed(**given: object) -> None:
        options = {name: str(given.pop(name)) for name in kinds}
        connection = JobConnection(**options, may_be_journal=job is JobOrJournal)
        command(connection=connection, **given)

    as_typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    as_typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return as_typed


class RunningJob(NamedTuple):
    """How a job of ours that runs on this host is reached."""

    address: str
    token_file: str
    tls: TlsConfig | None
    directory: str


def find_local_job(job: str, *, otherwise: str = "") -> RunningJob:
    """Raises `ConfigError`; `otherwise`: what else the name could have been, and is not."""
    from dlrover.cli.launch.runtime_dir import TOKEN_FILE, list_nodes, user_root
    from dlrover.cli.options.environment import read_environment

    living, _ = list_nodes(user_root(read_environment(os.environ)))
    jobs: dict[str, dict[str, RunningJob]] = {}
    for path, owner in living:
        if owner.master_addr:
            # By the port: nodes of one job may call the host of its master by several names.
            port = owner.master_addr.rpartition(":")[2]
            known = jobs.setdefault(owner.job_name, {})
            if port in known and os.path.exists(os.path.join(known[port].directory, MASTER_FILE)):
                continue  # a node with the journal is the better one to ask
            known[port] = RunningJob(owner.master_addr, os.path.join(path, TOKEN_FILE), owner.tls, path)
    fitting = [job] if job in jobs else [name for name in sorted(jobs) if name.startswith(job)]
    if len(fitting) != 1:
        if job and fitting:
            names = ", ".join(fitting)
            raise ConfigError(
                f"The names of {len(fitting)} of your jobs on this host begin with {job}: {names}. Give more of "
                "the name."
            )
        what = (
            f"You have no running job {job} on this host{otherwise}" if job else "Name a job, or give --addr HOST:PORT"
        )
        raise ConfigError(f"{what}. Running here: {', '.join(sorted(jobs)) or 'none'}.")
    (name,) = fitting
    found = list(jobs[name].values())
    if len(found) > 1:
        choices = " or ".join(f"--addr {each.address} --token-file {each.token_file}" for each in found)
        raise ConfigError(f"You have {len(found)} jobs named {name} on this host. Give {choices}.")
    return found[0]


def _journal_of(local: RunningJob) -> Path | None:
    """None: the job's master runs elsewhere."""
    import msgspec

    from dlrover.master.config import MasterConfig

    try:
        config = msgspec.json.decode(Path(local.directory, MASTER_FILE).read_bytes(), type=MasterConfig)
    except (OSError, msgspec.MsgspecError):
        return None
    return Path(config.journal) if os.path.isfile(config.journal) else None
