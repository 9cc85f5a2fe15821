"""Where the master is, who hosts it, and which token opens it."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.agent.config import Entry, EntryKind
from dlrover.cli.launch import discovery
from dlrover.cli.launch.discovery import (
    MasterPlace,
    MasterPort,
    SeatTaken,
    coordinator_port,
    find_master,
    find_token,
    hold_coordinator_port,
    name_job,
    own_host,
)
from dlrover.cli.launch.job_names import after_script
from dlrover.cli.launch.runtime_dir import NodeDirectory, user_root
from dlrover.cli.options.environment import Environment, read_environment
from dlrover.cli.options.parser import parse
from dlrover.cli.options.settings import Settings, build_settings
from dlrover.protocol.addresses import Address
from dlrover.protocol.errors import ConfigError

ELSEWHERE = "192.0.2.1"  # reserved for documentation: nobody's address


def settings_of(*argv: str, **environ: str) -> Settings:
    return build_settings(parse([*argv, "-m", "job"], environ), read_environment(environ))


@pytest.fixture
def root(short_dir: Path) -> str:
    return user_root(Environment(temp_dir=str(short_dir)))


@pytest.fixture
def listener() -> Iterator[int]:
    """A program that is no master."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def find(settings: Settings) -> MasterPlace:
    place, master_port = find_master(settings)
    if master_port is not None:
        master_port.close()
    return place


@pytest.mark.parametrize("argv", [[], ["--standalone"], ["--standalone", "--rdzv-endpoint", f"{ELSEWHERE}:1"]])
def test_a_job_on_its_own_gets_a_free_loopback_port(argv: list[str]) -> None:
    place = find(settings_of(*argv))
    assert place.is_ours
    assert place.is_port_free_choice
    assert place.address.host == "127.0.0.1"
    assert place.address.port > 0


def test_the_order_of_sources() -> None:
    everything = ["--rdzv-endpoint", f"{ELSEWHERE}:2", "--master-addr", ELSEWHERE, "--master-port", "3", "--nnodes=2"]
    assert find(settings_of(*everything, DLROVER_MASTER_ADDR=f"{ELSEWHERE}:1")).address == Address(ELSEWHERE, 1)
    assert find(settings_of(*everything)).address == Address(ELSEWHERE, 2)
    assert find(settings_of(*everything[2:])).address == Address(ELSEWHERE, 4)
    assert find(settings_of(*everything[2:], DLROVER_MASTER_PORT="9")).address == Address(ELSEWHERE, 9)
    assert find(settings_of(*everything, DLROVER_MASTER_PORT="9")).address == Address(ELSEWHERE, 2)
    assert find(settings_of(*everything[2:], RDZV_ENDPOINT=f"{ELSEWHERE}:5")).address == Address(ELSEWHERE, 4)
    assert find(settings_of("--nnodes=2", RDZV_ENDPOINT=f"{ELSEWHERE}:4")).address == Address(ELSEWHERE, 4)
    assert find(settings_of("--nnodes=2", RDZV_ENDPOINT=ELSEWHERE)).address.port == 29400
    assert find(settings_of(RDZV_ENDPOINT=ELSEWHERE)).address.host == "127.0.0.1", "alone, there is nobody to meet"


def test_ports_that_are_not_given_are_torchruns() -> None:
    assert find(settings_of("--rdzv-endpoint", ELSEWHERE, "--nnodes=2")).address.port == 29400
    static = settings_of("--master-addr", ELSEWHERE, "--nnodes=2")
    assert (coordinator_port(static), find(static).address.port) == (29500, 29501)


@pytest.mark.parametrize(
    ("argv", "environ", "port"),
    [
        (["--master-port", "4711"], {}, 4711),
        (["--master-port", "4711", "--nnodes", "2"], {}, 4711),
        (["--master-port", "4711", "--rdzv-endpoint", f"{ELSEWHERE}:1"], {}, 0),
        (["--master-port", "4711", "--standalone"], {}, 0),
        (["--master-port", "0"], {}, 0),
        ([], {}, 0),
        (["--master-port", "4711"], {"DLROVER_MASTER_ADDR": f"{ELSEWHERE}:1"}, 4711),
        (["--master-port", "4711"], {"DLROVER_MASTER_ADDR": f"{ELSEWHERE}:4711"}, 0),
        (["--nnodes", "2"], {"DLROVER_MASTER_ADDR": f"{ELSEWHERE}:1"}, 0),
    ],
)
def test_the_port_of_torchruns_static_rendezvous_belongs_to_the_script(
    argv: list[str], environ: dict[str, str], port: int
) -> None:
    assert coordinator_port(settings_of(*argv, **environ)) == port


