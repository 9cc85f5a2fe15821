"""What the launcher tells a master, once, as JSON: `python -m dlrover.master --config FILE`."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from msgspec import Struct

from dlrover.host.log_root import LogRoot
from dlrover.protocol.addresses import LOOPBACK, TlsConfig, is_loopback
from dlrover.protocol.errors import ConfigError
from dlrover.protocol.messages.brain import JobRecipe
from dlrover.protocol.messages.fleet import FleetSpec
from dlrover.protocol.messages.goodput import GoodputStatus
from dlrover.protocol.messages.job import JobEnd
from dlrover.protocol.messages.scaling import ScaleTerms
from dlrover.protocol.messages.watch import WatchTerms

EXIT_USAGE = 2
EXIT_PORT_IN_USE = 3
"""The launcher may then connect to the program that listens there."""
EXIT_FENCED = 4
EXIT_JOURNAL = 5
EXIT_STOPPED = 6
"""This process was asked to stop. That says nothing about the job, which goes on under the next master."""
EXIT_BUG = 70


class BrainTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a job speaks with Brain, the service that keeps what the jobs of a cluster measured."""

    address: str
    """HOST:PORT."""
    token_file: str = ""
    """File with the tenant's token. Empty: none is sent, which a Brain on loopback takes."""
    tls: TlsConfig | None = None
    recipe: JobRecipe = JobRecipe()
    """By what alike jobs are found."""
    user: str = ""
    cluster: str = ""
    namespace: str = ""
    app: str = ""
    min_nodes: int = 1
    """Workers that the job needs at least: agents tell it too, but only when the first of them runs."""
    node_unit: int = 1


class MasterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    job_name: str
    journal: str
    """Path of the SQLite file; a restarted master of the job continues from it."""
    host: str = LOOPBACK
    """Address to listen on; `0.0.0.0` or `::` for all. Loopback by default, because a job of one host needs no more."""
    port: int = 0
    """0: any free one, told in the ready file."""
    token_file: str = ""
    """File with the job token. Empty: no client is asked for one, and only loopback is served."""
    tls: TlsConfig | None = None
    ready_file: str = ""
    """Written whole once the master serves: `Ready` as JSON. Empty: not written."""
    ready_fd: int = -1
    """The same as one line into an inherited descriptor, which is then closed. -1: not written."""
    end_file: str = ""
    """Written whole when the job is over: `JobEnd` as JSON. The program that started the master believes this and no exit code,
    because a code can come from anywhere. Empty: not written."""
    log_file: str = ""
    """Empty: standard error."""
    log_root: LogRoot | None = None
    """Where the log goes besides; None: nowhere."""
    user: str = ""
    """Who started the job; empty: not told."""
    topology_querier: str = ""
    """`module::Class` that knows where hosts are in the network; empty: nodes say so themselves, or that is unknown."""
    topology_sorter: str = ""
    """`module::Class` that orders the nodes of a world; empty: neighbours in the network together."""
    platform: str = ""
    """Where nodes come from: local, the name of an installed platform, or `module::Class`. Empty: people start them."""
    platform_options: dict[str, object] = {}
    """What the platform needs to know; it refuses what it does not know."""
    job_uid: str = ""
    """By which the platform tells this job's nodes from those of another job, also one of the same name. Empty: the
    job's name."""
    fleet: FleetSpec | None = None
    """Which nodes the job wants of its platform."""
    scaling: ScaleTerms | None = None
    """How the job may change its own size; None: it may not."""
    brain: BrainTerms | None = None
    """None: no Brain hears of this job."""
    events_file: str = ""
    """Where events are kept as JSON lines; empty: beside the journal."""
    event_reporters: tuple[str, ...] = ()
    """Who is told of events besides: `log`, `file:PATH`, a URL, or `module::Class`."""
    reports: str = ""
    """Directory for what people may want to read after a fault: autopsies. Empty: that of the journal."""
    pre_check_ops: str = ""
    """Operators that look at the job before it begins: a list of tuples, or `module::Class`, separated by commas. Empty: none."""
    failover_extension: str = ""
    """`module::Class` that agents on nodes of the platform ask what shall follow a failure; empty: what their nodes say."""
    watch: WatchTerms | None = None
    """When hangs are looked at and acted upon, instead of what the nodes were started with."""
    dashboard_port: int = -1
    """Of the page; 0: any free one; -1: there is none. Needs a token file, and the extra `dashboard`."""
    dashboard_host: str = LOOPBACK
    """Address of the page. Loopback by default: who wants to see it from elsewhere forwards the port, or says so."""
    dashboard_url: str = ""
    """URLs of reverse proxies before the page, separated by commas: browsers may ask for it under these names."""
    roles_file: str = ""
    """Where the report of the roles is written, if the job is a role of a multi-role job. Empty: it is none."""
    metrics_port: int = -1
    """Of /metrics for Prometheus alone; 0: any free one; -1: it is only on the page's port, if there is a page."""
    metrics_host: str = LOOPBACK
    parent_death: bool = False
    """End (as by SIGTERM) when the process that started us ends."""
    parent_pid: int = 0
    """Who that is, so that a parent that died before we could ask for the signal is noticed. 0: the present parent."""


class Ready(Struct, frozen=True, kw_only=True):
    """The master serves."""

    port: int
    pid: int
    master_epoch: int
    dashboard: str = ""
    """Address of the page; empty: there is none."""
    metrics: str = ""


def read_config(path: Path) -> MasterConfig:
    try:
        return msgspec.json.decode(path.read_bytes(), type=MasterConfig)
    except OSError as error:
        raise ConfigError(f"master configuration {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"master configuration {path}: {error}") from error


def read_token(config: MasterConfig) -> str:
    """Raises ConfigError when there is none and the address can be reached from other hosts."""
    if not config.token_file:
        if not is_loopback(config.host):
            raise ConfigError(
                f"A master without a job token listens on loopback only, not on {config.host}: every process that reaches it "
                "could stop the job. Set DLROVER_JOB_TOKEN to the same secret on all nodes, or give a token file."
            )
        return ""
    return read_token_file(config.token_file)


def read_token_file(path: str) -> str:
    """Raises ConfigError."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The token file {path} cannot be read: {error}.") from error
    if not token:
        raise ConfigError(f"The token file {path} is empty. Write the token into it.")
    return token


def announce(config: MasterConfig, ready: Ready) -> None:
    data = msgspec.json.encode(ready)
    if config.ready_file:
        _write_whole(Path(config.ready_file), data)
    if config.ready_fd >= 0:
        os.write(config.ready_fd, data + b"\n")
        os.close(config.ready_fd)


def tell_end(config: MasterConfig, end: JobEnd) -> None:
    if config.end_file:
        _write_whole(Path(config.end_file), msgspec.json.encode(end))


def goodput_file(end_file: str) -> str:
    """Beside the end of the job: where its time went, `GoodputStatus` as JSON."""
    return os.path.join(os.path.dirname(end_file), "goodput.json")


def tell_goodput(config: MasterConfig, goodput: GoodputStatus) -> None:
    if config.end_file:
        _write_whole(Path(goodput_file(config.end_file)), msgspec.json.encode(goodput))


def _write_whole(path: Path, data: bytes) -> None:
    """Whole or not at all: who waits for the file never sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.rename(path)
