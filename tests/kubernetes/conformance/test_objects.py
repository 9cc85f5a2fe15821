"""Creation, replacement, optimistic locking, names, dry runs."""

from __future__ import annotations

import pytest

from tests.kubernetes.conformance.client import Client, config_map, pod


async def test_a_created_object_gets_uid_version_and_time(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", {"x": "1"}))
    assert made.status == 201, made
    assert {"uid", "resourceVersion", "creationTimestamp"} <= set(made.meta)
    assert made.meta["namespace"] == api.namespace
    found = await api.get("configmaps", "a")
    assert (found.status, found.body) == (200, made.body)
    assert found.body["kind"] == "ConfigMap"


async def test_a_second_create_is_a_conflict_with_its_own_reason(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    again = await api.create("configmaps", config_map("a"))
    assert (again.status, again.reason, again.message) == (409, "AlreadyExists", 'configmaps "a" already exists')
    assert again.body["details"] == {"name": "a", "kind": "configmaps"}


async def test_what_is_not_there_is_not_found(api: Client) -> None:
    found = await api.get("configmaps", "a")
    assert (found.status, found.reason, found.message) == (404, "NotFound", 'configmaps "a" not found')
    assert (await api.delete("configmaps", "a")).status == 404
    assert (await api.patch("configmaps", "a", {"data": {}})).status == 404
    replaced = await api.replace("configmaps", config_map("a"))
    assert replaced.status == 404


async def test_an_unknown_resource_is_not_found(api: Client) -> None:
    found = await api.get("nothings")
    assert (found.status, found.reason) == (404, "NotFound")
    assert found.message == "the server could not find the requested resource"
    await api.create("configmaps", config_map("a"))
    assert (
        await api.get("configmaps", "a", sub="status")
    ).message == "the server could not find the requested resource"


async def test_an_unknown_group_is_answered_with_plain_text(api: Client) -> None:
    found = await api.get("no.such.group/v1/things")
    assert (found.status, found.body) == (404, "404 page not found\n")


async def test_a_long_name_is_invalid(api: Client) -> None:
    made = await api.create("configmaps", config_map("x" * 254))
    assert made.message.endswith(": must be no more than 253 characters")


async def test_a_bad_key_of_data_is_invalid(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", {"a b": "1"}))
    assert (made.status, made.reason) == (422, "Invalid")
    assert 'data[a b]: Invalid value: "a b": a valid config key must consist of' in made.message


async def test_a_missing_namespace_is_named(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"), namespace="no-such-namespace")
    assert (made.status, made.message) == (404, 'namespaces "no-such-namespace" not found')


async def test_a_namespace_in_the_body_must_fit(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", namespace="other"))
    assert (made.status, made.reason) == (400, "BadRequest")
    assert "does not match the namespace" in made.message


async def test_a_generated_name_has_the_prefix(api: Client) -> None:
    made = await api.create("configmaps", {"metadata": {"generateName": "job-"}})
    assert made.status == 201, made
    assert made.meta["name"].startswith("job-")
    assert len(made.meta["name"]) == len("job-") + 5


async def test_no_name_is_invalid(api: Client) -> None:
    made = await api.create("configmaps", {"metadata": {}})
    assert (made.status, made.reason) == (422, "Invalid")
    assert "metadata.name: Required value: name or generateName is required" in made.message


async def test_a_bad_name_is_invalid_and_says_the_rule(api: Client) -> None:
    made = await api.create("configmaps", config_map("A_b"))
    assert made.status == 422
    assert made.message.startswith(
        'ConfigMap "A_b" is invalid: metadata.name: Invalid value: "A_b": a lowercase RFC 1123 subdomain'
    )
    cause = made.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldValueInvalid", "metadata.name")


async def test_a_bad_label_is_invalid(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", labels={"job": "not a label"}))
    assert made.status == 422
    assert (
        'metadata.labels: Invalid value: "not a label": a valid label must be an empty string or consist of'
        in made.message
    )


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ({"job": "x" * 64}, "must be no more than 63 bytes"),
        ({"x" * 64: "a"}, "name part must be no more than 63 bytes"),
        ({"a/b/c": "d"}, "a valid label key must consist of alphanumeric characters"),
    ],
)
async def test_a_label_that_is_too_long_is_invalid(api: Client, labels: dict[str, str], sentence: str) -> None:
    made = await api.create("configmaps", config_map("a", labels=labels))
    assert made.status == 422
    assert sentence in made.message


async def test_a_version_is_not_allowed_in_a_create(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", resourceVersion="7"))
    assert made.status == 500
    assert "resourceVersion should not be set on objects to be created" in made.message


async def test_a_replacement_of_an_old_version_is_a_conflict(api: Client) -> None:
    old = await api.create("configmaps", config_map("a", {"x": "1"}))
    new = await api.replace("configmaps", {**old.body, "data": {"x": "2"}})
    assert new.status == 200
    assert int(new.meta["resourceVersion"]) > int(old.meta["resourceVersion"])
    late = await api.replace("configmaps", {**old.body, "data": {"x": "3"}})
    assert (late.status, late.reason) == (409, "Conflict")
    assert late.message == (
        'Operation cannot be fulfilled on configmaps "a": the object has been modified; '
        "please apply your changes to the latest version and try again"
    )
    assert (await api.get("configmaps", "a")).body["data"] == {"x": "2"}


async def test_a_replacement_without_a_version_wins(api: Client) -> None:
    await api.create("configmaps", config_map("a", {"x": "1"}))
    new = await api.replace("configmaps", config_map("a", {"x": "2"}))
    assert (new.status, new.body["data"]) == (200, {"x": "2"})


async def test_a_replacement_of_another_uid_is_a_conflict(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    new = await api.replace("configmaps", config_map("a", uid="11111111-2222-3333-4444-555555555555"))
    assert (new.status, new.reason) == (409, "Conflict")
    assert "Precondition failed: UID in precondition: 11111111-2222-3333-4444-555555555555" in new.message


async def test_a_replacement_must_have_the_name_of_its_path(api: Client) -> None:
    await api.create("configmaps", config_map("a"))
    new = await api.call("PUT", api.path("configmaps", "a"), config_map("b"))
    assert (new.status, new.reason) == (400, "BadRequest")
    assert "the name of the object (b) does not match the name on the URL (a)" in new.message


async def test_a_change_that_changes_nothing_keeps_the_version(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", {"x": "1"}))
    same = await api.replace("configmaps", made.body)
    assert (same.status, same.meta["resourceVersion"]) == (200, made.meta["resourceVersion"])
    same = await api.patch("configmaps", "a", {"data": {"x": "1"}})
    assert same.meta["resourceVersion"] == made.meta["resourceVersion"]


async def test_uid_and_creation_time_cannot_be_changed(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"))
    new = await api.patch(
        "configmaps", "a", {"metadata": {"creationTimestamp": "2001-01-01T00:00:00Z"}, "data": {"x": "1"}}
    )
    assert new.status == 200
    assert new.meta["creationTimestamp"] == made.meta["creationTimestamp"]


async def test_a_dry_run_answers_and_stores_nothing(api: Client) -> None:
    made = await api.create("configmaps", config_map("a", {"x": "1"}), dryRun="All")
    assert (made.status, made.body["data"]) == (201, {"x": "1"})
    assert "uid" in made.meta
    assert "resourceVersion" not in made.meta
    assert (await api.get("configmaps", "a")).status == 404
    await api.create("configmaps", config_map("a", {"x": "1"}))
    changed = await api.patch("configmaps", "a", {"data": {"x": "2"}}, dryRun="All")
    assert changed.body["data"] == {"x": "2"}
    deleted = await api.delete("configmaps", "a", dryRun="All")
    assert deleted.status == 200
    assert (await api.get("configmaps", "a")).body["data"] == {"x": "1"}


async def test_a_dry_run_finds_what_is_wrong(api: Client) -> None:
    bad = pod("a")
    del bad["spec"]["containers"]
    made = await api.create("pods", bad, dryRun="All")
    assert (made.status, made.message) == (422, 'Pod "a" is invalid: spec.containers: Required value')


async def test_an_unknown_dry_run_is_invalid(api: Client) -> None:
    made = await api.create("configmaps", config_map("a"), dryRun="Some")
    assert made.status == 422


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"'])
async def test_a_body_that_is_no_object_is_refused(api: Client, body: bytes) -> None:
    made = await api.call("POST", api.path("configmaps"), body)
    assert (made.status, made.reason) == (400, "BadRequest")


async def test_another_kind_in_the_body_is_refused(api: Client) -> None:
    made = await api.create("configmaps", {**config_map("a"), "apiVersion": "v2"})
    assert made.status == 400
    assert 'no kind "ConfigMap" is registered for version "v2"' in made.message
    made = await api.create("configmaps", {**config_map("a"), "kind": "Secret"})
    assert (made.status, made.reason) == (400, "BadRequest")


async def test_secrets_take_plain_text_and_give_base64(api: Client) -> None:
    made = await api.create("secrets", {"metadata": {"name": "a"}, "stringData": {"token": "abc"}})
    assert made.status == 201, made
    assert (made.body["data"], made.body["type"]) == ({"token": "YWJj"}, "Opaque")
    assert "stringData" not in made.body


async def test_a_version_says_which_server_it_is(api: Client) -> None:
    answer = await api.call("GET", "/version")
    assert answer.status == 200
    assert answer.body["major"] == "1"
