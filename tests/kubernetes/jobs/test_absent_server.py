"""
The API server is away while a job trains, and a worker is lost meanwhile.

Nothing counts as lost that is only not seen: the processes are those from before. What was lost is replaced when the server is back.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kubernetes.jobs.stage import TrainingJob
from tests.kubernetes.machine import LocalCluster
from tests.kubernetes.servers import Server

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


async def train_without(server: Server, cluster: LocalCluster, name: str, seconds: float) -> None:
    job = TrainingJob(cluster, name, workers=2, options=("--records=120000", "--pace=0.3"))
    await job.submit()
    await job.until_step(3)
    pods = await job.until_running()
    mains, num_lives = job.mains(pods), len(job.events("start"))
    [master] = (await job.running("dlrover-master")).values()
    with server.away():
        wanted, ends_at = job.step() + 10, time.monotonic() + seconds
        still_trains = lambda: job.step() >= wanted and time.monotonic() >= ends_at  # noqa: E731
        await cluster.until(still_trains, f"{name} trains on without an API server", seconds + 180.0)
        assert job.mains(pods) == mains
        assert len(job.events("start")) == num_lives, "no worker has started again"
        cluster.tell(pods[1]["spec"]["nodeName"], "signal", pod=f"default/{pods[1]['metadata']['name']}", number=9)
        await cluster.until(lambda: not Path(f"/proc/{mains[1]}").exists(), f"the end of rank 1 of {name}")
    replacement = await job.until_replaced(1, pods[1])
    await job.until_trained_by(replacement)
    now = await job.until_running()
    assert job.mains({0: now[0]}) == {0: mains[0]}
    assert {pod["metadata"]["uid"] for pod in (await job.running("dlrover-master")).values()} == {
        master["metadata"]["uid"]
    }
    assert len(await job.pods()) <= 3, "no pod is made twice"
    await job.delete()


async def test_a_job_trains_on_without_an_api_server_and_replaces_its_losses_after(
    api_server: Server, cluster: LocalCluster
) -> None:
    await train_without(api_server, cluster, "absent", 0.0)


@pytest.mark.chaos
async def test_a_job_trains_on_through_five_minutes_without_an_api_server(
    api_server: Server, cluster: LocalCluster
) -> None:
    await train_without(api_server, cluster, "absent-long", 300.0)
