"""Deletion: grace, finalizers, preconditions, collections."""

from __future__ import annotations

from tests.kubernetes.conformance.client import Client, config_map, pod

SCHEDULED = {"nodeName": "no-such-node", "terminationGracePeriodSeconds": 40}


async def test_a_deletion_answers_with_a_status_that_has_the_uid(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"))
    gone = await api.delete("configmaps", "a")
    assert gone.status == 200
    assert (gone.body["kind"], gone.body["status"]) == ("Status", "Success")
    assert gone.body["details"] == {"name": "a", "kind": "configmaps", "uid": made.meta["uid"]}
    assert (await api.get("configmaps", "a")).status == 404


async def test_a_scheduled_pod_gets_its_grace(api: Client) -> None:
    await api.create("pods", pod("a", spec=SCHEDULED))
    gone = await api.delete("pods", "a")
    assert gone.status == 200
    assert gone.body["kind"] == "Pod"
    assert gone.meta["deletionGracePeriodSeconds"] == 40
    assert gone.meta["deletionTimestamp"] > gone.meta["creationTimestamp"]
    assert gone.meta["generation"] == 2
    still = await api.get("pods", "a")
    assert still.meta["deletionTimestamp"] == gone.meta["deletionTimestamp"]


async def test_a_grace_can_only_become_shorter(api: Client) -> None:
    await api.create("pods", pod("a", spec=SCHEDULED))
    await api.delete("pods", "a", gracePeriodSeconds=20)
    longer = await api.delete("pods", "a", {"gracePeriodSeconds": 30})
    assert longer.status == 200
    assert (await api.get("pods", "a")).meta["deletionGracePeriodSeconds"] == 20
    shorter = await api.delete("pods", "a", {"gracePeriodSeconds": 10})
    assert shorter.meta["deletionGracePeriodSeconds"] == 10
    assert (await api.delete("pods", "a", {"gracePeriodSeconds": 0})).status == 200
    assert (await api.get("pods", "a")).status == 404


async def test_a_pod_without_a_node_goes_at_once(api: Client) -> None:
    await api.create("pods", pod("a"))
    begin = (await api.get("pods")).meta["resourceVersion"]
    gone = await api.delete("pods", "a")
    assert (gone.status, gone.body["kind"]) == (200, "Pod")
    assert (await api.get("pods", "a")).status == 404
    async with api.watch("pods", resourceVersion=begin) as watch:
        modified, deleted = await watch.next(), await watch.next()
        assert modified is not None
        assert deleted is not None
        assert (modified["type"], deleted["type"]) == ("MODIFIED", "DELETED")
        assert modified["object"]["metadata"]["deletionGracePeriodSeconds"] == 0


async def test_a_pod_that_has_ended_goes_at_once(api: Client) -> None:
    await api.create("pods", pod("a", spec=SCHEDULED))
    await api.patch("pods", "a", {"status": {"phase": "Failed"}}, sub="status")
    await api.delete("pods", "a")
    assert (await api.get("pods", "a")).status == 404


async def test_a_terminating_pod_still_owns_its_name(api: Client) -> None:
    await api.create("pods", pod("a", spec=SCHEDULED))
    await api.delete("pods", "a")
    again = await api.create("pods", pod("a"))
    assert (again.status, again.reason) == (409, "AlreadyExists")
    assert again.message == 'object is being deleted: pods "a" already exists'


async def test_a_deletion_for_another_uid_is_a_conflict(api: Client) -> None:
    made = await api.create("pods", pod("a"))
    late = await api.delete("pods", "a", {"preconditions": {"uid": "11111111-2222-3333-4444-555555555555"}})
    assert (late.status, late.reason) == (409, "Conflict")
    assert late.message == (
        'Operation cannot be fulfilled on Pod "a": the UID in the precondition (11111111-2222-3333-4444-555555555555) does not match '
        f"the UID in record ({made.meta['uid']}). The object might have been deleted and then recreated"
    )
    right = await api.delete("pods", "a", {"preconditions": {"uid": made.meta["uid"]}})
    assert right.status == 200


async def test_a_deletion_of_another_version_is_a_conflict(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"))
    late = await api.delete("configmaps", "a", {"preconditions": {"resourceVersion": "1"}})
    assert (late.status, late.reason) == (409, "Conflict")
    right = await api.delete("configmaps", "a", {"preconditions": {"resourceVersion": made.meta["resourceVersion"]}})
    assert right.status == 200


async def test_finalizers_hold_an_object_until_they_are_gone(api: Client) -> None:
    await api.create("configmaps", config_map("a", finalizers=["example.org/hold"]))
    asked = await api.delete("configmaps", "a")
    assert asked.status == 200
    held = await api.get("configmaps", "a")
    assert held.meta["deletionGracePeriodSeconds"] == 0
    more = await api.patch("configmaps", "a", {"metadata": {"finalizers": ["example.org/hold", "example.org/more"]}})
    assert more.status == 422
    assert (
        "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted" in more.message
    )
    freed = await api.patch("configmaps", "a", {"metadata": {"finalizers": None}})
    assert freed.status == 200
    assert (await api.get("configmaps", "a")).status == 404


async def test_a_collection_is_deleted_by_selector(api: Client) -> None:
    for name, label in {"a": "1", "b": "1", "c": "2"}.items():
        await api.create("configmaps", config_map(name, labels={"set": label}))
    gone = await api.delete("configmaps", labelSelector="set=1")
    assert gone.status == 200, gone
    left = await api.get("configmaps", labelSelector="set")
    assert [item["metadata"]["name"] for item in left.body["items"]] == ["c"]


async def test_options_in_the_body_of_a_deletion_hide_those_of_the_query(api: Client) -> None:
    """A deletion with a body and `dryRun` in the query is no dry run."""
    await api.create("configmaps", config_map("a"))
    gone = await api.delete("configmaps", "a", {"kind": "DeleteOptions", "apiVersion": "v1"}, dryRun="All")
    assert gone.status == 200
    assert (await api.get("configmaps", "a")).status == 404


async def test_an_unknown_propagation_is_invalid(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    asked = await api.delete("configmaps", "a", {"propagationPolicy": "Never"})
    assert (asked.status, asked.reason) == (422, "Invalid")
    assert (
        'propagationPolicy: Unsupported value: "Never": supported values: "Foreground", "Background", "Orphan"'
        in asked.message
    )
    assert (await api.get("configmaps", "a")).status == 200
