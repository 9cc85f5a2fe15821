"""Custom resources: pruning, bounds, rules, status, scale, selectable fields. The definition is that of ElasticJob."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kubernetes.conformance.client import APPLY, GROUP, JSON_PATCH, STRATEGIC, Client, Json, fresh, job
from tests.kubernetes.conformance.conftest import define


async def test_a_custom_object_has_a_generation_that_counts_the_spec(api: Client, jobs: str) -> None:
    made = await api.create(jobs, {**job("a"), "status": {"phase": "Running"}})
    assert (made.status, made.meta["generation"]) == (201, 1)
    assert "status" not in made.body
    labelled = await api.patch(jobs, "a", {"metadata": {"labels": {"x": "y"}}})
    assert labelled.meta["generation"] == 1
    changed = await api.patch(jobs, "a", {"spec": {"suspend": True}})
    assert changed.meta["generation"] == 2
    status = await api.patch(jobs, "a", {"status": {"phase": "Running"}, "spec": {"suspend": False}}, sub="status")
    assert (status.status, status.meta["generation"]) == (200, 2)
    assert (status.body["status"]["phase"], status.body["spec"]["suspend"]) == ("Running", True)
    main = await api.patch(jobs, "a", {"status": {"phase": "Failed"}})
    assert main.body["status"]["phase"] == "Running"


async def test_a_replacement_of_a_custom_object_needs_a_version(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    new = await api.replace(jobs, job("a", suspend=True))
    assert (new.status, new.reason) == (422, "Invalid")
    assert "metadata.resourceVersion: Invalid value: 0: must be specified for an update" in new.message


async def test_unknown_fields_are_pruned_and_refused_if_asked(api: Client, jobs: str) -> None:
    made = await api.create(jobs, job("a", suspended=True))
    assert made.status == 201
    assert "suspended" not in made.body["spec"]
    assert 'unknown field \\"spec.suspended\\"' in made.headers["Warning"]
    strict = await api.create(jobs, job("b", suspended=True), fieldValidation="Strict")
    assert strict.status == 400
    assert 'strict decoding error: unknown field "spec.suspended"' in strict.message
    silent = await api.create(jobs, job("c", suspended=True), fieldValidation="Ignore")
    assert "Warning" not in silent.headers


async def test_a_strict_patch_refuses_unknown_fields(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    patched = await api.patch(jobs, "a", {"spec": {"suspended": True}}, fieldValidation="Strict")
    assert (patched.status, patched.reason) == (422, "Invalid")
    assert patched.message.endswith('strict decoding error: unknown field "spec.suspended"')
    lenient = await api.patch(jobs, "a", {"spec": {"suspended": True}})
    assert lenient.status == 200


async def test_an_apply_of_an_unknown_field_always_fails(api: Client, jobs: str) -> None:
    applied = await api.patch(jobs, "a", job("a", suspended=True), APPLY, fieldManager="x", fieldValidation="Ignore")
    assert applied.status == 500
    assert applied.message == (
        f"failed to create typed patch object (/a; {GROUP}/v1alpha1, Kind=ElasticJob): "
        ".spec.suspended: field not declared in schema"
    )
    await api.create(jobs, job("a"))
    body = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "a"},
        "status": {"phaze": "x", "phase": "y"},
    }
    applied = await api.patch(jobs, "a", body, APPLY, sub="status", fieldManager="x")
    assert applied.status == 500
    assert ".status.phaze: field not declared in schema" in applied.message


async def test_templates_keep_what_the_schema_does_not_know(api: Client, jobs: str) -> None:
    body = job("a")
    body["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["tolerations"] = [{"key": "gpu"}]
    made = await api.create(jobs, body)
    assert made.body["spec"] == body["spec"]


def with_worker(**fields: Any) -> Json:
    body = job("a")
    body["spec"]["replicaSpecs"]["worker"].update(fields)
    return body


def with_type(name: str, **fields: Any) -> Json:
    body = job("a")
    body["spec"]["replicaSpecs"][name] = {"replicas": 1, **fields}
    return body


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            job("a", faultyHosts="No"),
            'spec.faultyHosts: Unsupported value: "No": supported values: "Avoid", "Cordon", "Ignore"',
        ),
        (
            with_worker(replicas=-1),
            "spec.replicaSpecs.worker.replicas: Invalid value: -1: spec.replicaSpecs.worker.replicas in body should be greater than or equal to 0",
        ),
        (
            with_worker(replicas="two"),
            'spec.replicaSpecs.worker.replicas: Invalid value: "string": spec.replicaSpecs.worker.replicas in body must be of type integer: "string"',
        ),
        (job("a", managedBy="x" * 64), "spec.managedBy: Too long: may not be more than 63 bytes"),
        (
            {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "a"}, "spec": {}},
            "spec.replicaSpecs: Required value",
        ),
        (with_worker(minReplicas=3), "spec.replicaSpecs[worker]: Invalid value: minReplicas is at most replicas"),
        (with_type("wroker"), "spec.replicaSpecs: Invalid value: the types of replicas are"),
        (with_type("dlrover-master", replicas=2), "spec.replicaSpecs: Invalid value: a job has one master"),
        (
            with_worker(template={"spec": {"containers": [{"name": "a"}, {"name": "b"}]}}),
            "spec.replicaSpecs[worker].template.spec: Invalid value: several containers, none named main",
        ),
    ],
)
async def test_an_invalid_job_is_refused_with_the_field(api: Client, jobs: str, body: Json, sentence: str) -> None:
    made = await api.create(jobs, body)
    assert (made.status, made.reason) == (422, "Invalid")
    assert made.message.startswith('ElasticJob.elastic.iml.github.io "a" is invalid: ')
    assert sentence in made.message


async def test_a_long_name_is_refused_by_a_rule(api: Client, jobs: str) -> None:
    made = await api.create(jobs, job("x" * 38))
    assert made.status == 422
    assert "the name of a job has at most 37 characters" in made.message
    assert (await api.create(jobs, job("x" * 37))).status == 201


async def test_rules_compare_with_the_old_object(api: Client, jobs: str) -> None:
    made = await api.create(jobs, job("a", managedBy="other", distributionStrategy="AllreduceStrategy"))
    assert made.status == 201, made
    refused = await api.patch(jobs, "a", {"spec": {"managedBy": "another"}})
    assert refused.status == 422
    assert "spec: Invalid value: managedBy cannot change" in refused.message
    assert (await api.patch(jobs, "a", {"spec": {"distributionStrategy": "CustomStrategy"}})).status == 200
    await api.patch(jobs, "a", {"status": {"phase": "Running"}}, sub="status")
    refused = await api.patch(jobs, "a", {"spec": {"distributionStrategy": "AllreduceStrategy"}})
    assert "distributionStrategy cannot change while the job runs" in refused.message


async def test_the_status_is_checked_too(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    bad = await api.patch(jobs, "a", {"status": {"conditions": [{"type": "Valid", "status": "Maybe"}]}}, sub="status")
    assert bad.status == 422
    assert 'status.conditions[0].status: Unsupported value: "Maybe"' in bad.message


async def test_another_version_or_kind_in_the_body_is_refused(api: Client, jobs: str) -> None:
    made = await api.create(jobs, {**job("a"), "apiVersion": f"{GROUP}/v9"})
    assert (made.status, made.reason) == (400, "BadRequest")
    assert (
        f"the API version in the data ({GROUP}/v9) does not match the expected API version ({GROUP}/v1alpha1)"
        in made.message
    )
    made = await api.create(jobs, {**job("a"), "kind": "elasticjob"})
    assert (made.status, made.reason) == (422, "Invalid")
    assert made.message == f'elasticjob.{GROUP} "a" is invalid: kind: Invalid value: "elasticjob": must be ElasticJob'


async def test_scale_reads_and_writes_replicas(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    await api.patch(jobs, "a", {"status": {"workerReplicas": 1, "selector": "x=y"}}, sub="status")
    scale = await api.get(jobs, "a", sub="scale")
    assert (scale.body["kind"], scale.body["spec"]) == ("Scale", {"replicas": 2})
    assert scale.body["status"] == {"replicas": 1, "selector": "x=y"}
    scaled = await api.patch(jobs, "a", {"spec": {"replicas": 5}}, sub="scale")
    assert (scaled.status, scaled.body["spec"]) == (200, {"replicas": 5})
    found = await api.get(jobs, "a")
    assert (found.body["spec"]["replicaSpecs"]["worker"]["replicas"], found.meta["generation"]) == (5, 2)
    late = await api.replace(jobs, scale.body, sub="scale")
    assert late.status == 409


async def test_a_negative_scale_is_invalid(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    scaled = await api.patch(jobs, "a", {"spec": {"replicas": -1}}, sub="scale")
    assert (scaled.status, scaled.reason) == (422, "Invalid")
    assert ".spec.replicaSpecs.worker.replicas: Invalid value: -1: should be a non-negative integer" in scaled.message


async def test_selectable_fields_select(api: Client, jobs: str) -> None:
    for name in ("a", "b"):
        await api.create(jobs, job(name, suspend=name == "b"))
    await api.patch(jobs, "a", {"status": {"phase": "Running"}}, sub="status")
    for selector, wanted in {"status.phase=Running": "a", "spec.suspend=true": "b"}.items():
        found = await api.get(jobs, fieldSelector=selector)
        assert [item["metadata"]["name"] for item in found.body["items"]] == [wanted]
    assert (await api.get(jobs, fieldSelector="spec.optimizeMode=x")).status == 400


async def test_two_managers_write_one_status(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))

    async def apply(manager: str, **status: Any) -> Json:
        body = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "a"}, "status": status}
        answer = await api.patch(jobs, "a", body, APPLY, sub="status", fieldManager=manager)
        assert answer.status == 200, answer
        found: Json = answer.body["status"]
        return found

    def condition(kind: str, status: str) -> Json:
        return {"type": kind, "status": status}

    await apply("operator", phase="Running", conditions=[condition("Valid", "True"), condition("Running", "True")])
    status = await apply("master", round=3, conditions=[condition("JournalKept", "True")])
    assert (status["phase"], status["round"]) == ("Running", 3)
    status = await apply("operator", phase="Failed", conditions=[condition("Valid", "True")])
    assert {one["type"] for one in status["conditions"]} == {"Valid", "JournalKept"}
    assert (status["phase"], status["round"]) == ("Failed", 3)


async def test_a_strategic_patch_is_for_built_in_objects_only(api: Client, jobs: str) -> None:
    await api.create(jobs, job("a"))
    patched = await api.patch(jobs, "a", {"spec": {}}, STRATEGIC)
    assert patched.status == 415
    assert (
        await api.patch(jobs, "a", [{"op": "add", "path": "/spec/suspend", "value": True}], JSON_PATCH)
    ).status == 200


def definition(plural: str, schema: Json) -> Json:
    group = "conformance.example.org"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {
                "plural": plural,
                "singular": plural[:-1],
                "kind": plural.capitalize(),
                "listKind": f"{plural.capitalize()}List",
            },
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


async def test_defaults_fill_in_what_is_missing(api: Client) -> None:
    plural = fresh("defaults").replace("-", "") + "s"
    inner = {"type": "object", "properties": {"size": {"type": "integer", "default": 3}, "name": {"type": "string"}}}
    schema = {"type": "object", "properties": {"spec": inner}}
    path = await define(api, definition(plural, schema))
    kind = plural.capitalize()
    body = {"apiVersion": "conformance.example.org/v1", "kind": kind, "metadata": {"name": "a"}, "spec": {"name": "x"}}
    made = await api.create(path, body)
    assert made.body["spec"] == {"name": "x", "size": 3}
    without = await api.create(path, {**body, "metadata": {"name": "b"}, "spec": {"size": 1}})
    assert without.body["spec"] == {"size": 1}
    await api.delete(
        "apiextensions.k8s.io/v1/customresourcedefinitions", f"{plural}.conformance.example.org", namespace=""
    )
    await api.soon(lambda: api.get(path), lambda answer: answer.status == 404)


@pytest.mark.parametrize("rule", ["self.none > 1", "nonesuch(self.size)", "self.size >", "other.size > 1"])
async def test_a_rule_that_does_not_compile_is_refused(api: Client, rule: str) -> None:
    plural = fresh("rules").replace("-", "") + "s"
    spec = {"type": "object", "properties": {"size": {"type": "integer"}}, "x-kubernetes-validations": [{"rule": rule}]}
    made = await api.create(
        "apiextensions.k8s.io/v1/customresourcedefinitions",
        definition(plural, {"type": "object", "properties": {"spec": spec}}),
        namespace="",
    )
    assert (made.status, made.reason) == (422, "Invalid")
    assert "x-kubernetes-validations[0].rule: Invalid value" in made.message
    assert "compilation failed" in made.message