def test_a_node_alone_leaves_the_ports_beside_its_own_to_other_jobs(reserved_port: int) -> None:
    place, master_port = find_master(settings_of("--master-port", str(reserved_port)))
    assert master_port is not None
    assert place.is_port_free_choice
    assert place.address.port not in (reserved_port, reserved_port + 1)
    master_port.close()
    named = find(settings_of("--master-port", "4711", DLROVER_MASTER_PORT=str(reserved_port)))
    assert named.address == Address("127.0.0.1", reserved_port)


def test_the_port_of_the_script_is_kept_for_it_by_the_host_of_the_master(reserved_port: int) -> None:
    settings = settings_of("--master-port", str(reserved_port))
    held = hold_coordinator_port(settings, find(settings))
    assert held is not None
    with socket.create_server(("127.0.0.1", reserved_port)):  # the script's store
        pass
    with pytest.raises(ConfigError, match=f"--master-port {reserved_port}: .*another launcher"):
        hold_coordinator_port(settings, find(settings))
    held.close()
    elsewhere = MasterPlace(address=Address(ELSEWHERE, 1), is_ours=False)
    assert hold_coordinator_port(settings, elsewhere) is None


def test_an_address_elsewhere_is_not_ours_to_host() -> None:
    place = find(settings_of("--rdzv-endpoint", f"{ELSEWHERE}:2", "--nnodes=2"))
    assert not place.is_ours


def test_the_first_launcher_on_the_host_hosts_and_the_second_connects(reserved_port: int) -> None:
    settings = settings_of("--rdzv-endpoint", f"localhost:{reserved_port}", "--nnodes=1:2")
    first, master_port = find_master(settings)
    assert master_port is not None
    second, no_port = find_master(settings)
    assert first.is_ours
    assert not second.is_ours
    assert no_port is None
    master_port.close()
    assert find(settings).is_ours


def test_a_seat_lets_its_master_listen_and_nobody_else_be_given_the_port() -> None:
    master_port = MasterPort("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", master_port.port)) as master:  # allows reuse, as gRPC does
        assert master.getsockname()[1] == master_port.port
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", master_port.port))
    master_port.close()


def test_a_named_seat_is_claimed_even_while_nobody_listens(reserved_port: int) -> None:
    master_port = MasterPort("127.0.0.1", reserved_port)
    with pytest.raises(SeatTaken):
        MasterPort("127.0.0.1", reserved_port)
    master_port.close()
    MasterPort("127.0.0.1", reserved_port).close()


@pytest.mark.parametrize(
    ("argv", "environ", "source"),
    [
        (["--master-port", "{below}", "--nnodes", "2"], {}, "--master-port {below}, "),
        (["--nnodes", "1:2"], {"DLROVER_MASTER_PORT": "{taken}"}, "DLROVER_MASTER_PORT={taken}: "),
        (["--nnodes", "1"], {"DLROVER_MASTER_PORT": "{taken}"}, "DLROVER_MASTER_PORT={taken}: "),
    ],
)
def test_a_port_that_another_program_uses_is_refused_and_the_variable_named(
    listener: int, argv: list[str], environ: dict[str, str], source: str
) -> None:
    ports = {"below": listener - 1, "taken": listener}
    argv = [word.format(**ports) for word in argv]
    environ = {name: value.format(**ports) for name, value in environ.items()}
    with pytest.raises(ConfigError) as raised:
        find_master(settings_of(*argv, **environ))
    assert str(raised.value).startswith(source.format(**ports))
    assert "set DLROVER_MASTER_PORT to a free port, the same on all nodes" in str(raised.value)


def test_the_port_of_the_script_must_be_free(listener: int) -> None:
    settings = settings_of("--master-port", str(listener))
    with pytest.raises(ConfigError, match=f"--master-port {listener}: the workers cannot meet"):
        hold_coordinator_port(settings, find(settings))


def test_no_port_is_above_the_last() -> None:
    with pytest.raises(ConfigError, match="DLROVER_MASTER_PORT"):
        find_master(settings_of("--master-port", "65535", "--nnodes", "2"))
    with pytest.raises(ConfigError, match="DLROVER_MASTER_PORT=70000"):
        settings_of(DLROVER_MASTER_PORT="70000")


