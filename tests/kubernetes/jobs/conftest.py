"""One cluster for all whole jobs: starting it costs seconds, and jobs must bear each other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.kubernetes.jobs.stage import TrainingJob, start_operator
from tests.kubernetes.kubelet.network import available
from tests.kubernetes.machine import LocalCluster
from tests.kubernetes.servers import Server

NODES = ("red", "green", "blue", "white", "black", "grey")
QUICK = ("--records=6000",)
"""A hundred steps."""


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def cluster(api_server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    reason = available()
    if reason:
        pytest.skip(reason)
    options = ("--lease-grace", "8", "--toleration-factor", "0.2")
    folder = tmp_path_factory.mktemp("j")
    async with LocalCluster(folder, kubeconfig=api_server.kubeconfig, controller_options=options) as made:
        for name in NODES:
            await made.add_node(name, "--renew-every", "1")
        await start_operator(made)
        yield made


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def undisturbed(cluster: LocalCluster) -> TrainingJob:
    """A job of four workers that nothing happened to, after its end."""
    job = TrainingJob(cluster, "undisturbed", workers=4, options=QUICK)
    await job.submit()
    assert await job.until_ended() == "Succeeded", await job.status()
    return job
