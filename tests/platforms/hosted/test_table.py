"""Real local nodes beyond the contract: what they leave, what they say, and who may talk to their host."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from dlrover.platforms.base import LaunchNotTaken
from dlrover.platforms.hosted.client import LocalOptions, LocalPlatform
from dlrover.platforms.hosted.messages import ANSWER
from dlrover.platforms.local.node_process import NodeCommand, NodeProcess, wait_gone
from dlrover.protocol.errors import ConfigError, Unavailable
from dlrover.protocol.local_frames import HEADER, pack
from dlrover.protocol.messages.fleet import NodeChanged, NodeEventKind, NodeExit, NodePhase, NodesListed, PlatformNode
from dlrover.protocol.messages.identity import PlatformId
from tests.platforms.conftest import LocalLab, until
from tests.platforms.contract import DEADLINE, JOB, launch, remove, run_nodes, watching


async def test_nothing_of_a_killed_node_remains(local_lab):
    """Neither a child in a session of its own, nor one that also cleared its environment."""
    platform = local_lab.platform()
    await run_nodes(platform, 0)
    local_lab.order(0, "leave children")
    await until(lambda: len(local_lab.processes()) == 3 and len(_obedient(local_lab)) == 1)
    async with watching(platform) as watch:
        os.kill(*_obedient(local_lab), signal.SIGKILL)
        await watch.until(0, NodePhase.FAILED)
    assert local_lab.processes() == []


async def test_a_node_is_not_over_before_what_lost_its_mark_has_ended(tmp_path):
    """The kernel may take its time after SIGKILL, and one may only be seen when another has ended."""
    strangers = _Sleepers(2)
    command = NodeCommand(argv=("true",), environ=dict(os.environ), mark="none", log_file=str(tmp_path / "log"))
    process = NodeProcess(command, on_line=lambda line, is_error: None)
    await wait_gone([process.pid], DEADLINE)
    await process.sweep_processes(300.0, lambda: strangers.alive()[:1])
    assert strangers.seen == [strangers.pids, strangers.pids[1:], []]


async def test_what_one_node_leaves_is_told_from_what_another_runs(local_lab):
    platform = local_lab.platform()
    await run_nodes(platform, 0, 1)
    for node in (0, 1):
        local_lab.order(node, "leave children")
    await until(lambda: len(local_lab.processes()) == 6 and len(_obedient(local_lab)) == 2)
    async with watching(platform) as watch:
        await platform.apply(remove(0))
        await watch.until(0, NodePhase.DELETED)
    assert len(local_lab.processes()) == 3
    assert [node.id for node in await platform.list()] == [1]


async def test_a_node_that_ignores_the_signal_is_killed_after_its_grace_and_a_shorter_grace_counts(local_lab):
    platform = local_lab.platform()
    await run_nodes(platform, 0)
    local_lab.order(0, "ignore SIGTERM")
    local_lab.order(0, "say deaf")
    await until(lambda: "deaf" in local_lab.log(0))
    async with watching(platform) as watch:
        await platform.apply(remove(0, grace=300.0))
        await platform.apply(remove(0, grace=0.1))
        seen = (await watch.until(0, NodePhase.DELETED)).node
    assert (seen.exit_code, seen.exit_reason) == (128 + signal.SIGKILL, NodeExit.NONE)


async def test_a_node_that_writes_its_last_checkpoint_is_not_told_to_hurry(saving_lab):
    platform = saving_lab.platform()
    await run_nodes(platform, 0)
    (saving_lab.directory / "saving").write_text(f"{time.monotonic() + 1000}")
    async with watching(platform) as watch:
        await platform.apply(remove(0, grace=0.1))
        saving_lab.end(0, 0)
        seen = (await watch.until(0, NodePhase.DELETED)).node
    assert seen.exit_code == 0  # a signal would have ended it with another


async def test_a_node_that_writes_is_not_killed_when_its_grace_is_over(saving_lab):
    """It begins after the signal: the first look, before it, shows nothing."""
    platform = saving_lab.platform()
    await run_nodes(platform, 0)
    saving_lab.order(0, "ignore SIGTERM")
    saving_lab.order(0, "say deaf")
    await until(lambda: "deaf" in saving_lab.log(0))
    (saving_lab.directory / "saving").write_text(f"0 {time.monotonic() + 1000}")
    async with watching(platform) as watch:
        await platform.apply(remove(0, grace=0.1))
        await until(lambda: (saving_lab.directory / "looked").exists())
        saving_lab.end(0, 0)
        seen = (await watch.until(0, NodePhase.DELETED)).node
    assert seen.exit_code == 0


async def test_a_node_that_writes_ends_with_a_host_that_is_told_to_end(saving_lab):
    platform = saving_lab.platform()
    await run_nodes(platform, 0)
    (saving_lab.directory / "saving").write_text(f"{time.monotonic() + 1000}")
    await platform.apply(remove(0, grace=300.0))
    await until(lambda: (saving_lab.directory / "looked").exists())
    saving_lab.process.terminate()
    await asyncio.to_thread(saving_lab.process.wait, DEADLINE)
    assert saving_lab.processes() == []


async def test_at_once_means_at_once_even_for_a_node_that_writes(saving_lab):
    platform = saving_lab.platform()
    await run_nodes(platform, 0)
    saving_lab.order(0, "ignore SIGTERM")
    saving_lab.order(0, "say deaf")
    await until(lambda: "deaf" in saving_lab.log(0))
    (saving_lab.directory / "saving").write_text(f"{time.monotonic() + 1000}")
    async with watching(platform) as watch:
        await platform.apply(remove(0, grace=300.0))
        await platform.apply(remove(0, grace=0.0))
        seen = (await watch.until(0, NodePhase.DELETED)).node
    assert seen.exit_code == 128 + signal.SIGKILL


async def test_a_node_knows_who_it_is_and_its_output_is_kept(local_lab):
    platform = local_lab.platform()
    await run_nodes(platform, 2)
    local_lab.order(2, "environ")
    local_lab.end(2, 0)
    async with watching(platform) as watch:
        if not any(node.phase is NodePhase.SUCCEEDED for node in watch.listed):
            await watch.until(2, NodePhase.SUCCEEDED)
    name = launch(2).name
    pairs = {"DLROVER_NODE_ID": "2", "NODE_ID": "2", "NODE_RANK": "2", "NODE_TYPE": "worker", "POD_NAME": name}
    pairs |= {"WORKER_ID": "2", "WORKER_RANK": "2", "WORKER_TYPE": "worker", "MONITOR_ENABLED": "true"}
    for variable, value in pairs.items():
        assert f"'{variable}': '{value}'" in local_lab.log(2)
    assert "RELAUNCHED_POD" not in local_lab.log(2)


async def test_a_relaunched_node_is_told_so(local_lab):
    platform = local_lab.platform()
    await platform.apply(replace(launch(0), relaunch_count=1))
    local_lab.order(0, "environ")
    local_lab.end(0, 0)
    async with watching(platform) as watch:
        if not any(node.phase is NodePhase.SUCCEEDED for node in watch.listed):
            await watch.until(0, NodePhase.SUCCEEDED)
    assert "'RELAUNCHED_POD': 'true'" in local_lab.log(0)


async def test_nodes_follow_a_host_that_is_killed(local_lab):
    await run_nodes(local_lab.platform(), 0, 1)
    local_lab.process.kill()
    local_lab.process.wait()
    await until(lambda: local_lab.processes() == [])
    with pytest.raises(Unavailable, match="cannot be reached"):
        await local_lab.platform().list()


@pytest.mark.parametrize("garbage", [b"\xff" * 64, HEADER.pack(5) + b"\x00bad\x00", HEADER.pack(1 << 31), b""])
async def test_rubbish_on_the_socket_is_hung_up_on_and_harms_nobody(local_lab, garbage):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(local_lab.directory / "host.sock"))
        stranger.settimeout(DEADLINE)
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(10) == b""
    await run_nodes(local_lab.platform(), 0)


async def test_the_socket_is_closed_to_other_users(local_lab):
    assert os.stat(local_lab.directory / "host.sock").st_mode & 0o077 == 0


async def test_a_program_that_is_not_there_ends_its_node_and_the_log_says_why(short_dir):
    lab = LocalLab(short_dir, program=("/no/such/program",))
    try:
        platform = lab.platform()
        async with watching(platform) as watch:
            await platform.apply(launch(0))
            seen = (await watch.until(0, NodePhase.FAILED)).node
        assert (seen.exit_code, seen.exit_reason) == (126, NodeExit.UNKNOWN)
        assert "/no/such/program" in lab.log(0)
    finally:
        lab.close()


async def test_a_log_that_cannot_be_written_is_a_reason_not_to_launch(local_lab):
    (local_lab.directory / "worker-0-0.log").mkdir()
    with pytest.raises(LaunchNotTaken, match="log file"):
        await local_lab.platform().apply(launch(0))
    assert await local_lab.platform().list() == ()


async def test_a_node_that_ended_by_itself_keeps_its_reason_when_it_is_removed(local_lab):
    platform = local_lab.platform()
    await run_nodes(platform, 0)
    async with watching(platform) as watch:
        local_lab.end(0, 1)
        await watch.until(0, NodePhase.FAILED)
        await platform.apply(remove(0))
        seen = (await watch.until(0, NodePhase.DELETED)).node
    assert (seen.exit_code, seen.exit_reason) == (1, NodeExit.FATAL)


class LossyHost:
    """Serves one list per watch and hangs up, as a host that is started again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.num_watches = 0

    async def __aenter__(self) -> LossyHost:
        self._server = await asyncio.start_unix_server(self._talk, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_watches += 1
        node = PlatformNode(id=PlatformId(self.num_watches), node_type="worker", rank=0, phase=NodePhase.RUNNING)  # type: ignore[arg-type]
        writer.write(pack(ANSWER.encode(NodesListed(nodes=(node,)))))
        if self.num_watches == 2:
            event = NodeChanged(kind=NodeEventKind.MODIFIED, node=node)
            writer.write(pack(ANSWER.encode(event)) + b"\0\0")  # cut off in the middle of a frame
        writer.close()


async def test_a_watch_lists_again_after_each_lost_connection(short_dir):
    path = str(short_dir / "host.sock")
    platform = LocalPlatform(LocalOptions(socket=path), JOB)
    async with LossyHost(path):
        sights = platform.watch()
        async with asyncio.timeout(DEADLINE):
            seen = [await anext(sights) for _ in range(4)]
        await sights.aclose()  # type: ignore[attr-defined]
    kinds = [type(sight).__name__ for sight in seen]
    assert kinds == ["NodesListed", "NodesListed", "NodeChanged", "NodesListed"]
    assert [sight.nodes[0].id for sight in seen if isinstance(sight, NodesListed)] == [1, 2, 3]


async def test_a_host_that_is_not_there_is_unavailable_and_a_watch_waits_for_it(short_dir):
    path = str(short_dir / "host.sock")
    platform = LocalPlatform(LocalOptions(socket=path), JOB)
    with pytest.raises(Unavailable, match="cannot be reached"):
        await platform.apply(launch(0))
    sights = platform.watch()
    first = asyncio.ensure_future(anext(sights))
    await asyncio.sleep(0)
    async with LossyHost(path), asyncio.timeout(DEADLINE):
        assert isinstance(await first, NodesListed)
    await sights.aclose()  # type: ignore[attr-defined]


def test_unknown_options_are_refused():
    with pytest.raises(ConfigError, match="colour"):
        LocalPlatform.from_options(JOB, {"socket": "/nowhere", "colour": "blue"})


def _obedient(lab: LocalLab) -> list[int]:
    """Nodes; for an instant also a child that has not yet become what it shall be."""
    return [pid for pid in lab.processes() if b"obedient" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class _Sleepers:
    def __init__(self, count: int) -> None:
        self._processes = [subprocess.Popen(["sleep", "300"]) for _ in range(count)]
        self.pids = [process.pid for process in self._processes]
        self.seen: list[list[int]] = []

    def alive(self) -> list[int]:
        self.seen.append([process.pid for process in self._processes if process.poll() is None])
        return self.seen[-1]
