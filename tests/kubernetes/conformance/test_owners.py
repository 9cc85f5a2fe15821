"""Owners and namespaces: what goes when something else goes."""

from __future__ import annotations

import pytest

from tests.kubernetes.conformance.client import Answer, Client, Json, config_map, pod

pytestmark = pytest.mark.usefixtures("controllers")


def owned_by(owner: Answer, **more: object) -> list[Json]:
    return [{"apiVersion": "v1", "kind": "ConfigMap", "name": owner.meta["name"], "uid": owner.meta["uid"], **more}]


async def gone(api: Client, plural: str, name: str) -> None:
    await api.soon(lambda: api.get(plural, name), lambda answer: answer.status == 404)


async def test_dependents_go_after_their_owner(api: Client) -> None:
    owner = await api.create("configmaps", config_map("owner"))
    await api.create("pods", pod("a", ownerReferences=owned_by(owner, controller=True, blockOwnerDeletion=True)))
    await api.create("configmaps", config_map("b", ownerReferences=owned_by(owner)))
    await api.delete("configmaps", "owner", {"propagationPolicy": "Background"})
    await gone(api, "configmaps", "owner")
    await gone(api, "pods", "a")
    await gone(api, "configmaps", "b")


async def test_the_owner_goes_last_in_the_foreground(api: Client) -> None:
    owner = await api.create("configmaps", config_map("owner"))
    held = config_map("a", ownerReferences=owned_by(owner, blockOwnerDeletion=True), finalizers=["example.org/hold"])
    await api.create("configmaps", held)
    await api.delete("configmaps", "owner", {"propagationPolicy": "Foreground"})
    waiting = await api.get("configmaps", "owner")
    assert waiting.meta["finalizers"] == ["foregroundDeletion"]
    await api.soon(lambda: api.get("configmaps", "a"), lambda answer: "deletionTimestamp" in answer.meta)
    assert (await api.get("configmaps", "owner")).status == 200
    await api.patch("configmaps", "a", {"metadata": {"finalizers": None}})
    await gone(api, "configmaps", "owner")


async def test_orphans_stay(api: Client) -> None:
    owner = await api.create("configmaps", config_map("owner"))
    await api.create("configmaps", config_map("a", ownerReferences=owned_by(owner)))
    await api.delete("configmaps", "owner", {"propagationPolicy": "Orphan"})
    await gone(api, "configmaps", "owner")
    orphan = await api.get("configmaps", "a")
    assert orphan.status == 200
    assert not orphan.meta.get("ownerReferences")


async def test_an_object_whose_owner_never_was_goes(api: Client) -> None:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "11111111-2222-3333-4444-555555555555"}
    await api.create("configmaps", config_map("a", ownerReferences=[reference]))
    await gone(api, "configmaps", "a")


async def test_an_object_with_a_living_owner_stays(api: Client) -> None:
    first = await api.create("configmaps", config_map("first"))
    second = await api.create("configmaps", config_map("second"))
    await api.create("configmaps", config_map("a", ownerReferences=owned_by(first) + owned_by(second)))
    await api.delete("configmaps", "first")
    left = await api.soon(
        lambda: api.get("configmaps", "a"), lambda answer: len(answer.meta.get("ownerReferences", [])) == 1
    )
    assert left.meta["ownerReferences"] == owned_by(second)


async def test_a_deleted_namespace_goes_with_its_content(api: Client) -> None:
    await api.create("configmaps", config_map("a", finalizers=["example.org/hold"]))
    asked = await api.delete("namespaces", api.namespace, namespace="")
    assert asked.status == 200
    assert asked.body["status"]["phase"] == "Terminating"
    refused = await api.create("configmaps", config_map("b"))
    assert (refused.status, refused.reason) == (403, "Forbidden")
    assert (
        f"unable to create new content in namespace {api.namespace} because it is being terminated" in refused.message
    )
    await api.soon(lambda: api.get("configmaps", "a"), lambda answer: "deletionTimestamp" in answer.meta)
    await api.patch("configmaps", "a", {"metadata": {"finalizers": None}})
    await api.soon(lambda: api.get("namespaces", api.namespace, namespace=""), lambda answer: answer.status == 404)


async def test_two_controllers_are_invalid(api: Client) -> None:
    owner = await api.create("configmaps", config_map("owner"))
    twice = [*owned_by(owner, controller=True), {**owned_by(owner, controller=True)[0], "name": "other"}]
    made = await api.create("configmaps", config_map("a", ownerReferences=twice))
    assert made.status == 422
    assert "Only one reference can have Controller set to true" in made.message
