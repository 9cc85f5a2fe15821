"""The master as a process: killed at any moment, fenced, on a taken port, on a full disk, beside bad clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import resource
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest

from dlrover.core.commit_order import load, walk
from dlrover.master.config import (
    EXIT_FENCED,
    EXIT_JOURNAL,
    EXIT_PORT_IN_USE,
    EXIT_STOPPED,
    EXIT_USAGE,
    MasterConfig,
)
from dlrover.master.journal.journal import read_stored
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.job import (
    Done,
    End,
    ExitReason,
    JobEnd,
    JobTerms,
    Join,
    LeaveJob,
    LeaveReason,
    Ping,
    Pong,
    ReportFinished,
    Round,
    Run,
    StopJob,
)
from dlrover.protocol.messages.kv import KvSet
from dlrover.protocol.rpc.client import ask
from dlrover.protocol.rpc.transport import AGENT_METHOD, SERVICE, call_metadata
from tests.master.conftest import TOKEN, Agent, Connect, MakeMaster, MasterProcess, status_of
from tests.master.diagnosis.test_driver import answer_that_one_is_stopped, progress, ranks_of, tell
from tests.small_disk import fill


async def test_a_master_killed_at_any_moment_has_forgotten_nothing_that_anybody_saw(
    make_master: MakeMaster, connect: Connect
) -> None:
    """Everything answered is in the journal, every digest seen is a state of the replay, and the agent stays attached."""
    master = make_master()
    master.start()
    agent = connect(master.address)
    first = await agent.attached()
    chance = random.Random(3)
    answered: list[str] = []
    has_answered = asyncio.Event()
    digests: list[str] = []
    pauses: list[float] = []

    async def keep_busy() -> None:
        while True:
            join = agent.a_join()
            await agent.channel.call(join, timeout=30)
            answered.append(join.offer)
            has_answered.set()

    async def keep_asking() -> None:
        while True:
            with contextlib.suppress(Unavailable):
                digests.append((await status_of(master.address)).digest)

    tasks = [asyncio.ensure_future(keep_busy()), asyncio.ensure_future(keep_asking())]
    try:
        for _ in range(8):
            has_answered.clear()
            await asyncio.wait_for(has_answered.wait(), 30)
            # Not a wait for something: the moment of the kill is what is drawn.
            await asyncio.sleep(chance.uniform(0.0, 0.15))
            master.kill()
            killed_at = time.monotonic()
            await asyncio.to_thread(master.start)
            again = await agent.attached()
            pauses.append(time.monotonic() - killed_at)
            assert (again.node, again.incarnation) == (first.node, first.incarnation)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results
    master.kill()
    offers, states = replayed(master.journal)
    assert len(answered) >= 8
    assert [offer for offer in answered if offer not in offers] == []
    assert len(offers) == len(set(offers)), "a command was applied twice"
    assert [digest for digest in digests if digest not in states] == []
    assert max(pauses) < 30, f"serving again took {pauses}"  # how quick it is, the benchmark tells


def replayed(journal: Path) -> tuple[list[str], set[str]]:
    """The offers of all joins in order, and the digest of every state on the way."""
    connection = sqlite3.connect(journal)
    stored = read_stored(connection, journal, oldest=True)
    connection.close()
    job = load(stored.snapshot)
    states = {job.digest().hex()}
    offers = []
    for step in walk(job, stored.records):
        states.add(job.digest().hex())
        offer = getattr(step.record.command, "offer", None)
        if offer is not None:
            offers.append(offer)
    return offers, states


async def test_the_master_ends_with_the_exit_code_of_the_job(
    make_master: MakeMaster, connect: Connect, tmp_path: Path
) -> None:
    end_file = tmp_path / "end.json"
    master = make_master(end_file=str(end_file))
    master.start()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    assert isinstance(await ask(master.address, StopJob(message="enough"), token=TOKEN, timeout=10), Done)
    await agent.wish(End)
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.JOB_ENDED)
    assert await agent.channel.call(leave, timeout=10) == Done()
    assert await asyncio.to_thread(master.wait) == 1
    assert "job ended reason=StoppedByUser" in master.log()
    told = end_file.read_bytes()
    end = msgspec.json.decode(told, type=JobEnd)
    assert (end.reason, end.exit_code) == (ExitReason.STOPPED_BY_USER, 1)
    assert "enough" in end.message
    # A master that died after its last commit and before its exit says the same again.
    end_file.unlink()
    assert await asyncio.to_thread(master.run_to_end) == 1
    assert end_file.read_bytes() == told


async def test_an_end_that_cannot_be_written_still_ends_the_master(
    make_master: MakeMaster, connect: Connect, tmp_path: Path
) -> None:
    master = make_master(end_file=str(tmp_path / "vanished" / "end.json"))
    master.start()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.STOPPED_BY_USER)
    assert await agent.channel.call(leave, timeout=10) == Done()
    assert await asyncio.to_thread(master.wait) == 1
    assert "end of the job could not be written" in master.log()
    assert "Traceback" not in master.log()


async def test_a_good_end_is_exit_code_0(make_master: MakeMaster, connect: Connect) -> None:
    master = make_master()
    master.start()
    agent = connect(master.address, terms=JobTerms())
    await agent.attached()
    await agent.join()
    await agent.wish(Run)
    finished = ReportFinished(node=agent.node, incarnation=agent.incarnation, round=Round(1))
    await agent.channel.call(finished, timeout=10)
    await agent.wish(End)
    leave = LeaveJob(node=agent.node, incarnation=agent.incarnation, reason=LeaveReason.JOB_ENDED)
    await agent.channel.call(leave, timeout=10)
    assert await asyncio.to_thread(master.wait) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_stops_cleanly(make_master: MakeMaster, number: signal.Signals, tmp_path: Path) -> None:
    master = make_master(end_file=str(tmp_path / "end.json"))
    master.start()
    assert master.kill(number) == EXIT_STOPPED
    assert not (tmp_path / "end.json").exists(), "the job is not over"
    left = {file.name for file in tmp_path.iterdir() if "journal" in file.name}
    assert left == {"journal.sqlite", "journal.events.jsonl"}, "the write-ahead log is folded in"


def test_a_port_in_use_is_told_apart_and_harms_nobody(make_master: MakeMaster) -> None:
    master = make_master()
    ready = master.start()
    second = make_master(port=ready.port)
    assert second.run_to_end() == EXIT_PORT_IN_USE
    assert f"Port {ready.port} of 127.0.0.1 is in use" in second.log()
    # Same journal: had the second one touched it, the first would be fenced now.
    status = asyncio.run(status_of(master.address))
    assert status.master_epoch == 1


def test_the_port_can_be_held_for_the_master_by_a_socket_that_does_not_listen(make_master: MakeMaster) -> None:
    with socket.socket() as seat:
        seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        seat.bind(("127.0.0.1", 0))
        master = make_master(port=seat.getsockname()[1])
        master.start()
        master.kill()
        assert master.start().port == seat.getsockname()[1]


async def test_a_second_master_on_the_journal_ends_the_first(make_master: MakeMaster, connect: Connect) -> None:
    first, second = make_master(), make_master()
    first.start()
    agent = connect(first.address)
    await agent.attached()
    second.start()
    with pytest.raises(Unavailable):  # even a question is not answered any more
        await status_of(first.address)
    assert await asyncio.to_thread(first.wait) == EXIT_FENCED
    assert "took over the journal" in first.log()
    assert (await status_of(second.address)).master_epoch == 2


def test_a_damaged_journal_is_never_replaced(make_master: MakeMaster) -> None:
    master = make_master()
    master.start()
    master.kill(signal.SIGTERM)
    data = bytearray(master.journal.read_bytes())
    data[:100] = b"\0" * 100
    master.journal.write_bytes(data)
    master = make_master()
    assert master.run_to_end() == EXIT_JOURNAL
    assert "damaged, or it is not a journal" in master.log()
    assert "Restore it from a copy" in master.log()
    assert master.journal.read_bytes() == data


def test_a_changed_record_is_found_by_its_digest(make_master: MakeMaster) -> None:
    master = make_master()
    master.start()
    master.kill(signal.SIGTERM)
    with sqlite3.connect(master.journal) as connection:
        (data,) = connection.execute("SELECT data FROM records WHERE number = 1").fetchone()
        assert data.count(b"job") > 0
        connection.execute("UPDATE records SET data = ? WHERE number = 1", (data.replace(b"\xa3job", b"\xa3jab"),))
    connection.close()
    assert master.run_to_end() == EXIT_JOURNAL
    assert "record 1" in master.log().lower()


def test_without_a_token_only_loopback_is_served(make_master: MakeMaster) -> None:
    open_to_all = make_master(token_file="", host="0.0.0.0")
    assert open_to_all.run_to_end() == EXIT_USAGE
    assert "DLROVER_JOB_TOKEN" in open_to_all.log()
    local = make_master(token_file="")
    local.start()
    assert isinstance(asyncio.run(ask(local.address, Ping(), token="", timeout=10)), Pong)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"job_name": "j", "jurnal": "x"}, "jurnal"),
        ({"job_name": "j"}, "journal"),
        ({"job_name": "j", "journal": "x", "token_file": "/no/such/file"}, "/no/such/file"),
        ({"job_name": "j", "journal": "/proc/nothing/journal", "port": 0}, "/proc/nothing"),
        ({"job_name": "j", "journal": "x", "host": "192.0.2.7", "token_file": __file__}, "192.0.2.7"),
        ({"job_name": "j", "journal": "x", "log_file": "/proc/nothing/log"}, "/proc/nothing/log"),
        ({"job_name": "j", "journal": "x", "tls": {"cert": "/no/cert", "key": "/no/key"}}, "/no/"),
    ],
)
def test_a_bad_configuration_is_one_clear_sentence(tmp_path: Path, config: dict[str, object], says: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "dlrover.master", "--config", str(file)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode in (EXIT_USAGE, EXIT_JOURNAL)
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_it_works_and_ends_while_nobody_reads_its_console(tmp_path: Path, full_pipe: tuple[int, int]) -> None:
    _, console_write = full_pipe
    ready_read, ready_write = os.pipe()
    config = MasterConfig(job_name="job", journal=str(tmp_path / "journal.sqlite"), ready_fd=ready_write)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "dlrover.master", "--config", "config.json"]
    master = subprocess.Popen(command, cwd=tmp_path, stderr=console_write, pass_fds=(ready_write,))
    os.close(console_write)
    os.close(ready_write)
    try:
        with os.fdopen(ready_read, "rb") as pipe:
            assert select.select([pipe], [], [], 30)[0], "the master waits for its console"
            assert pipe.readline()
        master.terminate()  # of which it has something to say
        assert master.wait(timeout=20) == EXIT_STOPPED
    finally:
        master.kill()
        master.wait()


def test_it_may_have_as_many_nodes_as_the_administrator_allows(tmp_path: Path) -> None:
    """Each has a descriptor, and most systems give a thousand to whoever does not ask for more."""
    ready_read, ready_write = os.pipe()
    config = MasterConfig(job_name="job", journal=str(tmp_path / "journal.sqlite"), ready_fd=ready_write)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    command = [
        "sh",
        "-c",
        'ulimit -Sn 100 && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "dlrover.master",
        "--config",
        "config.json",
    ]
    master = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL, pass_fds=(ready_write,))
    os.close(ready_write)
    try:
        with os.fdopen(ready_read, "rb") as pipe:
            assert pipe.readline()
        soft, hard = resource.prlimit(master.pid, resource.RLIMIT_NOFILE)
        assert soft == min(hard, 1 << 20)
    finally:
        master.kill()
        master.wait()


PARENT = """
import os, subprocess, sys
ready_read, ready_write, held = map(int, sys.argv[1:])
command = [sys.executable, "-m", "dlrover.master", "--config", "config.json"]
subprocess.Popen(command, pass_fds=(ready_write, held))
os.close(ready_write)
os.write(1, os.read(ready_read, 1000))
os._exit(0)
"""


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    held_read, held_write = os.pipe()  # the end of the last holder, which is the master, closes it
    ready_read, ready_write = os.pipe()
    config = MasterConfig(
        job_name="job",
        journal=str(tmp_path / "journal.sqlite"),
        ready_file=str(tmp_path / "ready"),
        ready_fd=ready_write,
        parent_death=True,
    )
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    parent = subprocess.run(
        [sys.executable, "-c", PARENT, str(ready_read), str(ready_write), str(held_write)],
        cwd=tmp_path,
        pass_fds=(ready_read, ready_write, held_write),
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    for descriptor in (held_write, ready_read, ready_write):
        os.close(descriptor)
    with os.fdopen(held_read, "rb") as pipe:
        assert select.select([pipe], [], [], 30)[0], "the master outlived its parent"
        assert pipe.read() == b""
    assert (tmp_path / "ready").read_bytes() + b"\n" == parent.stdout


async def test_bad_clients_do_not_harm_it(make_master: MakeMaster, connect: Connect) -> None:
    master = make_master()
    ready = master.start()
    agent = connect(master.address)
    await agent.attached()
    peak_before = peak_kib(ready.pid)
    reader, writer = await asyncio.open_connection("127.0.0.1", ready.port)
    writer.write(random.Random(5).randbytes(100_000))
    with contextlib.suppress(ConnectionError):
        await reader.read()
    writer.close()
    with pytest.raises(Rejected, match="token"):
        await ask(master.address, Ping(), token="guess", timeout=10)
    options = [("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(master.address, options=options) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/{AGENT_METHOD}")(metadata=call_metadata(TOKEN))
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await stream.write(bytes(1 << 30))
            await stream.read()
        assert await stream.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert peak_kib(ready.pid) - peak_before < 64 * 1024, "room was made for a message that is too large"
    assert await agent.join() == Done()
    assert agent.channel.outage() == 0.0
    assert "Traceback" not in master.log()


def peak_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1])
    raise AssertionError(f"no VmHWM for {pid}")


async def until_the_journal_fails(master: MasterProcess, write: Callable[[], Awaitable[object]]) -> None:
    """What the write-ahead log has room for passes; then nothing more does. A call without an answer alone may mean a busy machine."""
    async with asyncio.timeout(100):
        while "journal cannot be written" not in master.log():
            with contextlib.suppress(Unavailable):
                await write()


async def test_a_full_disk_stops_commands_only_and_passes_by_itself(
    make_master: MakeMaster, small_disk: Path, connect: Connect
) -> None:
    master = make_master(journal=str(small_disk / "journal.sqlite"))
    master.start()
    agent = connect(master.address)
    await agent.attached()
    assert await agent.join() == Done()
    filler = fill(small_disk)
    await until_the_journal_fails(master, lambda: agent.join(timeout=2))
    seen = await status_of(master.address)
    assert seen == await status_of(master.address), "an undurable decision was visible"
    assert seen.blocked.startswith(
        f"The master cannot write its journal {small_disk / 'journal.sqlite'}: its disk is full ("
    )
    assert "Free some space there. Until then the master makes no decisions" in seen.blocked
    assert (seen.stage_text, seen.reason) == (f"blocked ({seen.stage})", seen.blocked)
    assert agent.blocked == [seen.blocked], "its console says so, once"
    assert agent.channel.outage() == 0.0
    with pytest.raises(Unavailable, match=re.escape(seen.blocked)):
        await ask(master.address, StopJob(), token=TOKEN, timeout=5)
    filler.unlink()
    assert await agent.join() == Done()
    assert agent.blocked == [seen.blocked, ""]
    healed = await status_of(master.address)
    assert (healed.blocked, healed.reason) == ("", healed.verdict)
    said = [line for line in master.log().splitlines() if "journal can" in line]
    assert len(said) == 2, said
    master.kill()
    master.journal = small_disk / "journal.sqlite"
    offers, states = replayed(master.journal)
    assert len(offers) == len(set(offers))
    assert seen.digest in states


async def test_a_hang_that_was_found_while_the_disk_was_full_is_acted_upon_afterwards(
    make_master: MakeMaster, small_disk: Path, connect: Connect, tmp_path: Path
) -> None:
    master = make_master(journal=str(small_disk / "journal.sqlite"), reports=str(tmp_path / "reports"))
    master.start()
    agents = [connect(master.address, launch=f"l{number}") for number in range(2)]
    for agent in agents:
        await agent.attached()
    await asyncio.gather(*(agent.join() for agent in agents))
    ranks = await ranks_of(agents)
    filler = fill(small_disk)
    kept = KvSet(round=Round(1), node=agents[0].node, incarnation=agents[0].incarnation, items={"k": b"x" * 1000})
    await until_the_journal_fails(master, lambda: agents[0].channel.call(kept, timeout=2))
    for agent in agents:
        tell(agent, progress(ranks[agent], is_stalled=True))
    await answer_that_one_is_stopped(agents, ranks)
    async with asyncio.timeout(20):
        while "the job rejected a finding of the diagnosis finding=HangFound" not in master.log():
            await status_of(master.address)
    filler.unlink()
    await answer_that_one_is_stopped(agents, ranks)
    for agent in agents:
        wish = (await agent.wish(Join)).wish
        assert isinstance(wish, Join)
        assert wish.round == 2


def test_a_disk_that_is_full_at_the_start_is_one_clear_sentence(make_master: MakeMaster, small_disk: Path) -> None:
    fill(small_disk)
    master = make_master(journal=str(small_disk / "journal.sqlite"))
    assert master.run_to_end() == EXIT_JOURNAL
    assert "full" in master.log()
    assert "Free some space" in master.log()
    assert "Traceback" not in master.log()


async def test_an_agent_is_bridged_over_a_restart_quickly(make_master: MakeMaster) -> None:
    master = make_master()
    master.start()
    agent = Agent(master.address)
    await agent.attached()
    pauses = []
    for _ in range(3):
        master.kill()
        await asyncio.to_thread(master.start)
        serves_at = time.monotonic()
        await agent.attached()
        pauses.append(time.monotonic() - serves_at)
    assert min(pauses) < 10, f"an agent attached so late after the master served again: {pauses}"
    await agent.leave()
