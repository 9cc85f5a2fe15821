"""
Where the master is, who hosts it, what the job is called, and which token opens it.

The address comes from `DLROVER_MASTER_ADDR`, else `--rdzv-endpoint`, else from `--master-addr` and `--master-port`, else
from `RDZV_ENDPOINT`, which the first platforms set, else it is loopback. The launcher for which that address is local and
whose bind succeeds hosts the master; all others connect. So
the same command on every node is enough, as with torchrun, and no node needs to know that it is the first.

`--master-port` is not the master's port: as under torchrun it belongs to the script, whose ranks meet there. The master
listens one above it, or at `DLROVER_MASTER_PORT`; the master of a job with one node listens at any free port.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import NamedTuple

from msgspec import Struct

from dlrover.cli.console import say
from dlrover.cli.launch import job_names
from dlrover.cli.launch.job_names import JobName
from dlrover.cli.launch.runtime_dir import NodeDirectory
from dlrover.cli.options.settings import Settings
from dlrover.host.ownership import open_checked
from dlrover.protocol.addresses import LOOPBACK, Address, is_local, is_loopback, parse_address
from dlrover.protocol.errors import ConfigError

ENDPOINT_PORT = 29400
"""torchrun's default for --rdzv-endpoint without a port."""
COORDINATOR_PORT = 29500
"""torchrun's default for --master-port."""
MASTER_PORT_VARIABLE = "DLROVER_MASTER_PORT"
PROBE_TIMEOUT = 3.0
STRONG_ID = 16
"""Characters of an id from which a token may be derived without a warning: as many as random hexadecimal digits have 64 bits."""
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


