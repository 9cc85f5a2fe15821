"""A thousand pods: how many requests they cost (issue 17, line 5). Seconds are measured by `benchmarks/kubernetes_pods.py`."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dlrover.master.platform_driver import MAX_CALLS
from dlrover.protocol.messages.fleet import NodeChanged, NodePhase
from tests.kubernetes.platform.lab import PodLab
from tests.platforms.contract import launch, remove, watching

PODS = 1000
MOST_REQUESTS = 1100
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
async def lab(server):
    async with PodLab(server.kubeconfig, capacity=0) as built:
        yield built


def asked(counts: Counter, before: Counter) -> int:
    """Requests that are no watch."""
    return sum(count for (verb, _), count in (counts - before).items() if verb != "watch")


async def apply_all(platform, intents) -> None:
    """As the master does it: so many at a time."""
    slots = asyncio.Semaphore(MAX_CALLS)

    async def apply(intent) -> None:
        async with slots:
            await platform.apply(intent)

    await asyncio.gather(*(apply(intent) for intent in intents))


async def test_a_thousand_pods_cost_little_more_than_a_request_each(server, lab):
    lab.is_awake.clear()  # requests of a kubelet are not ours
    platform = lab.platform()
    async with watching(platform) as watch:
        before = Counter(server.faults.counts)
        await apply_all(platform, [launch(node) for node in range(PODS)])
        launching = asked(server.faults.counts, before)
        assert len(await lab.pods()) == PODS
        assert PODS <= launching <= MOST_REQUESTS, dict(server.faults.counts - before)

        before = Counter(server.faults.counts)
        await apply_all(platform, [remove(node) for node in range(PODS)])
        removing = asked(server.faults.counts, before)
        assert PODS <= removing <= MOST_REQUESTS, dict(server.faults.counts - before)

        gone: set[int] = set()
        while len(gone) < PODS:
            sight = await watch.next()
            if isinstance(sight, NodeChanged) and sight.node.phase is NodePhase.DELETED:
                gone.add(sight.node.id)
    assert await platform.list() == ()
    assert (await lab.ledger())["used"] == f"0-{PODS - 1}"