def test_port_zero_needs_a_job_on_its_own() -> None:
    assert find(settings_of("--rdzv-endpoint", "localhost:0")).is_port_free_choice
    for endpoint in ("localhost:0", f"{ELSEWHERE}:0"):
        with pytest.raises(ConfigError, match="port"):
            find_master(settings_of("--rdzv-endpoint", endpoint, "--nnodes=2"))


@pytest.mark.parametrize("address", ["host:port:1", "", "host:99999", "a b:1"])
def test_a_malformed_address_is_refused(address: str) -> None:
    if address:
        with pytest.raises(ConfigError):
            find_master(settings_of(DLROVER_MASTER_ADDR=address))
    else:
        assert find(settings_of(DLROVER_MASTER_ADDR=address)).is_ours


@pytest.mark.parametrize(
    ("argv", "environ", "source"),
    [
        (["--rdzv-endpoint", "host:port"], {}, "--rdzv-endpoint host:port: 'port' is not a port"),
        (["--rdzv-endpoint", ":29400"], {}, "--rdzv-endpoint :29400: "),
        (["--master-addr", "a b", "--nnodes", "2"], {}, "--master-addr a b: "),
        ([], {"DLROVER_MASTER_ADDR": "host"}, "DLROVER_MASTER_ADDR=host: the port is missing"),
    ],
)
def test_a_malformed_address_is_told_with_who_gave_it(argv: list[str], environ: dict[str, str], source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(settings_of(*argv, **environ))
    assert str(caught.value).startswith(source)


def test_job_names() -> None:
    shared = MasterPlace(address=Address("127.0.0.1", 29500), is_ours=True, is_shared=True)
    alone = MasterPlace(address=Address("127.0.0.1", 4711), is_ours=True)
    assert name_job(settings_of("--rdzv-id", "a", "--job-name", "c", ELASTIC_JOB_NAME="b"), shared).name == "c"
    assert name_job(settings_of("--rdzv-id", "a", ELASTIC_JOB_NAME="b"), shared).name == "b"
    assert name_job(settings_of("--rdzv-id", "a"), shared).name == "a"
    assert name_job(settings_of("--rdzv-id", "none"), shared).name == "port-29500"
    assert next(name_job(settings_of("--rdzv-id", "a"), shared).others, "") == "", "other nodes could not know it"
    assert name_job(settings_of(), alone).name == "job-1"
    assert name_job(settings_of("--standalone", "--rdzv-id", "a"), alone).name == "a"
    assert name_job(settings_of("--standalone", "--job-name", "a"), alone).name == "a"


def test_jobs_that_run_at_the_same_time_have_different_names_and_an_ended_ones_is_free_again(root: str) -> None:
    alone = MasterPlace(address=Address("127.0.0.1", 4711), is_ours=True)

    def begin(launch: str, *argv: str) -> NodeDirectory:
        name = name_job(settings_of(*argv), alone)
        return NodeDirectory(root, name.name, launch, others=name.others)

    first, second, third = (begin(launch) for launch in "abc")
    assert [each.job_name for each in (first, second, third)] == ["job-1", "job-2", "job-3"]
    second.remove()
    again, given, twin = begin("d"), begin("e", "--standalone", "--rdzv-id=run7"), begin("f", "--rdzv-id=run7")
    assert [each.job_name for each in (again, given, twin)] == ["job-2", "run7", "run7-2"]
    for each in (first, third, again, given, twin):
        each.remove()


@pytest.mark.parametrize(
    ("kind", "entry", "name"),
    [
        (EntryKind.SCRIPT, "/home/me/My Train_v2.py", "my-train-v2-1"),
        (EntryKind.MODULE, "package.train", "train-1"),
        (EntryKind.PROGRAM, "./run.sh", "run-1"),
        (EntryKind.SCRIPT, "a" * 100 + ".py", "a" * 20 + "-1"),
        (EntryKind.SCRIPT, "/dev/stdin", "stdin-1"),
        (EntryKind.SCRIPT, "训练.py", "job-1"),
        (EntryKind.FUNCTION, "/tmp/x/call", "function-1"),
    ],
)
def test_a_job_is_called_after_its_script(kind: EntryKind, entry: str, name: str) -> None:
    assert after_script(Entry.of(kind, entry)).name == name


def test_the_order_of_tokens(root: str, tmp_path: Path) -> None:
    token_file = tmp_path / "secret"
    token_file.write_text("from-file\n")
    place = MasterPlace(address=Address(ELSEWHERE, 1), is_ours=False, is_shared=True)
    directory = NodeDirectory(root, "job", "a")
    with_file = ["--job-token-file", str(token_file), "--rdzv-id", "x"]
    assert find_token(settings_of(*with_file, DLROVER_JOB_TOKEN="from-env"), place, directory) == "from-env"
    assert find_token(settings_of(*with_file), place, directory) == "from-file"
    derived = find_token(settings_of("--rdzv-id", "x"), place, directory)
    assert derived == discovery.derive_token("x") != discovery.derive_token("y")
    with pytest.raises(ConfigError, match="DLROVER_JOB_TOKEN"):
        find_token(settings_of(), place, directory)


@pytest.mark.parametrize(
    ("rdzv_id", "bind_host", "is_ours", "is_warned"),
    [
        ("job", "0.0.0.0", True, True),
        ("job", ELSEWHERE, True, True),
        ("job", "127.0.0.1", True, False),
        ("job", "", False, False),
        ("0123456789abcdef", "0.0.0.0", True, False),
    ],
)
def test_one_warning_for_a_token_that_strangers_can_guess(
    root: str, capsys: pytest.CaptureFixture[str], rdzv_id: str, bind_host: str, is_ours: bool, is_warned: bool
) -> None:
    place = MasterPlace(address=Address(ELSEWHERE, 1), is_ours=is_ours, is_shared=True, bind_host=bind_host)
    token = find_token(settings_of("--rdzv-id", rdzv_id), place, NodeDirectory(root, "job", "a"))
    assert token == discovery.derive_token(rdzv_id), "it is not refused"
    said = capsys.readouterr().err
    assert said.count("Strangers can guess such a token. Set DLROVER_JOB_TOKEN") == is_warned
    assert said.count("\n") == is_warned
    find_token(settings_of("--rdzv-id", rdzv_id, DLROVER_JOB_TOKEN="x"), place, NodeDirectory(root, "job", "b"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", ["", "zwei\nZeilen", "größe"])
def test_a_token_file_must_hold_one_plain_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(content)
    with pytest.raises(ConfigError, match="secret"):
        discovery.read_token_file(str(path))
    with pytest.raises(ConfigError, match="No such file"):
        discovery.read_token_file(str(tmp_path / "nothing"))


def test_launchers_of_one_local_job_share_a_token_that_only_their_user_can_read(root: str) -> None:
    place = MasterPlace(address=Address("127.0.0.1", 29500), is_ours=True, is_shared=True)
    first, second = NodeDirectory(root, "job", "a"), NodeDirectory(root, "job", "b")
    token = find_token(settings_of(), place, first)
    assert len(token) >= 32
    assert find_token(settings_of(), place, second) == token
    path = Path(first.job_dir) / "token"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    first.remove()
    assert path.exists()
    second.remove()
    assert not Path(first.job_dir).exists()


def test_own_host_is_what_torchrun_would_say() -> None:
    alone = MasterPlace(address=Address("127.0.0.1", 1), is_ours=True)
    loopback = MasterPlace(address=Address("localhost", 29500), is_ours=True, is_shared=True)
    assert own_host(settings_of(), alone) == "localhost"
    assert own_host(settings_of("--local-addr", "10.1.1.1"), alone) == "10.1.1.1"
    assert own_host(settings_of("--nnodes=2"), loopback) == "127.0.0.1"
    assert own_host(settings_of("--nnodes=2", POD_IP="10.2.2.2"), loopback) == "10.2.2.2"


@pytest.mark.parametrize("nnodes", ["1", "2"])
def test_workers_are_told_an_ipv6_address_without_brackets(nnodes: str) -> None:
    place = MasterPlace(address=Address("::1", 29500), is_ours=True)
    assert own_host(settings_of("--nnodes", nnodes, "--local-addr", "[fd00::1]"), place) == "fd00::1"
    assert own_host(settings_of("--nnodes", nnodes, "--local-addr", "fd00::1"), place) == "fd00::1"
    assert own_host(settings_of("--nnodes=1", "--master-addr", "[::1]"), place) == "::1"
    assert own_host(settings_of("--nnodes=2", POD_IP="[fd00::2]"), place) == "fd00::2"
