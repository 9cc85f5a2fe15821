"""
Where the master is, who hosts it, what the job is called, and which token opens it.

The address comes from `DLROVER_MASTER_ADDR`, else `--rdzv-endpoint`, else `--master-addr:--master-port`, else it is
loopback. The launcher for which that address is local and whose bind succeeds hosts the master; all others connect. So
the same command on every node is enough, as with torchrun, and no node needs to know that it is the first.
"""

from __future__ import annotations

import os
import socket

from msgspec import Struct

from dlrover.cli import job_names
from dlrover.cli.job_names import JobName
from dlrover.cli.runtime_dir import NodeDirectory
from dlrover.cli.settings import Settings
from dlrover.protocol.addresses import LOOPBACK, Address, is_local, is_loopback, parse_address
from dlrover.protocol.errors import ConfigError

ENDPOINT_PORT = 29400
"""torchrun's default for --rdzv-endpoint without a port."""
MASTER_PORT = 29500
"""torchrun's default for --master-addr without --master-port."""
PROBE_TIMEOUT = 3.0
_LOOPBACK_NAMES = ("localhost", "ip6-localhost")


class Seat:
    """
    A port that is ours for the life of the job.

    Two sockets make it so. An abstract unix socket named after the address is the claim: other launchers on this host
    see it even while the master is between two lives, and it ends with this process. The port itself is bound but does
    not listen: the master can bind beside it (both allow address reuse, and only one listens), while the kernel gives
    it to nobody else.
    """

    def __init__(self, host: str, port: int) -> None:
        """Raises `SeatTaken` if another launcher claims it, `OSError` if somebody listens there."""
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
            self._claim.bind(f"\0dlrover-master-{host}-{port}")
        except OSError as error:
            raise SeatTaken(error.errno, "another launcher hosts a master there") from error

    def close(self) -> None:
        self._socket.close()
        self._claim.close()


class SeatTaken(OSError):
    """Another launcher on this host hosts a master at that address, or is about to."""


class MasterPlace(Struct, frozen=True, kw_only=True):
    address: Address
    is_ours: bool
    """This launcher starts the master and keeps it running."""
    is_port_free_choice: bool = False
    """Nobody else knows the port: if it is taken after all, another one does as well."""
    bind_host: str = ""
    is_shared: bool = False
    """Other launchers may come to this address."""


def find_master(settings: Settings) -> tuple[MasterPlace, Seat | None]:
    """Raises `ConfigError`. The seat is given where the place is ours."""
    address, source = _address(settings)
    max_nodes = settings.terms.limits.max_nodes
    if address is None:
        seat = Seat(LOOPBACK, 0)
        return (
            MasterPlace(
                address=Address(LOOPBACK, seat.port), is_ours=True, is_port_free_choice=True, bind_host=LOOPBACK
            ),
            seat,
        )
    if not is_local(address.host):
        if address.port == 0:
            raise ConfigError(
                f"{source} {address}: port 0 is for jobs on this host alone. Name the port of the master."
            )
        return MasterPlace(address=address, is_ours=False, is_shared=True), None
    if address.port == 0 and max_nodes > 1:
        raise ConfigError(f"{source} {address}: with several nodes all must know the port; give one other than 0.")
    bind_host = _bind_host(address.host, is_wide=max_nodes > 1)
    try:
        seat = Seat(bind_host, address.port)
    except OSError as error:
        _check_who_listens(settings, address, source, error)
        return MasterPlace(address=address, is_ours=False, is_shared=True), None
    place = MasterPlace(
        address=Address(address.host, seat.port),
        is_ours=True,
        is_port_free_choice=address.port == 0,
        bind_host=bind_host,
        is_shared=address.port != 0,
    )
    return place, seat


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
        with open(path, encoding="utf-8") as file:
            token = file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"The token file {path} cannot be read: {reason}.") from error
    return check_token(token, f"The token file {path}")


def check_token(token: str, source: str) -> str:
    """It travels in the metadata of calls, which takes printable ASCII only."""
    if not token or not token.isascii() or not token.isprintable() or token != token.strip():
        raise ConfigError(f"{source} must hold one line of printable ASCII characters, without blanks around it.")
    return token


def derive_token(rdzv_id: str) -> str:
    """
    The token that everybody who knows the id can compute: exactly as strong as the id.

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


def answers(address: Address, *, timeout: float = PROBE_TIMEOUT) -> bool:
    """Somebody accepts connections there. Any error of the network counts as no."""
    try:
        with socket.create_connection((address.host, address.port), timeout=timeout):
            return True
    except (OSError, UnicodeError):
        return False


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


def _address(settings: Settings) -> tuple[Address | None, str]:
    """The address that was asked for, None for a job on its own, and the option or variable that said so."""
    if settings.environment.master_addr:
        given = settings.environment.master_addr
        return parse_address(given, shown=f"DLROVER_MASTER_ADDR={given}"), "DLROVER_MASTER_ADDR"
    if settings.is_standalone:
        return None, ""
    if settings.rdzv_endpoint:
        given = settings.rdzv_endpoint
        return parse_address(given, default_port=ENDPOINT_PORT, shown=f"--rdzv-endpoint {given}"), "--rdzv-endpoint"
    if settings.master_port is None and settings.terms.limits.max_nodes == 1:
        # Alone, and no port that anybody could wait at: torchrun chooses a free one here, too.
        return None, ""
    given = settings.master_addr or LOOPBACK
    host = parse_address(given, default_port=0, shown=f"--master-addr {given}").host
    return Address(host, MASTER_PORT if settings.master_port is None else settings.master_port), "--master-port"


def _check_who_listens(settings: Settings, address: Address, source: str, error: OSError) -> None:
    """The port is taken: fine if that is our job's master, started by another launcher or by hand."""
    is_alone = settings.terms.limits.max_nodes == 1 and not settings.environment.master_addr
    if not is_alone and (isinstance(error, SeatTaken) or settings.tls is not None or speaks_http2(address)):
        return
    raise ConfigError(
        f"{source} {address}: the port cannot be used ({error.strerror}), and what holds it is not the master of this "
        "job. Stop that program, or choose another port, the same on all nodes."
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
