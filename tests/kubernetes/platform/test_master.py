"""The master's command in a cluster: what it reads, what it makes, and how it tells the end of its job."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dlrover.platforms.kubernetes import names
from tests.kubernetes.kubelet.client import ApiError
from tests.kubernetes.platform.lab import ELASTIC_JOBS, TEMPLATE, PodLab
from tests.kubernetes.server.access.tokens import User
from tests.kubernetes.server.faults import Fault
from tests.platforms.contract import DEADLINE

JOB = "trained"
COMMAND = (sys.executable, "-m", "dlrover.python.master.main", "--platform", "pyk8s", "--job_name", JOB, "--port", "0")


@pytest.fixture
async def lab(server):
    async with PodLab(server.kubeconfig, capacity=0) as built:
        yield built


async def add_job(lab: PodLab, **spec: object) -> None:
    worker = {"replicas": 2, "restartCount": 2, "template": TEMPLATE}
    body = {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": JOB},
        "spec": {"distributionStrategy": "AllreduceStrategy", "replicaSpecs": {"worker": worker}, **spec},
    }
    made = await lab.create(ELASTIC_JOBS.format(lab.namespace), body)
    lab.uids[JOB] = made["metadata"]["uid"]


class Master:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""

    async def ended(self) -> int:
        async with asyncio.timeout(DEADLINE):
            assert self.process.stderr is not None
            self.said += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@contextlib.asynccontextmanager
async def master(lab: PodLab, directory: Path, *more: str, **environ: str) -> AsyncIterator[Master]:
    given = {
        "PATH": os.environ["PATH"],
        "KUBECONFIG": str(lab.kubeconfig),
        "TMPDIR": str(directory),
        "HOME": str(directory),
    }
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "--namespace",
        lab.namespace,
        "--journal",
        str(directory / "journal.sqlite"),
        "--termination_message_path",
        str(directory / "termination-log"),
        *more,
        stderr=asyncio.subprocess.PIPE,
        env={**given, **environ},
    )
    try:
        yield Master(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(DEADLINE):
            await process.communicate()


async def until_pods(lab: PodLab, *nodes: int) -> dict[str, dict]:
    wanted = {names.pod_name(JOB, "worker", node) for node in nodes}
    async with asyncio.timeout(DEADLINE):
        while True:
            pods = await lab.pods()
            running = {name for name, pod in pods.items() if pod["status"].get("phase") == "Running"}
            if wanted <= running:
                return pods
            await asyncio.sleep(0.05)


async def until_alive(lab: PodLab, number: int = 2) -> list[dict]:
    """Pods that are not being deleted."""
    async with asyncio.timeout(DEADLINE):
        while True:
            alive = [pod for pod in (await lab.pods()).values() if "deletionTimestamp" not in pod["metadata"]]
            if len(alive) == number:
                return alive
            await asyncio.sleep(0.05)


async def test_a_master_started_by_the_original_command_makes_what_no_operator_made(lab, tmp_path):
    await add_job(lab, envs={"SHARED": {"value": "s"}})
    async with master(lab, tmp_path):
        pods = await until_pods(lab, 0, 1)
    ledger = await lab.ledger(JOB)
    assert ledger["used"].removesuffix("+") in ("0-1", "0,1", "0+,1")
    services = await lab.cluster.get(f"/api/v1/namespaces/{lab.namespace}/services")
    assert {each["metadata"]["name"] for each in services["items"]} == {
        names.master_service(JOB),
        names.nodes_service(JOB),
    }
    secret = await lab.cluster.get(f"/api/v1/namespaces/{lab.namespace}/secrets/{names.token_secret(JOB)}")
    assert len(base64.b64decode(secret["data"]["token"])) >= 32
    container = pods[names.pod_name(JOB, "worker", 0)]["spec"]["containers"][0]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["SHARED"] == "s"
    assert variables["DLROVER_MASTER_ADDR"] == f"{names.master_service(JOB)}:50001"
    assert variables["JOB_UID"] == lab.uids[JOB]


async def test_the_next_master_takes_its_pods_over(lab, tmp_path):
    """No pod is doubled and none restarted, with the journal and without."""
    await add_job(lab)
    async with master(lab, tmp_path):
        before = await until_pods(lab, 0, 1)
    for _ in range(2):
        async with master(lab, tmp_path):
            # Its first intent after the list: a lost node is replaced, the other is left alone.
            await lab.cluster.delete(lab.path(max(await lab.pods())))
            alive = await until_alive(lab)
        for file in tmp_path.glob("journal*"):
            file.unlink()
    uids = {pod["metadata"]["uid"] for pod in alive}
    assert before[names.pod_name(JOB, "worker", 0)]["metadata"]["uid"] in uids
    assert sorted(pod["metadata"]["labels"][names.RANK_INDEX] for pod in alive) == ["0", "1"]


async def test_a_pod_that_others_delete_keeps_its_grace_although_it_is_replaced_at_once(lab, tmp_path):
    """Its agent saves meanwhile: the master must not take the pod away earlier."""
    await add_job(lab)
    lost, replacement = names.pod_name(JOB, "worker", 1), names.pod_name(JOB, "worker", 2)
    async with master(lab, tmp_path):
        await until_pods(lab, 0, 1)
        lab.is_awake.clear()  # it terminates, and no kubelet ends it
        await lab.cluster.delete(lab.path(lost), grace=30)
        async with asyncio.timeout(DEADLINE):
            while replacement not in await lab.pods() or (await lab.ledger(JOB))["used"] != "0-2":  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert (await lab.pods())[lost]["metadata"]["deletionGracePeriodSeconds"] == 30


async def test_a_master_goes_on_with_its_journal_although_the_job_was_edited(lab, tmp_path):
    """The journal says how the fleet began. Numbers of nodes are followed as orders, when nodes have come."""
    await add_job(lab)
    path = f"{ELASTIC_JOBS.format(lab.namespace)}/{JOB}"
    async with master(lab, tmp_path):
        before = await until_pods(lab, 0, 1)
    await lab.cluster.patch(path, {"spec": {"replicaSpecs": {"worker": {"replicas": 3, "restartCount": 5}}}})
    async with master(lab, tmp_path):
        await lab.cluster.delete(lab.path(names.pod_name(JOB, "worker", 1)))
        await until_pods(lab, 0, 2)
        alive = await until_alive(lab)
    kept = before[names.pod_name(JOB, "worker", 0)]["metadata"]["uid"]
    assert kept in {pod["metadata"]["uid"] for pod in alive}


async def test_a_job_that_is_over_is_told_by_the_termination_message_and_code_0(lab, tmp_path):
    message = tmp_path / "termination-log"
    message.touch()
    await add_job(lab, replicaSpecs={"worker": {"replicas": 1, "restartCount": 0, "template": TEMPLATE}})
    async with master(lab, tmp_path) as running:
        await until_pods(lab, 0)
        lab.soon(lab._end(names.pod_name(JOB, "worker", 0), "Failed", 1, "Error"))
        assert await running.ended() == 0
    notice = json.loads(message.read_text())
    assert notice["stage"] == "Failed"
    assert notice["reason"]
    assert "worker" in notice["sentence"]


async def test_a_master_that_is_stopped_leaves_no_message(lab, tmp_path):
    message = tmp_path / "termination-log"
    message.touch()
    await add_job(lab)
    async with master(lab, tmp_path) as running:
        await until_pods(lab, 0, 1)
        running.process.terminate()
        assert await running.ended() != 0
    assert message.read_text() == ""


async def test_a_master_of_no_job_says_so(lab, tmp_path):
    async with master(lab, tmp_path, "--job_name", "nobody") as running:
        assert await running.ended() == 2
    assert "Cannot get the training job nobody" in running.said


@pytest.mark.parametrize(
    ("plural", "what"),
    [
        ("configmaps", "may not create its ledger"),
        ("secrets", "may not create the token"),
        ("services", "set POD_IP"),
    ],
)
async def test_a_right_that_is_missing_is_named(server, lab, tmp_path, plural, what):
    await add_job(lab)
    server.faults.inject(Fault(effect="status", verb="create", plural=plural, code=403))
    async with master(lab, tmp_path) as running:
        assert await running.ended() == 2
    assert what in running.said
    assert f"right to create {plural}" in running.said


async def test_without_a_service_nodes_get_the_masters_own_address(server, lab, tmp_path):
    await add_job(lab)
    server.faults.inject(Fault(effect="status", verb="create", plural="services", code=403))
    async with master(lab, tmp_path, POD_IP="10.1.2.3"):
        pods = await until_pods(lab, 0, 1)
    container = pods[names.pod_name(JOB, "worker", 0)]["spec"]["containers"][0]
    [address] = [each["value"] for each in container["env"] if each["name"] == "DLROVER_MASTER_ADDR"]
    assert address.startswith("10.1.2.3:")


async def test_a_job_that_cannot_run_is_refused_before_anything_is_made(lab, tmp_path):
    await add_job(lab, replicaSpecs={"worker": {"replicas": 0, "template": TEMPLATE}})
    async with master(lab, tmp_path) as running:
        assert await running.ended() == 2
    assert "there is no worker" in running.said
    with pytest.raises(ApiError, match="404"):
        await lab.ledger(JOB)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"effect": "html"}, id="a proxy's page"),
        pytest.param({"effect": "status", "code": 401}, id="an expired token"),
    ],
)
async def test_a_server_that_answers_nonsense_in_mid_run_costs_no_pod(server, lab, tmp_path, fault):
    """Nothing is deleted meanwhile, and what was lost is replaced afterwards."""
    own, many = "the-master's-token", 1_000_000
    server.cluster.tokens.add(own, User("master", ("system:masters", "system:authenticated")))
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(lab.kubeconfig.read_text().replace(server.token, own))
    await add_job(lab)
    async with master(lab, tmp_path, KUBECONFIG=str(kubeconfig)) as running:
        before = await until_pods(lab, 0, 1)
        kept, lost = (names.pod_name(JOB, "worker", node) for node in (0, 1))
        trouble = server.faults.inject(Fault(**fault, token=own, times=many))
        server.faults.cut_watches()
        async with asyncio.timeout(DEADLINE):
            while many - trouble.times < 3:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(0.05)
            lab.soon(lab._end(lost, "Failed", 1, "Error"))
            struck = trouble.times
            while struck - trouble.times < 5:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert running.process.returncode is None
        assert {name: pod["metadata"]["uid"] for name, pod in (await lab.pods()).items()} == {
            name: pod["metadata"]["uid"] for name, pod in before.items()
        }
        assert server.faults.counts["delete", "pods"] == 0, "not even tried"
        server.faults.withdraw()
        after = await until_pods(lab, 0, 2)
        assert after[kept]["metadata"]["uid"] == before[kept]["metadata"]["uid"]
        assert len(await until_alive(lab, 3)) == 3, "the lost one's object, and one replacement"
