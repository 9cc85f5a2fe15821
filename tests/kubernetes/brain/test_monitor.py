"""The monitor between a cluster's API server and a real Brain: what it reports, and what it does while one of them is away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from dlrover.brain.config import ServiceTerms
from dlrover.brain.monitor import ClusterMonitor, MonitorTiming
from dlrover.brain.serving import RunningBrain
from dlrover.brain.store.database import migrate, open_engine
from dlrover.brain.store.reading import find_machines, find_node_ends
from dlrover.brain.tenants import TokenRole, add_token
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import NODES, PODS, ClusterApi, FoundObject, PatchKind
from dlrover.protocol.errors import Rejected, Unavailable
from dlrover.protocol.messages.brain import ClusterSeen, MachinesSeen
from dlrover.protocol.rpc.brain import BrainChannel
from tests.brain.jobs import began
from tests.kubernetes import servers
from tests.kubernetes.servers import Server

QUICK = MonitorTiming(gather=0.05)
JOB_UID = "uid-of-train"


@contextlib.asynccontextmanager
async def brain_on(directory: Path, port: int = 0) -> AsyncIterator[RunningBrain]:
    engine = open_engine(make_url(f"sqlite:///{directory}/brain.sqlite"))
    migrate(engine)
    async with RunningBrain(engine, ServiceTerms(port=port, http_port=None, gather=0.002)) as brain:
        yield brain


@contextlib.asynccontextmanager
async def monitoring(api: ClusterApi, port: int, timing: MonitorTiming = QUICK) -> AsyncIterator[asyncio.Future[None]]:
    channel = BrainChannel(f"127.0.0.1:{port}", token="")
    monitor = ClusterMonitor(api, lambda seen: channel.ask(seen, timeout=5.0), "east", timing)
    task = asyncio.ensure_future(monitor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await channel.close()


async def machines_in(brain: RunningBrain, wanted: Callable[[MachinesSeen], bool]) -> MachinesSeen:
    found: MachinesSeen | None = None
    async with asyncio.timeout(60):
        while found is None or not wanted(found):
            found = await brain.store.read(lambda connection: find_machines(connection, "default", "east", since=0.0))
            await asyncio.sleep(0.02)
    return found


async def ends_in(brain: RunningBrain, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found = await brain.store.read(lambda connection: list(find_node_ends(connection, (1,))))
            await asyncio.sleep(0.02)
    return found


@pytest.fixture(scope="session")
def api_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One of its own: machines and pods of the whole cluster count here, and other tests leave some."""
    make = servers.ours if request.param == "ours" else servers.real
    with make(tmp_path_factory.mktemp("api-server-of-brain")) as running:
        yield running


@pytest.fixture
async def api(api_server: Server) -> AsyncIterator[ClusterApi]:
    async with ClusterApi(find_access({}, kubeconfig=api_server.kubeconfig)) as found:
        yield found
        for name in ("machine-one", "machine-two"):
            await found.delete(NODES, name, namespace=None)
        for index in range(3):
            await found.delete(PODS, f"train-{index}", namespace="default", grace=0)


async def make_machine(api: ClusterApi, name: str) -> None:
    assert isinstance(
        await api.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}, namespace=None),
        FoundObject,
    )
    status = {
        "allocatable": {"cpu": "16", "memory": "64Gi"},
        "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": None, "lastTransitionTime": None}],
    }
    done = await api.patch(NODES, name, {"status": status}, namespace=None, kind=PatchKind.MERGE, subresource="status")
    assert isinstance(done, FoundObject), done
    taints = {"spec": {"taints": None}}  # a real server taints what has no kubelet yet
    assert isinstance(await api.patch(NODES, name, taints, namespace=None, kind=PatchKind.MERGE), FoundObject)


async def make_pod(api: ClusterApi, index: int, machine: str) -> None:
    labels = {
        "elasticjob.dlrover/uid": JOB_UID,
        "elasticjob.dlrover/name": "train",
        "elasticjob.dlrover/replica-type": "worker",
        "elasticjob.dlrover/replica-index": str(index),
    }
    needs = {"requests": {"cpu": "3", "memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"train-{index}", "labels": labels},
        "spec": {
            "nodeName": machine,
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "i", "resources": needs}],
        },
    }
    made = await api.create(PODS, body, namespace="default")
    assert isinstance(made, FoundObject), made


async def kill_by_memory(api: ClusterApi, index: int) -> None:
    end = {"exitCode": 137, "reason": "OOMKilled", "startedAt": None, "finishedAt": None}
    container = {
        "name": "main",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 0,
        "state": {"terminated": end},
    }
    body = {"status": {"phase": "Failed", "containerStatuses": [container]}}
    done = await api.patch(
        PODS, f"train-{index}", body, namespace="default", kind=PatchKind.MERGE, subresource="status"
    )
    assert isinstance(done, FoundObject), done


