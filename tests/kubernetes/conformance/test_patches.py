"""Merge, JSON and strategic patches, and server-side apply."""

from __future__ import annotations

from typing import Any

from tests.kubernetes.conformance.client import APPLY, JSON_PATCH, MERGE, STRATEGIC, Client, Json, config_map, pod


async def test_a_merge_patch_removes_with_null_and_replaces_lists(api: Client) -> None:
    await api.create("configmaps", config_map("a", {"x": "1", "y": "2"}, finalizers=["example.org/a"]))
    new = await api.patch("configmaps", "a", {"data": {"x": None, "z": "3"}, "metadata": {"finalizers": []}}, MERGE)
    assert (new.status, new.body["data"]) == (200, {"y": "2", "z": "3"})
    assert not new.meta.get("finalizers")


async def test_a_merge_patch_with_an_old_version_is_a_conflict(api: Client) -> None:
    old = await api.create("configmaps", config_map("a", {"x": "1"}))
    await api.patch("configmaps", "a", {"data": {"x": "2"}})
    late = await api.patch(
        "configmaps", "a", {"metadata": {"resourceVersion": old.meta["resourceVersion"]}, "data": {"x": "3"}}
    )
    assert (late.status, late.reason) == (409, "Conflict")


async def test_a_json_patch_tests_and_changes(api: Client) -> None:
    await api.create("configmaps", config_map("a", {"x": "1"}))
    steps = [{"op": "test", "path": "/data/x", "value": "1"}, {"op": "add", "path": "/data/y", "value": "2"}]
    new = await api.patch("configmaps", "a", steps, JSON_PATCH)
    assert (new.status, new.body["data"]) == (200, {"x": "1", "y": "2"})
    failed = await api.patch("configmaps", "a", [{"op": "test", "path": "/data/x", "value": "7"}], JSON_PATCH)
    assert (failed.status, failed.reason) == (422, "Invalid")
    failed = await api.patch("configmaps", "a", [{"op": "remove", "path": "/data/none"}], JSON_PATCH)
    assert failed.status == 422


async def test_a_strategic_patch_joins_conditions_by_type(api: Client) -> None:
    await api.create("pods", pod("a"))
    for kind, status in (("Ready", "False"), ("PodScheduled", "True"), ("Ready", "True")):
        new = await api.patch(
            "pods", "a", {"status": {"conditions": [{"type": kind, "status": status}]}}, STRATEGIC, sub="status"
        )
        assert new.status == 200, new
    found = {one["type"]: one["status"] for one in new.body["status"]["conditions"]}
    assert found == {"Ready": "True", "PodScheduled": "True"}


async def test_an_unknown_kind_of_patch_is_refused(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    new = await api.patch("configmaps", "a", {"data": {}}, "application/json")
    assert (new.status, new.reason) == (415, "UnsupportedMediaType")


def applied(data: dict[str, str]) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}


async def apply(api: Client, manager: str, data: dict[str, str], **query: Any) -> tuple[int, Json]:
    answer = await api.patch("configmaps", "a", applied(data), APPLY, fieldManager=manager, **query)
    return answer.status, answer.body


async def test_an_apply_makes_what_is_not_there(api: Client) -> None:
    status, body = await apply(api, "one", {"x": "1"})
    assert (status, body["data"]) == (201, {"x": "1"})
    entry = body["metadata"]["managedFields"][0]
    assert (entry["manager"], entry["operation"], entry["fieldsV1"]) == ("one", "Apply", {"f:data": {"f:x": {}}})


async def test_two_managers_own_disjoint_fields(api: Client) -> None:
    await apply(api, "one", {"x": "1"})
    status, body = await apply(api, "two", {"y": "2"})
    assert (status, body["data"]) == (200, {"x": "1", "y": "2"})
    status, body = await apply(api, "one", {"x": "3"})
    assert (status, body["data"]) == (200, {"x": "3", "y": "2"})


async def test_a_field_that_its_owner_no_longer_applies_goes(api: Client) -> None:
    await apply(api, "one", {"x": "1", "y": "2"})
    status, body = await apply(api, "one", {"x": "1"})
    assert (status, body["data"]) == (200, {"x": "1"})


async def test_a_field_that_two_own_stays_when_one_lets_go(api: Client) -> None:
    await apply(api, "one", {"x": "1", "y": "2"})
    await apply(api, "two", {"x": "1"})
    _, body = await apply(api, "one", {"y": "2"})
    assert body["data"] == {"x": "1", "y": "2"}


async def test_an_apply_of_another_owners_field_is_a_conflict_unless_forced(api: Client) -> None:
    await apply(api, "one", {"x": "1"})
    status, body = await apply(api, "two", {"x": "2"})
    assert (status, body["reason"]) == (409, "Conflict")
    assert body["message"] == 'Apply failed with 1 conflict: conflict with "one": .data.x'
    cause = {"reason": "FieldManagerConflict", "message": 'conflict with "one"', "field": ".data.x"}
    assert body["details"]["causes"] == [cause]
    status, body = await apply(api, "two", {"x": "2"}, force=True)
    assert (status, body["data"]) == (200, {"x": "2"})
    assert [entry["manager"] for entry in body["metadata"]["managedFields"]] == ["two"]


async def test_an_update_takes_the_changed_fields(api: Client) -> None:
    await apply(api, "one", {"x": "1", "y": "1"})
    await api.patch("configmaps", "a", {"data": {"x": "2"}}, fieldManager="hand")
    status, body = await apply(api, "one", {"x": "1", "y": "1"})
    assert (status, body["reason"]) == (409, "Conflict")
    assert 'conflict with "hand" using v1' in body["message"]
    assert body["message"].endswith(": .data.x")


async def test_an_apply_that_changes_nothing_keeps_the_version(api: Client) -> None:
    _, first = await apply(api, "one", {"x": "1"})
    _, second = await apply(api, "one", {"x": "1"})
    assert first["metadata"]["resourceVersion"] == second["metadata"]["resourceVersion"]


async def test_an_apply_needs_a_manager(api: Client) -> None:
    answer = await api.patch("configmaps", "a", applied({}), APPLY)
    assert answer.status == 422
    assert "fieldManager: Required value: is required for apply patch" in answer.message
