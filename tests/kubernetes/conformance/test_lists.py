"""Lists: selectors, pages, versions."""

from __future__ import annotations

import base64
import json

import pytest

from tests.kubernetes.conformance.client import Client, Json, config_map, job, pod


def names(body: Json) -> list[str]:
    return [item["metadata"]["name"] for item in body["items"] if item["metadata"]["name"] != "kube-root-ca.crt"]


async def some(api: Client, count: int) -> None:
    for number in range(count):
        made = await api.create("configmaps", config_map(f"m{number}", labels={"set": "some", "number": str(number)}))
        assert made.status == 201, made


async def test_a_list_has_a_version_and_its_items_in_order(api: Client) -> None:
    for name in ("b", "a", "c"):
        await api.create("configmaps", config_map(name))
    found = await api.get("configmaps")
    assert found.status == 200
    assert (found.body["kind"], found.body["apiVersion"]) == ("ConfigMapList", "v1")
    assert names(found.body) == ["a", "b", "c"]
    assert int(found.meta["resourceVersion"]) >= max(
        int(item["metadata"]["resourceVersion"]) for item in found.body["items"]
    )


async def test_a_list_over_all_namespaces_has_this_one(api: Client) -> None:
    await api.create("configmaps", config_map("mine", labels={"space": api.namespace}))
    found = await api.get("configmaps", namespace="", labelSelector=f"space={api.namespace}")
    assert names(found.body) == ["mine"]


@pytest.mark.parametrize(
    ("selector", "wanted"),
    [
        ("color=red", ["a"]),
        ("color==red", ["a"]),
        ("color!=red", ["b", "c"]),
        ("color in (red,blue)", ["a", "b"]),
        ("color notin (red)", ["b", "c"]),
        ("color", ["a", "b"]),
        ("!color", ["c"]),
        ("color=blue,size=1", ["b"]),
        ("color=blue,size=2", []),
    ],
)
async def test_label_selectors(api: Client, selector: str, wanted: list[str]) -> None:
    for name, labels in {"a": {"color": "red"}, "b": {"color": "blue", "size": "1"}, "c": {}}.items():
        await api.create("configmaps", config_map(name, labels=labels))
    found = await api.get("configmaps", labelSelector=selector)
    assert names(found.body) == wanted


async def test_a_bad_label_selector_is_refused(api: Client) -> None:
    found = await api.get("configmaps", labelSelector="a in b")
    assert (found.status, found.reason) == (400, "BadRequest")


async def test_field_selectors_of_names_and_phases(api: Client) -> None:
    for name in ("a", "b"):
        await api.create("pods", pod(name))
    await api.patch("pods", "b", {"status": {"phase": "Running"}}, sub="status")
    assert names((await api.get("pods", fieldSelector="metadata.name=a")).body) == ["a"]
    assert names((await api.get("pods", fieldSelector="status.phase=Running")).body) == ["b"]
    assert names((await api.get("pods", fieldSelector="status.phase!=Running")).body) == ["a"]
    assert names((await api.get("pods", fieldSelector="spec.nodeName=,metadata.name!=a")).body) == ["b"]


async def test_an_unknown_field_in_a_selector_is_refused(api: Client) -> None:
    found = await api.get("pods", fieldSelector="spec.color=red")
    assert (found.status, found.reason) == (400, "BadRequest")
    assert "field label not supported: spec.color" in found.message


async def test_pages_together_are_the_list_of_the_first_page(api: Client) -> None:
    await some(api, 5)
    page = await api.get("configmaps", limit=2, labelSelector="set=some")
    seen, versions = names(page.body), {page.meta["resourceVersion"]}
    # What happens after the first page is not in the later ones.
    await api.create("configmaps", config_map("m9", labels={"set": "some"}))
    await api.delete("configmaps", "m4")
    while token := page.meta.get("continue"):
        page = await api.get("configmaps", limit=2, labelSelector="set=some", **{"continue": token})
        assert page.status == 200, page
        seen += names(page.body)
        versions.add(page.meta["resourceVersion"])
    assert seen == ["m0", "m1", "m2", "m3", "m4"]
    assert len(versions) == 1


async def test_a_page_says_how_many_are_left(api: Client) -> None:
    await some(api, 5)
    every = await api.get("configmaps")
    page = await api.get("configmaps", limit=2)
    assert page.meta["remainingItemCount"] == len(every.body["items"]) - 2
    selected = await api.get("configmaps", limit=2, labelSelector="set=some")
    assert "remainingItemCount" not in selected.meta


async def test_an_old_page_token_is_gone_and_the_answer_has_a_new_one(api: Client, jobs: str) -> None:
    """Asked of a custom resource: a real server keeps snapshots of its caches, and this one's cache began late."""
    for number in range(4):
        made = await api.create(jobs, job(f"m{number}"))
        assert made.status == 201, made
    page = await api.get(jobs, limit=2)
    api.server.compact()
    token = older(page.meta["continue"])
    late = await api.get(jobs, limit=2, **{"continue": token})
    assert (late.status, late.reason) == (410, "Expired")
    assert late.message.startswith("The provided continue parameter is too old to display a consistent list result.")
    rest = await api.get(jobs, **{"continue": late.meta["continue"]})
    assert names(rest.body) == ["m2", "m3"]


def older(token: str) -> str:
    """The same token for a version that no server has any more."""
    content = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    content["rv"] = 2
    return base64.urlsafe_b64encode(json.dumps(content).encode()).decode().rstrip("=")


async def test_a_broken_page_token_is_refused(api: Client) -> None:
    page = await api.get("configmaps", **{"continue": "abc"})
    assert (page.status, page.reason) == (400, "BadRequest")


async def test_a_list_of_an_exact_old_version_is_gone(api: Client, jobs: str) -> None:
    api.server.compact()
    found = await api.get(jobs, resourceVersion="2", resourceVersionMatch="Exact")
    assert (found.status, found.reason) == (410, "Expired")


async def test_a_list_at_an_exact_version_shows_the_past(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"))
    await api.create("configmaps", config_map("b"))
    found = await api.get("configmaps", resourceVersion=made.meta["resourceVersion"], resourceVersionMatch="Exact")
    assert names(found.body) == ["a"]


async def test_a_list_of_any_version_is_answered(api: Client) -> None:
    found = await api.get("configmaps", resourceVersion="0")
    assert found.status == 200


async def test_a_list_of_a_version_that_is_not_yet_there_times_out(api: Client) -> None:
    found = await api.get("configmaps", resourceVersion="999999999", resourceVersionMatch="NotOlderThan")
    assert (found.status, found.reason) == (504, "Timeout")
    assert "Too large resource version: 999999999" in found.message
    assert found.body["details"]["causes"][0]["reason"] == "ResourceVersionTooLarge"


async def test_a_match_without_a_version_is_invalid(api: Client) -> None:
    found = await api.get("configmaps", resourceVersionMatch="Exact")
    assert (found.status, found.reason) == (422, "Invalid")
    assert "resourceVersionMatch is forbidden unless resourceVersion is provided" in found.message


async def test_a_version_that_is_no_number_is_refused(api: Client) -> None:
    found = await api.get("configmaps", resourceVersion="abc")
    assert (found.status, found.reason) == (400, "BadRequest")
    assert found.message.startswith('invalid resource version: resourceVersion: Invalid value: "abc"')