async def test_brain_learns_machines_claims_and_pods_without_memory(api: ClusterApi, tmp_path: Path) -> None:
    await make_machine(api, "machine-one")
    async with brain_on(tmp_path) as brain:
        channel = BrainChannel(f"127.0.0.1:{brain.port}", token="")
        await channel.ask(began(f"{JOB_UID}-1"), timeout=10.0)
        await channel.close()
        async with monitoring(api, brain.port):
            await machines_in(brain, lambda seen: seen.count == 1 and not seen.claimed_cpu)
            await make_pod(api, 0, "machine-one")
            await make_machine(api, "machine-two")
            found = await machines_in(brain, lambda seen: seen.count == 2 and seen.claimed_cpu > 0)
            assert (found.cpu, found.claimed_cpu, found.claimed_memory_mb) == (32.0, 3.0, 2048)
            await kill_by_memory(api, 0)
            [end] = await ends_in(brain, 1)
            assert (end["kind"], end["memory_mb"]) == ("oom", 2048)
            await machines_in(brain, lambda seen: not seen.claimed_cpu)


async def test_what_happens_while_brain_is_away_is_told_later(api: ClusterApi, tmp_path: Path) -> None:
    await make_machine(api, "machine-one")
    async with brain_on(tmp_path) as brain:
        port = brain.port
        channel = BrainChannel(f"127.0.0.1:{port}", token="")
        await channel.ask(began(f"{JOB_UID}-1"), timeout=10.0)
        await channel.close()
    async with monitoring(api, port) as task:
        await make_pod(api, 1, "machine-one")
        await kill_by_memory(api, 1)
        async with brain_on(tmp_path, port) as again:
            assert len(await ends_in(again, 1)) == 1
            assert not task.done()


async def test_an_api_server_that_goes_away_loses_nothing(api: ClusterApi, api_server: Server, tmp_path: Path) -> None:
    await make_machine(api, "machine-one")
    async with brain_on(tmp_path) as brain, monitoring(api, brain.port):
        await machines_in(brain, lambda seen: seen.count == 1)
        try:
            with api_server.away():
                pass
        except NotImplementedError:
            pytest.skip("this server stays")
        await make_machine(api, "machine-two")
        await machines_in(brain, lambda seen: seen.count == 2)


async def test_machines_are_told_again_while_nothing_changes(api: ClusterApi) -> None:
    told: list[ClusterSeen] = []
    twice = asyncio.Event()

    async def tell(seen: ClusterSeen) -> None:
        told.append(seen)
        if len(told) > 2:
            twice.set()

    timing = MonitorTiming(gather=0.0, renew=0.2)
    task = asyncio.ensure_future(ClusterMonitor(api, tell, "east", timing).run())
    async with asyncio.timeout(60):
        await twice.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert told[1].machines == told[2].machines
    assert not told[2].pods


async def test_a_brain_that_refuses_for_good_ends_the_monitor(api: ClusterApi) -> None:
    async def tell(seen: ClusterSeen) -> None:
        raise Rejected("this token has another role")

    monitor = ClusterMonitor(api, tell, "east", QUICK)
    with pytest.raises(Rejected, match="another role"):
        async with asyncio.timeout(60):
            await monitor.run()


async def test_a_cluster_that_may_not_be_listed_ends_the_monitor_with_the_reason(api_server: Server) -> None:
    async def tell(seen: ClusterSeen) -> None:
        raise AssertionError("there is nothing to tell")

    access = find_access({}, kubeconfig=api_server.kubeconfig)
    async with ClusterApi(access, timeout=5.0) as api:
        with api_server.away() if api_server.name == "ours" else contextlib.nullcontext():
            if api_server.name != "ours":
                pytest.skip("this server stays")
            with pytest.raises(Unavailable, match="No list of pods"):
                await ClusterMonitor(api, tell, "east", MonitorTiming(start=0.2)).run()


def test_the_command_reports_until_sigterm(api_server: Server, tmp_path: Path) -> None:
    """Three processes, as an operator runs them: a Brain with tokens, and its monitor."""
    database = tmp_path / "brain.sqlite"
    engine = open_engine(make_url(f"sqlite:///{database}"))
    migrate(engine)
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        tokens = {role: add_token(connection, "team", role, 0.0) for role in (TokenRole.MONITOR, TokenRole.READER)}
    engine.dispose()
    for role, token in tokens.items():
        (tmp_path / role.value).write_text(token)
    main = [sys.executable, "-m", "dlrover.cli.main", "brain"]
    serve = [*main, "serve", "--sqlite", str(database), "--port", "0", "--http-port", "none"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as brain:
        try:
            assert brain.stdout is not None
            port = _port_in(brain.stdout.readline())
            options = ["--brain", f"127.0.0.1:{port}", "--kubeconfig", str(api_server.kubeconfig), "--cluster", "east"]
            wrong = [*main, "monitor", *options, "--brain-token-file", str(tmp_path / "reader")]
            refused = subprocess.run(wrong, capture_output=True, text=True, timeout=120, check=False)
            assert refused.returncode == 1
            assert "needs a token with the role `monitor`" in refused.stderr
            right = [*main, "monitor", *options, "--brain-token-file", str(tmp_path / "monitor")]
            with subprocess.Popen(right, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as monitor:
                assert monitor.stdout is not None
                assert "The monitor reports east" in monitor.stdout.readline()
                os.kill(monitor.pid, signal.SIGTERM)
                assert monitor.wait(timeout=60) == 0
        finally:
            os.kill(brain.pid, signal.SIGTERM)
            brain.wait(timeout=60)


def _port_in(line: str) -> int:
    return int(line.split(" on ", 1)[1].split(".  ")[0].split(":")[1].split(". ")[0].split(",")[0])
