"""The ledger at a server: gathered writes, conflicts, masters that were followed, plans that run once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dlrover.platforms.base import StaleMaster
from dlrover.platforms.kubernetes import names
from dlrover.platforms.kubernetes.access import find_access
from dlrover.platforms.kubernetes.api import ClusterApi
from dlrover.platforms.kubernetes.job.ledger_state import LedgerEntry
from dlrover.platforms.kubernetes.ledger import JobLedger
from dlrover.protocol.errors import Unavailable
from tests.kubernetes.server.faults import Fault
from tests.platforms.contract import JOB, launch, remove


@pytest.fixture
async def ledgers(lab):
    """Two masters of one job, each with its own idea of the ledger."""
    async with ClusterApi(find_access({}, kubeconfig=lab.kubeconfig)) as api:
        place = {"namespace": lab.namespace, "name": names.ledger_name(JOB), "job_uid": lab.uids[JOB]}
        made = [JobLedger(api, **place, linger=60.0) for _ in range(2)]
        yield made
        for ledger in made:
            await ledger.close()


async def test_entries_that_come_together_are_written_together(server, ledgers):
    ledger, _ = ledgers
    await ledger.read()
    before = Counter(server.faults.counts)
    entries = await asyncio.gather(*(ledger.enter(launch(node)) for node in range(100)))
    assert entries == [LedgerEntry.OPEN] * 100
    assert server.faults.counts - before == Counter({("update", "configmaps"): 1})


async def test_entries_wait_a_moment_for_more_while_calls_are_under_way(server, lab, ledgers):
    ledger = ledgers[0]
    await ledger.read()
    before = Counter(server.faults.counts)
    with ledger.carrying_out(), ledger.carrying_out():
        first = asyncio.ensure_future(ledger.enter(launch(0)))
        for _ in range(3):
            await lab.ledger()  # round trips, in any of which a write would have been done
        assert server.faults.counts["update", "configmaps"] == before["update", "configmaps"]
        await ledger.enter(launch(1))
        await first
    assert server.faults.counts["update", "configmaps"] == before["update", "configmaps"] + 1
    assert (await lab.ledger())["used"] == "0-1+"


async def test_entries_that_find_the_ledger_as_it_should_be_cost_one_read(server, ledgers):
    ledger, _ = ledgers
    await asyncio.gather(*(ledger.enter(remove(node)) for node in range(10)))
    before = Counter(server.faults.counts)
    entries = await asyncio.gather(*(ledger.enter(remove(node)) for node in range(10)))
    assert entries == [LedgerEntry.CLOSED] * 10
    assert server.faults.counts - before == Counter({("get", "configmaps"): 1})


async def test_a_conflict_is_read_and_worked_out_anew(lab, ledgers):
    one, other = ledgers
    assert await one.enter(launch(0)) is LedgerEntry.OPEN
    assert await other.enter(launch(1)) is LedgerEntry.OPEN
    assert await one.enter(launch(2)) is LedgerEntry.OPEN, "it did not know of the other's write"
    assert (await lab.ledger())["used"] == "0-2+"


async def test_an_open_launch_is_open_for_the_next_master_and_a_removal_closes_it(lab, ledgers):
    one, other = ledgers
    await one.enter(launch(0, master_epoch=1))
    assert await other.enter(launch(0, master_epoch=2)) is LedgerEntry.OPEN
    assert await other.enter(remove(0, master_epoch=2)) is LedgerEntry.OPEN
    assert await other.enter(launch(0, master_epoch=2)) is LedgerEntry.CLOSED
    assert await lab.ledger() == {"epoch": "2", "used": "0", "plans": ""}


async def test_a_master_that_was_followed_writes_nothing(lab, ledgers):
    old, new = ledgers
    await old.enter(launch(0, master_epoch=1))
    await new.enter(launch(1, master_epoch=2))
    for intent in (launch(2, master_epoch=1), remove(0, master_epoch=1), launch(0, master_epoch=1)):
        with pytest.raises(StaleMaster, match="a newer master of epoch 2 runs the job"):
            await old.enter(intent)
    assert (await lab.ledger())["used"] == "0-1+"


async def test_a_stale_entry_does_not_spoil_those_beside_it(ledgers):
    ledger, _ = ledgers
    results = await asyncio.gather(
        ledger.enter(launch(0, master_epoch=5)), ledger.enter(launch(1, master_epoch=4)), return_exceptions=True
    )
    assert results[0] is LedgerEntry.OPEN
    assert isinstance(results[1], StaleMaster)


async def test_a_master_that_was_followed_clears_no_mark_either(lab, ledgers):
    old, new = ledgers
    await old.enter(launch(0, master_epoch=1))
    await new.enter(launch(1, master_epoch=2))
    old.close_launch(launch(0, master_epoch=1))
    with pytest.raises(StaleMaster):
        await old.enter(launch(2, master_epoch=1))
    assert (await lab.ledger())["used"] == "0-1+"
    new.close_launch(launch(1, master_epoch=2))
    await new.enter(launch(2, master_epoch=2))
    assert (await lab.ledger())["used"] == "0+,1,2+"


async def test_a_ledger_that_cannot_be_read_or_written_is_tried_again_by_the_caller(server, lab, ledgers):
    ledger, _ = ledgers
    server.faults.inject(Fault(effect="status", plural="configmaps", code=503))
    with pytest.raises(Unavailable):
        await ledger.enter(launch(0))
    server.faults.withdraw()
    assert await ledger.enter(launch(0)) is LedgerEntry.OPEN
    await lab.cluster.delete(f"/api/v1/namespaces/{lab.namespace}/configmaps/{names.ledger_name(JOB)}")
    with pytest.raises(Unavailable, match=r"does not exist|cannot be written"):
        await ledger.enter(launch(1))


async def test_a_plan_runs_once_whatever_restarts_between(ledgers):
    one, other = ledgers
    assert await one.note_plan("uid-1", 1) is True
    assert await one.note_plan("uid-1", 1) is False
    assert await other.note_plan("uid-1", 2) is False
    with pytest.raises(Unavailable, match="A newer master"):
        await one.note_plan("uid-2", 1)


async def test_other_fields_of_the_ledger_stay(lab, ledgers):
    path = f"/api/v1/namespaces/{lab.namespace}/configmaps/{names.ledger_name(JOB)}"
    await lab.cluster.patch(path, {"metadata": {"labels": {"theirs": "x"}}, "data": {"note": "y"}})
    await ledgers[0].enter(launch(0))
    found = await lab.cluster.get(path)
    assert found["metadata"]["labels"]["theirs"] == "x"
    assert found["data"]["note"] == "y"
    assert found["metadata"]["ownerReferences"] == [names.owner_reference(JOB, lab.uids[JOB])]


async def test_a_ledger_that_was_deleted_and_made_anew_gets_back_what_its_master_knows(lab, ledgers):
    """A person deletes it, and the operator makes an empty one: no id may be used twice."""
    ledger, _ = ledgers
    path = f"/api/v1/namespaces/{lab.namespace}/configmaps"
    await ledger.enter(launch(0, master_epoch=3))
    await ledger.enter(remove(0, master_epoch=3))
    await ledger.enter(launch(5, master_epoch=3))
    await ledger.note_plan("uid-1", 3)
    former = await lab.cluster.get(f"{path}/{names.ledger_name(JOB)}")
    await lab.cluster.delete(f"{path}/{names.ledger_name(JOB)}")
    kept = {
        name: former["metadata"][name] for name in ("name", "labels", "ownerReferences") if name in former["metadata"]
    }
    await lab.create(path, {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept, "data": {}})
    assert await ledger.enter(launch(0, master_epoch=3)) is LedgerEntry.CLOSED
    assert await lab.ledger() == {"epoch": "3", "used": "0,5+", "plans": "uid-1"}