class MasterPort:
    """
    A port that is ours for the life of the job.

    Two sockets make it so. An abstract unix socket named after the address is the claim: other launchers on this host
    see it even while the master is between two lives, and it ends with this process. The port itself is bound but does
    not listen: the master can bind beside it (both allow address reuse, and only one listens), while the kernel gives
    it to no other process.
    """

    def __init__(self, host: str, port: int, *, purpose: str = "master") -> None:
        """Raises `SeatTaken` if another launcher claims it, `OSError` if a program listens there."""
        self._purpose = purpose
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if port:
                self._take_claim(target[0], port)
                # Binding alone would succeed beside a listener that allows reuse; listening tells. It ends at once,
                # because a connection that arrived here would never be answered.
                with socket.socket(family, socket.SOCK_STREAM) as trial:
                    trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    trial.bind(target)
                    trial.listen(1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(target)
        except OSError:
            self.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def _take_claim(self, host: object, port: int) -> None:
        try:
            self._claim.bind(f"\0dlrover-{self._purpose}-{host}-{port}")
        except OSError as error:
            raise SeatTaken(error.errno, f"another launcher on this host uses it for its {self._purpose}") from error

    def close(self) -> None:
        self._socket.close()
        self._claim.close()


class SeatTaken(OSError):
    """Another launcher on this host uses that address for the same purpose, or is about to."""


class MasterPlace(Struct, frozen=True, kw_only=True):
    address: Address
    is_ours: bool
    """This launcher starts the master and keeps it running."""
    is_port_free_choice: bool = False
    """No other process knows the port: if it is taken after all, another one does as well."""
    bind_host: str = ""
    is_shared: bool = False
    """Other launchers may come to this address."""


class Asked(NamedTuple):
    """The address that the user asked for."""

    address: Address
    source: str
    """The option or variable that said so, with its value."""
    remedy: str = "choose another port"
    """What to do if the port is taken."""


def find_master(settings: Settings) -> tuple[MasterPlace, MasterPort | None]:
    """Raises `ConfigError`. The seat is given where the place is ours."""
    asked = _address(settings)
    is_alone = _is_alone(settings)
    if asked is None:
        master_port = MasterPort(LOOPBACK, 0)
        return (
            MasterPlace(
                address=Address(LOOPBACK, master_port.port), is_ours=True, is_port_free_choice=True, bind_host=LOOPBACK
            ),
            master_port,
        )
    address = asked.address
    if settings.environment.master_file:  # the platform keeps the master, wherever it is now
        return MasterPlace(address=address, is_ours=False, is_shared=True), None
    if not is_local(address.host):
        if address.port == 0:
            raise ConfigError(f"{asked.source}: port 0 is for jobs on this host alone. Name the port of the master.")
        return MasterPlace(address=address, is_ours=False, is_shared=True), None
    if address.port == 0 and not is_alone:
        raise ConfigError(
            f"{asked.source}: with several nodes, all nodes must know the port of the master. Give a port other than 0."
        )
    bind_host = _bind_host(address.host, is_wide=not is_alone)
    try:
        master_port = MasterPort(bind_host, address.port)
    except OSError as error:
        _check_who_listens(settings, asked, error)
        return MasterPlace(address=address, is_ours=False, is_shared=True), None
    place = MasterPlace(
        address=Address(address.host, master_port.port),
        is_ours=True,
        is_port_free_choice=address.port == 0,
        bind_host=bind_host,
        is_shared=address.port != 0,
    )
    return place, master_port


def coordinator_port(settings: Settings) -> int:
    """
    The port at which the ranks of the script meet, as torchrun's static rendezvous tells it. 0: a fresh one for each round.

    The user may have put the master itself there (`DLROVER_MASTER_ADDR=$MASTER_ADDR:$MASTER_PORT`): then it is not free.
    """
    if settings.is_standalone or settings.rdzv_endpoint:
        return 0
    master = settings.environment.master_addr
    if master and (settings.master_port is None or master.endswith(f":{settings.master_port}")):
        return 0
    if settings.master_port is None:
        return 0 if _is_alone(settings) else COORDINATOR_PORT
    return settings.master_port


def hold_coordinator_port(settings: Settings, place: MasterPlace) -> MasterPort | None:
    """
    Keep the port of the script for the script. None: it is not ours to keep.

    Without this the kernel may use it for an outgoing connection of this host between two rounds. Raises `ConfigError` if
    another program listens there: the workers could only fail.
    """
    port = coordinator_port(settings)
    if not port or not place.is_ours:
        return None
    try:
        return MasterPort("0.0.0.0", port, purpose="coordinator")
    except OSError as error:
        raise ConfigError(
            f"--master-port {port}: the workers cannot meet at this port ({error.strerror}). Stop the program that uses it, or "
            "choose another port, the same on all nodes."
        ) from error


def name_job(settings: Settings, place: MasterPlace) -> JobName:
    name = settings.job_name or settings.environment.job_name or settings.rdzv_id
    if place.is_shared:  # all nodes have to call it the same
        return JobName(name or f"port-{place.address.port}", iter(()))
    return job_names.given(name) if name else job_names.after_script(settings.entry)


def find_token(settings: Settings, place: MasterPlace, directory: NodeDirectory) -> str:
    """Raises `ConfigError` where other hosts could reach the master and there is no secret they could share."""
    if settings.environment.job_token:
        return check_token(settings.environment.job_token, "The variable DLROVER_JOB_TOKEN")
    if settings.job_token_file:
        return read_token_file(settings.job_token_file)
    if settings.rdzv_id and not settings.is_standalone:
        if len(settings.rdzv_id) < STRONG_ID and place.is_ours and not is_loopback(place.bind_host):
            say(
                f"warning: the job token is derived from an --rdzv-id of {len(settings.rdzv_id)} characters, and the master can be "
                "reached from other hosts. Strangers can guess such a token. Set DLROVER_JOB_TOKEN to the same random secret on "
                f"all nodes (or --job-token-file FILE), or give an --rdzv-id of at least {STRONG_ID} random characters."
            )
        return derive_token(settings.rdzv_id)
    if not place.is_shared or is_loopback(place.address.host):
        return directory.share_token()
    raise ConfigError(
        f"The master at {place.address} can be reached from other hosts, and the job has no token to keep strangers "
        "out. Set DLROVER_JOB_TOKEN to the same secret on all nodes (or --job-token-file FILE), or give the job an "
        "--rdzv-id that is hard to guess."
    )


def read_token_file(path: str) -> str:
    try:
        with open(open_checked(path, os.O_RDONLY), encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"The token file {path} cannot be read: {reason}.") from error
    return check_token(token, f"The token file {path}")


def check_token(token: str, source: str) -> str:
    """It travels in the metadata of calls, which takes printable ASCII only."""
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError(f"{source} must hold one line of printable ASCII characters, without blanks around it.")
    return token


def derive_token(rdzv_id: str) -> str:
    """
    The token that every process that knows the id can compute: exactly as strong as the id.

    scrypt makes guessing short ids slower, about 20 ms of one core for each guess; it cannot make them strong.
    """
    import hashlib

    return hashlib.scrypt(rdzv_id.encode(), salt=b"dlrover job token 1", n=1 << 13, r=8, p=1, dklen=24).hex()


def own_host(settings: Settings, place: MasterPlace) -> str:
    """This node's address for the others: what becomes MASTER_ADDR if it hosts global rank 0."""
    if settings.local_addr:
        return _bare_host(settings.local_addr, f"--local-addr {settings.local_addr}")
    if settings.terms.limits.max_nodes == 1:
        named = settings.master_addr  # as torchrun tells its workers
        return _bare_host(named, f"--master-addr {named}") if named else "localhost"
    if settings.environment.pod_ip:
        return _bare_host(settings.environment.pod_ip, f"POD_IP={settings.environment.pod_ip}")
    if is_loopback(place.address.host) and _is_loopback_name(place.address.host):
        return LOOPBACK
    if place.is_ours and not is_loopback(place.address.host):
        return place.address.host
    return _address_towards(place.address.host) or socket.gethostname()


def why_silent(address: Address, *, timeout: float = PROBE_TIMEOUT) -> str:
    """Why no connection comes about; empty: a server accepts them. Any error of the network is a reason."""
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout):
            return ""
    except TimeoutError:
        return f"no answer within {timeout:g} s"
    except OSError as error:  # a name that cannot be resolved is one, too: Name or service not known
        return error.strerror or str(error) or type(error).__name__
    except UnicodeError as error:
        return f"{address.host!r} is not a valid host name: {error}"


