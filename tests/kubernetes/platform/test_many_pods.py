"""How many requests pods cost. Seconds and memory are measured by `benchmarks/kubernetes_pods.py`."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dlrover.master.platform_driver import MAX_CALLS
from dlrover.platforms.kubernetes.informer import InformerTiming
from dlrover.protocol.messages.fleet import NodeChanged, NodePhase
from tests.kubernetes.platform.lab import PodLab
from tests.platforms.contract import DEADLINE, launch, remove, run_nodes, watching

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


async def test_pods_that_do_not_change_cost_no_request_but_their_watches(server, lab):
    """A master begins a new `watch()` every five minutes; watches end by themselves every second here, else every few minutes."""
    platform = lab.platform(timing=InformerTiming(shortest_watch=1.0, longest_watch=1.0))
    await run_nodes(platform, *range(5))
    async with asyncio.timeout(DEADLINE):
        while (await lab.ledger())["used"] != "0-4":  # noqa: ASYNC110 (the last write, of the marks, has no event)
            await asyncio.sleep(0.02)
    before = Counter(server.faults.counts)

    def num_watches(plural: str) -> int:
        return server.faults.counts["watch", plural] - before["watch", plural]

    async with asyncio.timeout(DEADLINE):
        while min(num_watches("pods"), num_watches("configmaps")) < 3:
            async with watching(platform) as watch:
                assert len(watch.listed) == 5
            await asyncio.sleep(0.02)
    assert asked(server.faults.counts, before) == 0, dict(server.faults.counts - before)