def speaks_http2(address: Address, *, timeout: float = PROBE_TIMEOUT) -> bool:
    """Whether a gRPC server may be there: it answers the preface of HTTP/2 with its SETTINGS frame."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(preface)
            head = b""
            while len(head) < 9:
                more = connection.recv(9 - len(head))
                if not more:
                    return False
                head += more
            return head[3] == 4
    except (OSError, UnicodeError):
        return False


def _address(settings: Settings) -> Asked | None:
    """None: a job on its own, whose master may listen at any port."""
    if given := settings.environment.master_addr:
        shown = f"DLROVER_MASTER_ADDR={given}"
        return Asked(parse_address(given, shown=shown), shown)
    if settings.is_standalone:
        return None
    if given := settings.rdzv_endpoint:
        shown = f"--rdzv-endpoint {given}"
        return Asked(parse_address(given, default_port=ENDPOINT_PORT, shown=shown), shown)
    is_place_named = settings.master_addr or settings.master_port is not None
    if (given := settings.environment.rdzv_endpoint) and settings.terms.limits.max_nodes > 1 and not is_place_named:
        shown = f"RDZV_ENDPOINT={given}"
        return Asked(parse_address(given, default_port=ENDPOINT_PORT, shown=shown), shown)
    remedy = f"set {MASTER_PORT_VARIABLE} to a free port"
    given = settings.master_addr or LOOPBACK
    host = parse_address(given, default_port=0, shown=f"--master-addr {given}").host
    if (port := settings.environment.master_port) is not None:
        return Asked(Address(host, port), f"{MASTER_PORT_VARIABLE}={port}", remedy)
    if _is_alone(settings):
        # One above --master-port may be the --master-port of the next job on this host: each takes a free port instead.
        return None
    port = coordinator_port(settings)
    if port == 65535:
        raise ConfigError(
            f"--master-port {port}: the job's master listens at the next higher port, and {port} is the "
            f"highest. Choose another port, or {remedy}, the same on all nodes."
        )
    return Asked(
        Address(host, port + 1 if port else 0), f"--master-port {port}, whose next higher port is the master's", remedy
    )


def _is_alone(settings: Settings) -> bool:
    """No other launcher belongs to the job."""
    return settings.terms.limits.max_nodes + settings.terms.standby == 1


def _check_who_listens(settings: Settings, asked: Asked, error: OSError) -> None:
    """The port is taken: fine if that is our job's master, started by another launcher or by hand."""
    is_alone = settings.terms.limits.max_nodes == 1 and not settings.environment.master_addr
    is_master = isinstance(error, SeatTaken) or settings.tls is not None or speaks_http2(asked.address)
    if not is_alone and is_master:
        return
    is_taken = isinstance(error, SeatTaken) or error.errno == errno.EADDRINUSE
    remedy = (
        "Another program, which is not this job's master, listens there. Stop that program"
        if is_taken
        else "Correct it"
    )
    raise ConfigError(
        f"{asked.source}: the job's master cannot listen at {asked.address} ({error.strerror}). {remedy}, or "
        f"{asked.remedy}, the same on all nodes."
    ) from error


def _bare_host(text: str, shown: str) -> str:
    """Workers hand it to the resolver, which knows no brackets around an IPv6 address."""
    return parse_address(text, default_port=0, shown=shown).host


def _bind_host(host: str, *, is_wide: bool) -> str:
    # A machine's own name often resolves to a loopback address on that machine (127.0.1.1): others must still get in.
    if is_wide and is_loopback(host) and not _is_loopback_name(host):
        return "0.0.0.0"
    return host


def _is_loopback_name(host: str) -> bool:
    return host in _LOOPBACK_NAMES or host == "::1" or host.startswith("127.")


def _address_towards(host: str) -> str:
    """Our address on the way to that host; nothing is sent. Empty if there is no way."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            found = str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return ""
    return "" if is_loopback(found) else found


def new_launch() -> str:
    """Unique per launcher start."""
    return os.urandom(4).hex()
